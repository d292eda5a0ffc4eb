//! Answers to queries from other nodes of the job; see [`peers`](super::peers).

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;
use xlaunch_proto::v1::query::Question;
use xlaunch_proto::v1::query_reply::Answer;
use xlaunch_proto::v1::{LogsRequest, Query, StacksRequest};

use super::local_queries::Service;
use super::peers::{Peers, WINDOW};

/// An asker that is still waiting says so more often than this.
const ASKER_TIMEOUT: Duration = Duration::from_secs(30);

type Answers = Pin<Box<dyn Stream<Item = Result<Answer, Status>> + Send>>;

/// Answers queries until the agent ends.
pub(super) async fn answer(
    mut questions: mpsc::UnboundedReceiver<Query>,
    service: Arc<Service>,
    peers: Peers,
) {
    // By asker and query id: a channel for the number of further replies that the asker has room for. Closed once the
    // asker has gone.
    let mut running: HashMap<(u64, u64), mpsc::UnboundedSender<u32>> = HashMap::new();
    while let Some(query) = questions.recv().await {
        running.retain(|_, room| !room.is_closed());
        let key = (query.asker, query.id);
        match query.question {
            Some(Question::Room(more)) => {
                if let Some(room) = running.get(&key) {
                    // If the answer has just ended, the asker is about to learn that.
                    let _ = room.send(more);
                }
            }
            Some(Question::Cancel(_)) => drop(running.remove(&key)),
            None => peers.reply(&query, Some(Answer::Problem("unknown query".into())), true),
            Some(_) => {
                let (room, more) = mpsc::unbounded_channel();
                running.insert(key, room);
                tokio::spawn(send(query, more, service.clone(), peers.clone()));
            }
        }
    }
}

/// Sends the answers to one query.
async fn send(query: Query, more: mpsc::UnboundedReceiver<u32>, service: Arc<Service>, peers: Peers) {
    let is_log = matches!(query.question, Some(Question::Logs(_)));
    let _sending = is_log.then(|| peers.sending());
    match answers(&query, &service).await {
        Ok(answers) => forward(&query, answers, more, &peers).await,
        Err(status) => peers.reply(&query, problem(&status), true),
    }
}

/// Sends answers as far as the asker has room for them, until it has gone.
async fn forward(query: &Query, mut answers: Answers, mut more: mpsc::UnboundedReceiver<u32>, peers: &Peers) {
    let (mut room, mut deadline) = (WINDOW, Instant::now() + ASKER_TIMEOUT);
    loop {
        tokio::select! {
            asker = more.recv() => match asker {
                Some(more) => (room, deadline) = (room.saturating_add(more), Instant::now() + ASKER_TIMEOUT),
                None => return,
            },
            answer = answers.next(), if room > 0 => match answer {
                Some(Ok(answer)) => {
                    room -= 1;
                    peers.reply(query, Some(answer), false);
                }
                Some(Err(status)) => return peers.reply(query, problem(&status), true),
                None => return peers.reply(query, None, true),
            },
            () = sleep_until(deadline) => return,
        }
    }
}

fn problem(status: &Status) -> Option<Answer> {
    Some(Answer::Problem(status.message().into()))
}

async fn answers(query: &Query, service: &Arc<Service>) -> Result<Answers, Status> {
    let malformed = |error: prost::DecodeError| Status::invalid_argument(error.to_string());
    Ok(match &query.question {
        Some(Question::Status(_)) => {
            let status = service.local_status(false).await;
            one(Answer::Status(status.encode_to_vec()))
        }
        Some(Question::Logs(request)) => {
            let request = LogsRequest::decode(&**request).map_err(malformed)?;
            let chunks = ReceiverStream::new(service.logs_of_attempt(request)?);
            Box::pin(chunks.map(|chunk| chunk.map(|chunk| Answer::Logs(chunk.encode_to_vec()))))
        }
        Some(Question::Stacks(request)) => {
            let request = StacksRequest::decode(&**request).map_err(malformed)?;
            let replies = service.local_stacks(request.rank).await?;
            Box::pin(tokio_stream::iter(replies).map(|reply| Ok(Answer::Stacks(reply.encode_to_vec()))))
        }
        Some(Question::Checkpoint(_)) => {
            // Waits for as long as the asker does.
            let service = service.clone();
            let (saved, answer) = mpsc::channel(1);
            tokio::spawn(async move {
                tokio::select! {
                    reply = service.local_checkpoint() => {
                        let answer = reply.map(|reply| Answer::Checkpoint(reply.encode_to_vec()));
                        // Fails only if the asker has gone.
                        let _ = saved.send(answer).await;
                    }
                    () = saved.closed() => {}
                }
            });
            Box::pin(ReceiverStream::new(answer))
        }
        _ => return Err(Status::unimplemented("this version does not support the query")),
    })
}

fn one(answer: Answer) -> Answers {
    Box::pin(tokio_stream::once(Ok(answer)))
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::agent_message::Body;
    use xlaunch_proto::v1::coordinator_message::Body as ToAgent;

    use super::*;

    fn endless() -> Answers {
        Box::pin(tokio_stream::iter((0..1000).map(|_| Ok(Answer::Logs(vec![7; 1 << 16])))))
    }

    #[tokio::test]
    async fn slow_reader_stops_the_node_that_answers() {
        let (messages, mut sent) = mpsc::unbounded_channel();
        let (peers, _questions) = Peers::new(messages);
        let (room, more) = mpsc::unbounded_channel();
        let query = Query { id: 1, asker: 2, ..Query::default() };
        let mut answering = Box::pin(forward(&query, endless(), more, &peers));
        let mut run = async || tokio::time::timeout(Duration::from_millis(50), &mut answering).await.is_ok();
        assert!(!run().await);
        assert_eq!(sent.len(), WINDOW as usize);
        room.send(0).unwrap();
        room.send(2).unwrap();
        assert!(!run().await);
        assert_eq!(sent.len(), WINDOW as usize + 2);
        drop(room);
        assert!(run().await, "it goes on although the asker has gone");
        let Some(Body::QueryReply(reply)) = sent.recv().await else { panic!() };
        assert_eq!((reply.id, reply.asker, reply.last), (1, 2, false));
    }

    /// Asker and answering node, without a coordinator in between.
    #[tokio::test]
    async fn asker_makes_room_by_reading_and_says_when_it_goes() {
        let (messages, mut sent) = mpsc::unbounded_channel();
        let (peers, _questions) = Peers::new(messages);
        let mut asked = peers.ask(Some(5), Question::Logs(Vec::new()));
        let mut sent = async || match sent.recv().await {
            Some(Body::Query(query)) => query,
            other => panic!("{other:?}"),
        };
        let first = sent().await;
        assert_eq!((first.rank, first.node), (Some(5), None));
        for last in [false, false] {
            let reply = xlaunch_proto::v1::QueryReply {
                id: first.id,
                node: 3,
                last,
                answer: Some(Answer::Logs(vec![1])),
                ..Default::default()
            };
            peers.received(ToAgent::QueryReply(reply));
        }
        assert_eq!(asked.next().await, Some(Ok(Answer::Logs(vec![1]))));
        assert_eq!(asked.next().await, Some(Ok(Answer::Logs(vec![1]))));
        let query = sent().await;
        assert_eq!((query.question, query.node), (Some(Question::Room(1)), Some(3)), "for the first");
        drop(asked);
        assert_eq!(sent().await.question, Some(Question::Cancel(true)));
    }
}
