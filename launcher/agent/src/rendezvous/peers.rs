//! Queries to the agents of a job's other nodes, relayed by the coordinator.
//!
//! ```text
//! service (asks) --Query--> coordinator --Query--> driver of another node --> answers (there) --QueryReply--> back
//!                                                  driver --[`Peers::received`]--> service
//! ```
//! The driver's task only hands messages over; it neither answers nor waits.
//!
//! Memory is bounded along the whole path: an answering node has at most [`WINDOW`] replies in flight that the asker
//! has not acknowledged as used. A waiting asker also reports every few seconds that it is still waiting, and thereby
//! learns if the answering node is gone.

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

/// Maximum number of replies in flight to one asker.
pub(super) const WINDOW: u32 = 4;
/// Interval between messages of a waiting asker.
const STILL_WAITING_INTERVAL: Duration = Duration::from_secs(5);
/// Time for all nodes to report their status.
const SURVEY_TIMEOUT: Duration = Duration::from_millis(1500);
/// A survey younger than this is reused, so that many callers do not disturb the other nodes.
const MAX_SURVEY_AGE: Duration = Duration::from_millis(250);

/// The other nodes of a job, as this agent's callers reach them.
#[derive(Clone, Debug)]
pub struct Peers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    messages: mpsc::UnboundedSender<FromAgent>,
    /// Queries from other nodes.
    asked: mpsc::UnboundedSender<Query>,
    open: Mutex<Open>,
    /// The coordinator's last list of members.
    nodes: watch::Sender<Vec<MemberStatus>>,
    survey: tokio::sync::Mutex<Option<(Instant, Survey)>>,
    /// Number of logs that are being sent to other nodes.
    sending: watch::Sender<usize>,
}

/// Open queries of this node.
#[derive(Debug, Default)]
struct Open {
    last_id: u64,
    replies: HashMap<u64, mpsc::UnboundedSender<QueryReply>>,
}

/// The status of all nodes of a job.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// The members, and the nodes that were lost.
    pub nodes: Vec<MemberStatus>,
    /// Replies of the other nodes; those that did not answer in time are missing.
    pub replies: Vec<StatusReply>,
}

impl Peers {
    /// Creates peers reached through the coordinator by `messages`. The second value has their queries, which this node
    /// must answer.
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

    /// Handles a message that the coordinator has passed on.
    pub fn received(&self, message: ToAgent) {
        match message {
            ToAgent::Nodes(nodes) => drop(self.shared.nodes.send_replace(nodes.nodes)),
            // Fails only if the service has ended.
            ToAgent::Query(query) => _ = self.shared.asked.send(query),
            ToAgent::QueryReply(reply) => {
                if let Some(asker) = self.open().replies.get(&reply.id) {
                    // Fails only if the asker has gone, which it has announced.
                    let _ = asker.send(reply);
                }
            }
            _ => {}
        }
    }

    /// Collects the status of all nodes, of which this one may be a spare. If the coordinator does not answer, its last
    /// list is used, with active nodes shown as silent.
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

    /// Sends a query to the node of a rank, or to all nodes.
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

    /// Sends an answer to a query.
    pub(super) fn reply(&self, query: &Query, answer: Option<Answer>, last: bool) {
        let (id, asker) = (query.id, query.asker);
        let reply = QueryReply { id, asker, answer, last, ..QueryReply::default() };
        // The receiver is gone only after the end of the job.
        let _ = self.shared.messages.send(FromAgent::QueryReply(reply));
    }

    /// Counts a log as being sent to another node until the returned value is dropped.
    pub(super) fn sending(&self) -> Sending {
        self.shared.sending.send_modify(|logs| *logs += 1);
        Sending(self.clone())
    }

    /// Returns whether users on other nodes follow logs of this one.
    pub fn is_sending_logs(&self) -> bool {
        *self.shared.sending.borrow() > 0
    }

    /// Waits until the last logs of a finished attempt have been sent to the nodes that follow them.
    pub async fn logs_sent(&self, timeout: Duration) {
        let mut sending = self.shared.sending.subscribe();
        // Slow readers get the rest from the log files.
        let _ = tokio::time::timeout(timeout, sending.wait_for(|logs| *logs == 0)).await;
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.shared.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A log that is being sent; see [`Peers::sending`].
#[derive(Debug)]
pub(super) struct Sending(Peers);

impl Drop for Sending {
    fn drop(&mut self) {
        self.0.shared.sending.send_modify(|logs| *logs -= 1);
    }
}

/// A query and its answers. When it is dropped, the answering node is told.
#[derive(Debug)]
pub(super) struct Asked {
    peers: Peers,
    id: u64,
    rank: Option<u32>,
    /// The answering node, once known.
    node: Option<u64>,
    replies: mpsc::UnboundedReceiver<QueryReply>,
    still_waiting: Interval,
    /// The last answer has been consumed, so there is room for one more.
    used: bool,
    /// No further answer follows, or the query went to all nodes, which answer once each.
    ended: bool,
}

impl Asked {
    /// Returns the next answer, or the reason why there is none; `None` after the last. A call acknowledges the
    /// previous answer. Cancel safe.
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
        // The receiver is gone only after the end of the job.
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
