//! The callers of a rendezvous. Holds their replies until all ranks have joined or the rendezvous fails.

use std::time::Instant;

use tokio::sync::oneshot;
use tonic::Status;
use xlaunch_proto::convert::Join;
use xlaunch_proto::v1::JoinReply;

use super::{Progress, Rendezvous};
use xlaunch_cluster::group_rendezvous::{GroupJoin, NodeJoin};

/// Answers the `Join` call of one rank.
pub type Reply = oneshot::Sender<Result<JoinReply, Status>>;

/// The rendezvous of one attempt on one node, with its waiting callers. Callers that have not been answered when it is
/// dropped learn that the agent is shutting down.
#[derive(Debug)]
pub struct JoinBarrier {
    rendezvous: Rendezvous,
    /// Waiting callers with their local ranks.
    waiting: Vec<(usize, Reply)>,
}

/// Result of a `Join` call. The caller waits in the first two cases, and has been answered in the others.
#[derive(Debug, PartialEq, Eq)]
pub enum JoinOutcome {
    /// The rank has joined; other ranks of this node are missing.
    Waiting,
    /// The rank was the last one of this node. [`JoinBarrier::finish`] answers its ranks once all nodes have joined.
    Complete(NodeJoin),
    /// The rank does not belong to the rendezvous. Only its caller was refused.
    Ignored,
    /// The rendezvous failed for this reason. All callers were refused.
    Failed(String),
}

impl JoinBarrier {
    /// Creates a barrier without callers.
    pub fn new(rendezvous: Rendezvous) -> Self {
        Self { rendezvous, waiting: Vec::new() }
    }

    /// Adds a rank, and refuses the callers if that fails the rendezvous.
    pub fn join(&mut self, join: Join, reply: Reply) -> JoinOutcome {
        let local_rank = self.rendezvous.local_rank(join.rank.0).unwrap_or_default();
        match self.rendezvous.join(join) {
            Progress::Waiting => {
                self.waiting.push((local_rank, reply));
                JoinOutcome::Waiting
            }
            Progress::Complete(node) => {
                self.waiting.push((local_rank, reply));
                JoinOutcome::Complete(node)
            }
            Progress::Ignored(problem) => {
                // Sending fails if the caller is gone, here and below.
                let _ = reply.send(Err(Status::already_exists(problem)));
                JoinOutcome::Ignored
            }
            Progress::Failed(problem) => {
                self.waiting.push((local_rank, reply));
                self.refuse(&problem);
                JoinOutcome::Failed(problem)
            }
        }
    }

    /// Answers the callers, because all nodes have joined.
    pub fn finish(&mut self, group: &GroupJoin) {
        let joined = self.rendezvous.finish(group);
        for (local_rank, reply) in self.waiting.drain(..) {
            if let Some(joined) = joined.get(local_rank) {
                let _ = reply.send(Ok(joined.clone().into()));
            }
        }
    }

    /// Refuses all waiting callers.
    pub fn refuse(&mut self, problem: &str) {
        for (_, reply) in self.waiting.drain(..) {
            let _ = reply.send(Err(Status::failed_precondition(problem)));
        }
    }

    /// Time at which the rendezvous times out; `None` once all ranks have joined.
    pub fn deadline(&self) -> Option<Instant> {
        self.rendezvous.deadline()
    }

    /// Returns the reason, which names the missing ranks, if the rendezvous has timed out at `now`.
    pub fn expired(&self, now: Instant) -> Option<String> {
        self.rendezvous.expired(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use xlaunch_spec::ids::{Attempt, Digest, Rank, RingKey};

    use super::*;

    type Answer = oneshot::Receiver<Result<JoinReply, Status>>;

    fn barrier(world: u32) -> JoinBarrier {
        let deadline = Instant::now() + Duration::from_secs(60);
        JoinBarrier::new(Rendezvous::new(0..world, world, 0, Digest::of(b"job"), deadline))
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
            ring_address: format!("unix:/r{rank}"),
            pid: 1,
        };
        let (reply, answer) = oneshot::channel();
        (barrier.join(join, reply), answer)
    }

    #[test]
    fn callers_wait_for_the_last_rank_of_all_nodes_and_each_gets_its_reply() {
        let mut barrier = barrier(2);
        let (outcome, mut first) = join(&mut barrier, 1, b"job");
        assert_eq!(outcome, JoinOutcome::Waiting);
        assert!(first.try_recv().is_err());
        let (outcome, mut foreign) = join(&mut barrier, 1, b"job");
        assert_eq!(outcome, JoinOutcome::Ignored);
        assert!(foreign.try_recv().unwrap().unwrap_err().message().contains("already joined"));
        let (outcome, mut second) = join(&mut barrier, 0, b"job");
        let JoinOutcome::Complete(node) = outcome else { panic!("{outcome:?}") };
        assert!(first.try_recv().is_err() && second.try_recv().is_err(), "other nodes may be missing");
        assert_eq!((node.ring_address.as_str(), node.has_gpus), ("unix:/r0", false));
        let (next_ring_address, ring_key) = ("tcp:10.0.0.2:1".to_owned(), RingKey([5; 32]));
        barrier.finish(&GroupJoin { nccl_id: None, next_ring_address, ring_key });
        for (answer, next) in [(&mut first, "tcp:10.0.0.2:1"), (&mut second, "unix:/r1")] {
            let reply = answer.try_recv().unwrap().unwrap();
            assert_eq!((reply.world_size, reply.next_ring_address.as_str()), (2, next));
        }
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
        assert!(barrier.expired(deadline).unwrap().starts_with("ranks 0-1 of 2"));
        let (_, mut refused) = join(&mut barrier, 0, b"job");
        barrier.refuse("the attempt is over");
        assert_eq!(refused.try_recv().unwrap().unwrap_err().message(), "the attempt is over");
    }
}
