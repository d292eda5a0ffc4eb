//! State of the agent's service, and its answers about the ranks of its own node. Callers use ranks in the job.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tonic::Status;
use xlaunch_proto::convert::Logs;
use xlaunch_proto::v1::{CheckpointReply, LogsReply, LogsRequest, StacksReply, StatusReply};
use xlaunch_spec::ids::Rank;

use super::message::Message;
use super::peers::Peers;
use crate::stacks::{self, Detail};
use crate::status::Monitor;
use crate::status::board::Board;
use crate::status::follow::{self, Until};

/// Concurrent readers of logs. Each occupies a thread of the runtime whenever it polls its file.
pub(super) const MAX_LOG_READERS: usize = 64;

/// A log in chunks.
pub(super) type LogChunks = mpsc::Receiver<Result<LogsReply, Status>>;

/// The agent as a service: a handle to the driver's task, and what answers queries without it.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) messages: mpsc::Sender<Message>,
    pub(super) board: watch::Receiver<Board>,
    pub(super) monitor: Monitor,
    pub(super) readers: Arc<Semaphore>,
    /// Permit to take stacks: one call at a time.
    pub(super) examiners: Arc<Semaphore>,
    /// The other nodes, in a job that may have several.
    pub(super) peers: Option<Peers>,
}

impl Service {
    /// Sends a message to the driver's task and waits for the reply.
    pub(super) async fn call<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<T>) -> Message,
    ) -> Result<T, Status> {
        let ending = || Status::unavailable("the agent is shutting down");
        let (reply, answer) = oneshot::channel();
        self.messages.send(message(reply)).await.map_err(|_| ending())?;
        answer.await.map_err(|_| ending())
    }

    /// Returns the other nodes, if this attempt has any.
    pub(super) fn peers_of_attempt(&self) -> Option<&Peers> {
        let board = self.board.borrow();
        self.peers.as_ref().filter(|_| board.is_spare() || board.assignment().has_peers())
    }

    /// Rank of this node; `None` for a spare.
    pub(super) fn node_rank(&self) -> Option<u32> {
        let board = self.board.borrow();
        (!board.is_spare()).then_some(board.assignment().node_rank)
    }

    /// Returns the status of this node.
    pub(super) async fn local_status(&self, history: bool) -> StatusReply {
        let mut board = self.board.clone();
        self.monitor.refresh(&mut board).await;
        board.borrow().reply(Instant::now(), history)
    }

    /// Streams the log of a rank of this node.
    pub(super) fn local_logs(&self, request: LogsRequest) -> Result<LogChunks, Status> {
        self.logs_until(Until::JobEnds, request)
    }

    /// Same as [`local_logs`](Self::local_logs), but ends with the current attempt.
    pub(super) fn logs_of_attempt(&self, request: LogsRequest) -> Result<LogChunks, Status> {
        self.logs_until(Until::AttemptEnds, request)
    }

    fn logs_until(&self, until: Until, request: LogsRequest) -> Result<LogChunks, Status> {
        follow::stream(self.board.clone(), self.local(request)?, until, self.log_reader()?)
    }

    /// Converts a request to the local rank.
    fn local(&self, request: LogsRequest) -> Result<Logs, Status> {
        let logs = Logs::try_from(request).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let rank = self.board.borrow().local_rank(logs.rank.0);
        let rank = rank.ok_or_else(|| Status::unavailable("the rank has moved to another node"))?;
        Ok(Logs { rank: Rank(rank), ..logs })
    }

    /// Returns a permit that counts against the limit of readers until it is dropped.
    pub(super) fn log_reader(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.readers.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{MAX_LOG_READERS} clients are reading logs of this launch: close one of them"
            ))
        })
    }

    /// Takes the stacks of a rank of this node, or of all of them.
    pub(super) async fn local_stacks(&self, rank: Option<u32>) -> Result<Vec<StacksReply>, Status> {
        let (mut subjects, first_rank) = {
            let board = self.board.borrow();
            (board.subjects(), board.rank_of(0))
        };
        subjects.retain(|subject| rank.is_none_or(|rank| first_rank + subject.rank == rank));
        if subjects.is_empty() {
            let who = rank.map_or_else(|| "no rank is".into(), |rank| format!("rank {rank} is not"));
            return Err(Status::not_found(format!("{who} running")));
        }
        let examiner = self.examiners.clone().try_acquire_owned().map_err(|_| {
            Status::resource_exhausted("stacks of this launch are being taken: try again in a few seconds")
        })?;
        let taken = tokio::task::spawn_blocking(move || {
            let subjects: Vec<_> = subjects.into_iter().map(|subject| (subject, Detail::Stacks)).collect();
            let ranks = stacks::collect(&subjects);
            // The thread, not the call, holds the permit: two debuggers cannot be attached to the same process.
            drop(examiner);
            ranks
        });
        let mut ranks = taken.await.map_err(|error| Status::internal(error.to_string()))?;
        ranks.iter_mut().for_each(|stacks| stacks.rank += first_rank);
        Ok(stacks::split(ranks))
    }

    /// Saves a checkpoint. Rank 0 of the job must be on this node.
    pub(super) async fn local_checkpoint(&self) -> Result<CheckpointReply, Status> {
        self.call(Message::Checkpoint).await?
    }
}
