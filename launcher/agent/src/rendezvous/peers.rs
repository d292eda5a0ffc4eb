//! Questions to the agents of a job's other nodes, which the coordinator passes on.
//!
//! ```text
//! service (asks) --Query--> coordinator --Query--> driver of another node --> answers (there) --QueryReply--> back
//!                                                  driver --[`Peers::received`]--> service
//! ```
//! The driver's task only hands messages over; it neither answers nor waits.
//!
//! Memory is bounded on the whole way: a node that answers sends at most [`WINDOW`] replies before the asker has used
//! one of them and has said so. An asker also says every few seconds that it still waits, and learns by that if the
//! node that answers has gone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior, interval_at, timeout_at};
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::query::Question;
use xlaunch_proto::v1::query_reply::Answer;
use xlaunch_proto::v1::{MemberState, MemberStatus, Query, QueryReply, StatusReply};

/// Replies that may be on their way to one asker.
pub(super) const WINDOW: u32 = 4;
/// Between messages of an asker that waits.
const STILL_WAITING_INTERVAL: Duration = Duration::from_secs(5);
/// For all nodes to tell their status.
const SURVEY_TIMEOUT: Duration = Duration::from_millis(1500);
/// A younger survey answers another caller: many that ask do not disturb the other nodes.
const MAX_SURVEY_AGE: Duration = Duration::from_millis(250);

/// The other nodes of a job, as far as callers of this agent are concerned.
#[derive(Clone, Debug)]
pub struct Peers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    messages: mpsc::UnboundedSender<FromAgent>,
    /// Questions of other nodes.
    asked: mpsc::UnboundedSender<Query>,
    open: Mutex<Open>,
    /// What the coordinator has said last about the members.
    nodes: watch::Sender<Vec<MemberStatus>>,
    survey: tokio::sync::Mutex<Option<(Instant, Survey)>>,
    /// Logs that are being sent to other nodes.
    sending: watch::Sender<usize>,
}

/// Questions of this node.
#[derive(Debug, Default)]
struct Open {
    last_id: u64,
    replies: HashMap<u64, mpsc::UnboundedSender<QueryReply>>,
}

/// What the nodes of a job say.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// The members, and nodes that were lost.
    pub nodes: Vec<MemberStatus>,
    /// Of nodes other than this one; those that did not answer in time are missing.
    pub replies: Vec<StatusReply>,
}

impl Peers {
    /// Peers that are reached by `messages` to the coordinator. Their own questions are to be answered.
    pub fn new(messages: mpsc::UnboundedSender<FromAgent>) -> (Self, mpsc::UnboundedReceiver<Query>) {
        let (asked, questions) = mpsc::unbounded_channel();
        let shared = Shared {
            messages,
            asked,
            open: Mutex::default(),
            nodes: watch::Sender::default(),
            survey: tokio::sync::Mutex::default(),
            sending: watch::Sender::default(),
        };
        (Self { shared: Arc::new(shared) }, questions)
    }

    /// Takes what the coordinator has passed on.
    pub fn received(&self, message: ToAgent) {
        match message {
            ToAgent::Nodes(nodes) => drop(self.shared.nodes.send_replace(nodes.nodes)),
            // Without a receiver, the service has ended.
            ToAgent::Query(query) => _ = self.shared.asked.send(query),
            ToAgent::QueryReply(reply) => {
                if let Some(asker) = self.open().replies.get(&reply.id) {
                    // An asker that has gone has said so.
                    let _ = asker.send(reply);
                }
            }
            _ => {}
        }
    }

    /// The status of all nodes, of which this one may be a spare. If the coordinator does not answer, its last list
    /// counts, with nodes that are silent.
    pub(super) async fn survey(&self, is_spare: bool) -> Survey {
        let mut last = self.shared.survey.lock().await;
        if let Some((at, survey)) = &*last
            && at.elapsed() < MAX_SURVEY_AGE
        {
            return survey.clone();
        }
        let mut nodes = self.shared.nodes.subscribe();
        let mut question = self.ask(None, Question::Status(true));
        let deadline = (Instant::now() + SURVEY_TIMEOUT).into();
        let is_heard = timeout_at(deadline, nodes.changed()).await.is_ok();
        let mut survey = Survey { nodes: nodes.borrow().clone(), replies: Vec::new() };
        let is_active = |node: &&mut MemberStatus| node.state() == MemberState::Active;
        let own = usize::from(!is_spare);
        let expected = survey.nodes.iter_mut().filter(is_active).count().saturating_sub(own);
        if !is_heard {
            survey.nodes.iter_mut().filter(is_active).for_each(|node| node.set_state(MemberState::Silent));
        }
        while is_heard && survey.replies.len() < expected {
            let Ok(Some(reply)) = timeout_at(deadline, question.replies.recv()).await else { break };
            if let Some(Answer::Status(bytes)) = reply.answer {
                survey.replies.extend(StatusReply::decode(&*bytes).ok());
            }
        }
        *last = Some((Instant::now(), survey.clone()));
        survey
    }

    /// Asks the node of a rank, or all nodes.
    pub(super) fn ask(&self, rank: Option<u32>, question: Question) -> Asked {
        let (sender, replies) = mpsc::unbounded_channel();
        let id = {
            let mut open = self.open();
            open.last_id += 1;
            let id = open.last_id;
            open.replies.insert(id, sender);
            id
        };
        let start = tokio::time::Instant::now() + STILL_WAITING_INTERVAL;
        let mut still_waiting = interval_at(start, STILL_WAITING_INTERVAL);
        still_waiting.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let asked = Asked {
            peers: self.clone(),
            id,
            rank,
            node: None,
            replies,
            still_waiting,
            used: false,
            ended: rank.is_none(),
        };
        asked.send(question);
        asked
    }

    /// Answers a question.
    pub(super) fn reply(&self, query: &Query, answer: Option<Answer>, last: bool) {
        let (id, asker) = (query.id, query.asker);
        let reply = QueryReply { id, asker, answer, last, ..QueryReply::default() };
        // The link ends only after the job.
        let _ = self.shared.messages.send(FromAgent::QueryReply(reply));
    }

    /// Counts a log that is being sent to another node, until it is dropped.
    pub(super) fn sending(&self) -> Sending {
        self.shared.sending.send_modify(|logs| *logs += 1);
        Sending(self.clone())
    }

    /// Whether users on other nodes follow logs of this one.
    pub fn is_sending_logs(&self) -> bool {
        *self.shared.sending.borrow() > 0
    }

    /// Waits until the logs of an attempt that has ended have been sent to other nodes that follow them.
    pub async fn logs_sent(&self, timeout: Duration) {
        let mut sending = self.shared.sending.subscribe();
        // Slow readers get the rest from the files.
        let _ = tokio::time::timeout(timeout, sending.wait_for(|logs| *logs == 0)).await;
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.shared.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Peers::sending`].
#[derive(Debug)]
pub(super) struct Sending(Peers);

impl Drop for Sending {
    fn drop(&mut self) {
        self.0.shared.sending.send_modify(|logs| *logs -= 1);
    }
}

/// A question and its answers. The node that answers learns if it is dropped.
#[derive(Debug)]
pub(super) struct Asked {
    peers: Peers,
    id: u64,
    rank: Option<u32>,
    /// The node that answers.
    node: Option<u64>,
    replies: mpsc::UnboundedReceiver<QueryReply>,
    still_waiting: Interval,
    /// There is room for one reply more.
    used: bool,
    /// No further answer follows, or there is one from each node.
    ended: bool,
}

impl Asked {
    /// The next answer once the last one has been used, or why there is none; `None` after the last. Can be dropped
    /// while it waits.
    pub(super) async fn next(&mut self) -> Option<Result<Answer, String>> {
        if std::mem::take(&mut self.used) && !self.ended {
            self.send(Question::Room(1));
        }
        loop {
            let reply = tokio::select! {
                biased;
                reply = self.replies.recv(), if !self.ended => reply?,
                _ = self.still_waiting.tick(), if !self.ended => {
                    self.send(Question::Room(0));
                    continue;
                }
                else => return None,
            };
            (self.node, self.ended) = (Some(reply.node), reply.last);
            match reply.answer {
                Some(Answer::Problem(problem)) => return Some(Err(problem)),
                Some(answer) => {
                    self.used = true;
                    return Some(Ok(answer));
                }
                None => {}
            }
        }
    }

    fn send(&self, question: Question) {
        let Self { id, rank, node, .. } = *self;
        let query = Query { id, rank, node, question: Some(question), ..Query::default() };
        // The link ends only after the job.
        let _ = self.peers.shared.messages.send(FromAgent::Query(query));
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.peers.open().replies.remove(&self.id);
        if !self.ended {
            self.send(Question::Cancel(true));
        }
    }
}
