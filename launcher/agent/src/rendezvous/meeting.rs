//! A meeting, with the ranks that wait for its outcome.

use std::time::Instant;

use tokio::sync::oneshot;
use tonic::Status;
use xlaunch_proto::convert::Join;
use xlaunch_proto::v1::JoinReply;

use super::{Progress, Rendezvous};

/// Where a rank's answer goes.
pub type Reply = oneshot::Sender<Result<JoinReply, Status>>;

/// The meeting of one attempt. Whoever is not answered when it is dropped learns that the agent is gone.
#[derive(Debug)]
pub struct Meeting {
    rendezvous: Rendezvous,
    waiting: Vec<Reply>,
}

/// What a join led to.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The rank is in, others are missing.
    Waiting,
    /// The rank was the last one: all were answered.
    Met,
    /// The rank is not part of the meeting, and was told so.
    Ignored,
    /// The meeting has failed for this reason: all were told so.
    Failed(String),
}

impl Meeting {
    /// Nobody has joined yet.
    pub fn new(rendezvous: Rendezvous) -> Self {
        Self { rendezvous, waiting: Vec::new() }
    }

    /// A rank asks to join.
    pub fn join(&mut self, join: Join, reply: Reply) -> Outcome {
        match self.rendezvous.join(join) {
            Progress::Waiting => {
                self.waiting.push(reply);
                Outcome::Waiting
            }
            Progress::Complete(joined) => {
                self.waiting.push(reply);
                for reply in self.waiting.drain(..) {
                    // A caller that is gone needs no answer; here and below.
                    let _ = reply.send(Ok(joined.clone().into()));
                }
                Outcome::Met
            }
            Progress::Ignored(problem) => {
                let _ = reply.send(Err(Status::already_exists(problem)));
                Outcome::Ignored
            }
            Progress::Failed(problem) => {
                self.waiting.push(reply);
                self.refuse(&problem);
                Outcome::Failed(problem)
            }
        }
    }

    /// Tells all who wait that they will not meet.
    pub fn refuse(&mut self, problem: &str) {
        for reply in self.waiting.drain(..) {
            let _ = reply.send(Err(Status::failed_precondition(problem)));
        }
    }

    /// When the meeting fails if ranks are missing; `None` once all are there.
    pub fn deadline(&self) -> Option<Instant> {
        self.rendezvous.deadline()
    }

    /// Why it fails at `now`, naming who is missing.
    pub fn expired(&self, now: Instant) -> Option<String> {
        self.rendezvous.expired(now)
    }
}
