//! The callers of a rendezvous: holds their replies until all ranks have joined or it fails.

use std::time::Instant;

use tokio::sync::oneshot;
use tonic::Status;
use xlaunch_proto::convert::Join;
use xlaunch_proto::v1::JoinReply;

use super::{Progress, Rendezvous};

/// Answers the `Join` call of one rank.
pub type Reply = oneshot::Sender<Result<JoinReply, Status>>;

/// The rendezvous of one attempt with its waiting callers. Callers that are not answered when it is dropped learn that
/// the agent is ending.
#[derive(Debug)]
pub struct JoinBarrier {
    rendezvous: Rendezvous,
    waiting: Vec<Reply>,
}

/// The result of a `Join` call, whose caller has been answered unless others are missing.
#[derive(Debug, PartialEq, Eq)]
pub enum JoinOutcome {
    /// The rank has joined; others are missing.
    Waiting,
    /// The rank was the last one: all callers have been answered.
    Complete,
    /// The rank does not belong to the rendezvous; its caller alone was refused.
    Ignored,
    /// The rendezvous has failed for this reason: all callers were refused.
    Failed(String),
}

impl JoinBarrier {
    /// A barrier without callers.
    pub fn new(rendezvous: Rendezvous) -> Self {
        Self { rendezvous, waiting: Vec::new() }
    }

    /// Adds a rank, and answers the callers if that completes or fails the rendezvous.
    pub fn join(&mut self, join: Join, reply: Reply) -> JoinOutcome {
        match self.rendezvous.join(join) {
            Progress::Waiting => {
                self.waiting.push(reply);
                JoinOutcome::Waiting
            }
            Progress::Complete(joined) => {
                self.waiting.push(reply);
                for reply in self.waiting.drain(..) {
                    // The caller may be gone; here and below.
                    let _ = reply.send(Ok(joined.clone().into()));
                }
                JoinOutcome::Complete
            }
            Progress::Ignored(problem) => {
                let _ = reply.send(Err(Status::already_exists(problem)));
                JoinOutcome::Ignored
            }
            Progress::Failed(problem) => {
                self.waiting.push(reply);
                self.refuse(&problem);
                JoinOutcome::Failed(problem)
            }
        }
    }

    /// Refuses all waiting callers.
    pub fn refuse(&mut self, problem: &str) {
        for reply in self.waiting.drain(..) {
            let _ = reply.send(Err(Status::failed_precondition(problem)));
        }
    }

    /// When the rendezvous times out; `None` once all ranks have joined.
    pub fn deadline(&self) -> Option<Instant> {
        self.rendezvous.deadline()
    }

    /// The reason for a timeout at `now`, which names the missing ranks.
    pub fn expired(&self, now: Instant) -> Option<String> {
        self.rendezvous.expired(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use xlaunch_proto::ids::{Attempt, Digest, Rank};

    use super::*;

    type Answer = oneshot::Receiver<Result<JoinReply, Status>>;

    fn barrier(world: u32) -> JoinBarrier {
        let deadline = Instant::now() + Duration::from_secs(60);
        JoinBarrier::new(Rendezvous::new(world, 0, Digest::of(b"job"), deadline))
    }

    fn join(barrier: &mut JoinBarrier, rank: u32, job: &[u8]) -> (JoinOutcome, Answer) {
        let join = Join {
            rank: Rank(rank),
            attempt: Attempt(0),
            version: xlaunch_proto::VERSION.into(),
            config_hash: Digest::of(job),
            layout_hash: Digest::of(b"layout"),
            device_uuid: "cpu".into(),
            nccl_id: None,
            ring_address: String::new(),
            pid: 1,
        };
        let (reply, answer) = oneshot::channel();
        (barrier.join(join, reply), answer)
    }

    #[test]
    fn callers_wait_for_the_last_rank_and_all_get_the_reply() {
        let mut barrier = barrier(2);
        let (outcome, mut first) = join(&mut barrier, 1, b"job");
        assert_eq!(outcome, JoinOutcome::Waiting);
        assert!(first.try_recv().is_err());
        let (outcome, mut foreign) = join(&mut barrier, 1, b"job");
        assert_eq!(outcome, JoinOutcome::Ignored);
        assert!(foreign.try_recv().unwrap().unwrap_err().message().contains("already joined"));
        let (outcome, mut second) = join(&mut barrier, 0, b"job");
        assert_eq!(outcome, JoinOutcome::Complete);
        assert_eq!(first.try_recv().unwrap().unwrap().world_size, 2);
        assert_eq!(second.try_recv().unwrap().unwrap().world_size, 2);
        assert_eq!(barrier.deadline(), None);
    }

    #[test]
    fn a_disagreement_refuses_all_callers() {
        let mut barrier = barrier(3);
        let (_, mut first) = join(&mut barrier, 0, b"job");
        let (outcome, mut second) = join(&mut barrier, 1, b"other job");
        let JoinOutcome::Failed(reason) = outcome else { panic!("{outcome:?}") };
        for answer in [&mut first, &mut second] {
            assert_eq!(answer.try_recv().unwrap().unwrap_err().message(), reason);
        }
    }

    #[test]
    fn refused_callers_learn_the_reason() {
        let mut barrier = barrier(2);
        let deadline = barrier.deadline().unwrap();
        assert!(barrier.expired(deadline).unwrap().starts_with("ranks 0, 1 of 2"));
        let (_, mut refused) = join(&mut barrier, 0, b"job");
        barrier.refuse("the attempt is over");
        assert_eq!(refused.try_recv().unwrap().unwrap_err().message(), "the attempt is over");
    }
}
