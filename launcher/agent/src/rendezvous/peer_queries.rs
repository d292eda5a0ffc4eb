//! Calls about ranks of other nodes, which are passed on to those nodes; see [`peers`](super::peers).

use std::time::Duration;

use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use xlaunch_proto::v1::query::Question;
use xlaunch_proto::v1::query_reply::Answer;
use xlaunch_proto::v1::{CheckpointReply, LogsReply, LogsRequest, MemberState, StacksReply, StacksRequest};

use super::local_queries::LogChunks;
use super::peers::{Asked, Peers};
use crate::status::board::Board;

/// Maximum number of replies that wait for a slow caller.
const FORWARD_QUEUE_LENGTH: usize = 2;
/// Delay after an attempt or the loss of a node before the same rank's log is requested from the next attempt.
const FOLLOW_RETRY_DELAY: Duration = Duration::from_millis(500);

/// Streams the log of a rank that another node runs; `held` is dropped when the stream has ended.
pub(super) fn logs<T: Send + 'static>(
    peers: &Peers,
    mut board: watch::Receiver<Board>,
    mut request: LogsRequest,
    held: T,
) -> LogChunks {
    let (chunks, stream) = mpsc::channel(FORWARD_QUEUE_LENGTH);
    let peers = peers.clone();
    tokio::spawn(async move {
        let _held = held;
        loop {
            let mut log = peers.ask(Some(request.rank), Question::Logs(request.encode_to_vec()));
            let ended = tokio::select! {
                // The last lines of the log arrive before the end of the job does.
                biased;
                ended = forward_log(&mut log, &mut request, &chunks) => ended,
                _ = board.wait_for(Board::is_over) => return,
                () = chunks.closed() => return,
            };
            if !request.follow {
                if let Err(problem) = ended {
                    // Fails only if the caller is gone.
                    let _ = chunks.send(Err(Status::unavailable(problem))).await;
                }
                return;
            }
            drop(log);
            tokio::select! {
                () = sleep(FOLLOW_RETRY_DELAY) => {}
                _ = board.wait_for(Board::is_over) => return,
                () = chunks.closed() => return,
            }
        }
    });
    stream
}

/// Forwards the log of one attempt. Afterwards, `request` asks for the lines that follow.
async fn forward_log(
    log: &mut Asked,
    request: &mut LogsRequest,
    chunks: &mpsc::Sender<Result<LogsReply, Status>>,
) -> Result<(), String> {
    while let Some(answer) = log.next().await {
        let Answer::Logs(bytes) = answer? else { continue };
        let chunk = LogsReply::decode(&*bytes).map_err(|error| error.to_string())?;
        request.after = chunk.position.or(request.after);
        // If the caller is gone, this task ends at its next await.
        let _ = chunks.send(Ok(chunk)).await;
    }
    Ok(())
}

/// Returns the first rank of each active node other than the one with node rank `own`.
pub(super) async fn first_ranks(peers: &Peers, own: Option<u32>) -> Vec<u32> {
    let nodes = peers.survey(own.is_none()).await.nodes;
    let others = nodes.iter().filter(|node| node.state() == MemberState::Active && node.node_rank != own);
    others.map(|node| node.first_rank).collect()
}

/// Returns the number of ranks in the job, for a node that has none itself.
pub(super) async fn world(peers: &Peers) -> u32 {
    let nodes = peers.survey(true).await.nodes;
    let members = nodes.iter().filter(|node| node.node_rank.is_some());
    members.map(|node| node.first_rank.saturating_add(node.workers)).max().unwrap_or(0)
}

/// Streams stacks from the nodes of the ranks in `of_nodes`: of `rank`, or of all ranks there.
pub(super) fn stacks(
    peers: &Peers,
    of_nodes: &[u32],
    rank: Option<u32>,
) -> ReceiverStream<Result<StacksReply, Status>> {
    let (replies, stream) = mpsc::channel(FORWARD_QUEUE_LENGTH);
    let request = StacksRequest { rank }.encode_to_vec();
    // All nodes are asked at the same time: each needs a few seconds.
    let asked: Vec<Asked> =
        of_nodes.iter().map(|rank| peers.ask(Some(*rank), Question::Stacks(request.clone()))).collect();
    tokio::spawn(async move {
        for mut node in asked {
            while let Some(answer) = node.next().await {
                let reply = match answer {
                    Ok(Answer::Stacks(bytes)) => {
                        StacksReply::decode(&*bytes).map_err(|error| Status::internal(error.to_string()))
                    }
                    Ok(_) => continue,
                    Err(problem) => Err(Status::unavailable(problem)),
                };
                if replies.send(reply).await.is_err() {
                    return;
                }
            }
        }
    });
    ReceiverStream::new(stream)
}

/// Asks the node of rank 0 for a checkpoint, since it knows when one is complete.
pub(super) async fn checkpoint(peers: &Peers) -> Result<CheckpointReply, Status> {
    let mut asked = peers.ask(Some(0), Question::Checkpoint(true));
    while let Some(answer) = asked.next().await {
        match answer {
            Ok(Answer::Checkpoint(bytes)) => {
                return CheckpointReply::decode(&*bytes).map_err(|error| Status::internal(error.to_string()));
            }
            Ok(_) => {}
            Err(problem) => return Err(Status::aborted(problem)),
        }
    }
    Err(Status::aborted("the node of rank 0 has not answered"))
}
