//! The rendezvous of the ranks of one attempt: pure state machines, the callers that wait on them, and the gRPC service
//! that feeds them.
//!
//! ```text
//! waiting --last local rank joined--> NodeJoin --group: all nodes joined--> GroupJoin --finish--> a reply per rank
//!    | a rank disagrees (version, configuration, bucket layout, data, device): the rendezvous fails and names both
//!    '-- deadline: the rendezvous fails, naming the missing ranks
//! ```
//! There are two levels. The ranks of a node join their agent, which combines them into a [`NodeJoin`]. The nodes join
//! the coordinator, whose `GroupRendezvous` answers each with a [`GroupJoin`]. From that and from what it knows of its
//! own ranks, the agent makes the reply to each rank. With one node, the coordinator is in the same process.
//!
//! A rank of another attempt, or one that has joined already, is refused without failing the others.
//!
//! - [`barrier`]: the callers that wait; [`message`]: calls for the driver's task;
//! - [`service`]: the agent's gRPC services; `listener`: the socket on which it serves them;
//! - `local_queries`: answers about ranks of this node; [`peers`], `peer_queries` and `answers`: queries between nodes.

mod answers;
pub mod barrier;
mod listener;
mod local_queries;
pub mod message;
mod peer_queries;
pub mod peers;
pub mod service;

use std::ops::Range;
use std::time::Instant;

use xlaunch_proto::convert::{Join, Joined, RingNeighbour};
use xlaunch_spec::ids::{Attempt, Digest, WorldSize};
use xlaunch_spec::quantities::ranks_text;

use xlaunch_cluster::group_rendezvous::{GroupJoin, NodeJoin};

/// The rendezvous of the ranks of one node in one attempt.
#[derive(Debug)]
pub struct Rendezvous {
    world: WorldSize,
    /// Ranks of this node.
    ranks: Range<u32>,
    attempt: Attempt,
    version: String,
    config_hash: Digest,
    deadline: Instant,
    /// Joins by local rank.
    joined: Vec<Option<Join>>,
}

/// State of the rendezvous after a rank has joined.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Other ranks are missing.
    Waiting,
    /// All ranks of the node have joined.
    Complete(NodeJoin),
    /// The rank does not belong to this rendezvous, which continues without it. Holds the reason.
    Ignored(String),
    /// The rank disagrees with the others, so the rendezvous fails. Holds the reason.
    Failed(String),
}

impl Rendezvous {
    /// Creates a rendezvous of this node's `ranks` out of `world`, which must all run this version and this job.
    pub fn new(ranks: Range<u32>, world: u32, attempt: u32, config_hash: Digest, deadline: Instant) -> Self {
        Self {
            world: WorldSize(world),
            joined: ranks.clone().map(|_| None).collect(),
            ranks,
            attempt: Attempt(attempt),
            version: xlaunch_proto::VERSION.into(),
            config_hash,
            deadline,
        }
    }

    /// Time at which the rendezvous times out; `None` once all ranks of the node have joined.
    pub fn deadline(&self) -> Option<Instant> {
        self.joined.iter().any(Option::is_none).then_some(self.deadline)
    }

    /// Returns the index of a rank of this node.
    pub fn local_rank(&self, rank: u32) -> Option<usize> {
        self.ranks.contains(&rank).then(|| (rank - self.ranks.start) as usize)
    }

    /// Adds a rank.
    pub fn join(&mut self, join: Join) -> Progress {
        let (rank, world) = (join.rank, self.world);
        if join.attempt != self.attempt {
            return Progress::Ignored(format!(
                "rank {rank} belongs to attempt {}, this is attempt {}",
                join.attempt, self.attempt
            ));
        }
        let Some(local_rank) = self.local_rank(rank.0) else {
            return Progress::Ignored(if rank.0 < world.0 {
                format!("rank {rank} is not one of the ranks {:?} of this node", self.ranks)
            } else {
                format!("rank {rank} does not exist in a job of {world} ranks")
            });
        };
        if self.joined[local_rank].is_some() {
            return Progress::Ignored(format!("rank {rank} has already joined"));
        }
        if let Some(problem) = self.disagreement(&join) {
            return Progress::Failed(problem);
        }
        self.joined[local_rank] = Some(join);
        match self.complete() {
            None => Progress::Waiting,
            Some(Ok(node)) => Progress::Complete(node),
            Some(Err(problem)) => Progress::Failed(problem),
        }
    }

    /// Returns the reply for each rank of this node, by local rank, once all nodes have joined.
    pub fn finish(&self, group: &GroupJoin) -> Vec<Joined> {
        let own = self.joined.iter().skip(1).flatten().map(|join| join.ring_address.clone());
        let next = own.chain([group.next_ring_address.clone()]);
        let reply = |address: String| Joined {
            world_size: self.world,
            attempt: self.attempt,
            nccl_id: group.nccl_id,
            ring: (!address.is_empty()).then_some(RingNeighbour { address, key: group.ring_key }),
        };
        next.map(reply).collect()
    }

    /// Returns the reason, which names the missing ranks, if the rendezvous has timed out at `now`.
    pub fn expired(&self, now: Instant) -> Option<String> {
        self.deadline().filter(|deadline| now >= *deadline)?;
        let missing = self.ranks.clone().zip(&self.joined).filter(|(_, joined)| joined.is_none());
        let missing = ranks_text(missing.map(|(rank, _)| rank));
        Some(format!("{missing} of {} did not join in time (launch.join_timeout)", self.world))
    }

    /// Describes how the rank disagrees with the agent, or with the ranks that have joined.
    fn disagreement(&self, join: &Join) -> Option<String> {
        let rank = join.rank;
        if join.version != self.version {
            return Some(format!(
                "rank {rank} runs xlaunch {}, the agent runs {}",
                join.version, self.version
            ));
        }
        if join.config_hash != self.config_hash {
            return Some(format!(
                "rank {rank} has config hash {}, the agent has {}",
                join.config_hash, self.config_hash
            ));
        }
        let other = self.joined.iter().flatten().next()?;
        if join.layout_hash != other.layout_hash {
            return Some(format!(
                "rank {rank} has a different bucket layout or different training data than rank {}: {} and {}",
                other.rank, join.layout_hash, other.layout_hash
            ));
        }
        (has_gpu(join) != has_gpu(other)).then(|| {
            format!(
                "rank {rank} computes on `{}`, rank {} on `{}`: a job runs either on GPUs or on CPUs",
                join.device_uuid, other.rank, other.device_uuid
            )
        })
    }

    /// Returns the node's part in the rendezvous of all nodes, once its ranks have joined.
    fn complete(&self) -> Option<Result<NodeJoin, String>> {
        let all: Vec<&Join> = self.joined.iter().map(Option::as_ref).collect::<Option<_>>()?;
        let first = all.first()?;
        let rings = all.iter().filter(|join| !join.ring_address.is_empty()).count();
        if rings != 0 && rings != all.len() {
            return Some(Err(format!("only {rings} of {} ranks sent a ring address", all.len())));
        }
        Some(Ok(NodeJoin {
            config_hash: first.config_hash,
            layout_hash: first.layout_hash,
            nccl_id: first.nccl_id.filter(|_| first.rank.0 == 0),
            ring_address: first.ring_address.clone(),
            has_gpus: has_gpu(first),
        }))
    }
}

fn has_gpu(join: &Join) -> bool {
    join.device_uuid != "cpu"
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;
    use xlaunch_cluster::group_rendezvous as group;
    use xlaunch_spec::ids::{Rank, RingKey};

    fn join(rank: u32) -> Join {
        Join {
            rank: Rank(rank),
            attempt: Attempt(0),
            version: xlaunch_proto::VERSION.into(),
            config_hash: Digest::of(b"job"),
            layout_hash: Digest::of(b"layout"),
            device_uuid: "cpu".into(),
            nccl_id: None,
            ring_address: format!("unix:/r{rank}"),
            pid: 1,
        }
    }

    fn rendezvous(world: u32) -> Rendezvous {
        of_node(0..world, world)
    }

    fn of_node(ranks: Range<u32>, world: u32) -> Rendezvous {
        let deadline = Instant::now() + Duration::from_secs(60);
        Rendezvous::new(ranks, world, 0, Digest::of(b"job"), deadline)
    }

    /// Returns the addresses at which each rank of the node finds the next one.
    fn next_addresses(rendezvous: &Rendezvous, next_ring_address: &str) -> Vec<String> {
        let ring_key = RingKey([5; 32]);
        let group = GroupJoin { nccl_id: None, next_ring_address: next_ring_address.into(), ring_key };
        let replies = rendezvous.finish(&group);
        replies.into_iter().filter_map(|joined| joined.ring).map(|ring| ring.address).collect()
    }

    #[test]
    fn last_rank_completes_the_rendezvous() {
        let mut rendezvous = rendezvous(3);
        assert_eq!(rendezvous.join(join(2)), Progress::Waiting);
        assert_eq!(rendezvous.join(join(0)), Progress::Waiting);
        let Progress::Complete(node) = rendezvous.join(join(1)) else { panic!("not complete") };
        let group = group::join_alone(3, node, RingKey([5; 32])).unwrap();
        assert_eq!(
            next_addresses(&rendezvous, &group.next_ring_address),
            ["unix:/r1", "unix:/r2", "unix:/r0"]
        );
        assert_eq!(rendezvous.deadline(), None);
    }

    #[test]
    fn ranks_of_two_nodes_form_one_ring() {
        let mut nodes = [of_node(0..2, 4), of_node(2..4, 4)];
        let mut group = group::GroupRendezvous::new(2, 4, RingKey([5; 32]));
        let mut replies = group::GroupProgress::Waiting;
        for (node_rank, node) in (0..).zip(&mut nodes) {
            let first = node.ranks.start;
            assert_eq!(node.join(join(first + 1)), Progress::Waiting);
            assert!(
                node.expired(node.deadline().unwrap()).unwrap().starts_with(&format!("rank {first} of 4"))
            );
            let Progress::Complete(joined) = node.join(join(first)) else { panic!("not complete") };
            replies = group.join(node_rank, joined);
        }
        let group::GroupProgress::Complete(replies) = replies else { panic!("{replies:?}") };
        let next = |node: usize| next_addresses(&nodes[node], &replies[node].next_ring_address);
        assert_eq!(next(0), ["unix:/r1", "unix:/r2"]);
        assert_eq!(next(1), ["unix:/r3", "unix:/r0"]);
        assert!(matches!(nodes[1].join(join(0)), Progress::Ignored(reason) if reason.contains("2..4")));
    }

    #[test]
    fn disagreement_names_the_rank_and_both_values() {
        let failed = |other: Join| {
            let mut rendezvous = rendezvous(2);
            rendezvous.join(join(0));
            match rendezvous.join(other) {
                Progress::Failed(reason) => reason,
                other => panic!("{other:?}"),
            }
        };
        let reason = failed(Join { version: "9.9.9".into(), ..join(1) });
        assert!(reason.contains("rank 1") && reason.contains("9.9.9"), "{reason}");
        let reason = failed(Join { config_hash: Digest::of(b"other"), ..join(1) });
        assert!(reason.contains("rank 1") && reason.contains("config hash"), "{reason}");
        let reason = failed(Join { layout_hash: Digest::of(b"other"), ..join(1) });
        assert!(reason.contains("rank 1") && reason.contains("bucket layout"), "{reason}");
        let reason = failed(Join { ring_address: String::new(), ..join(1) });
        assert!(reason.contains("ring address"), "{reason}");
        let reason = failed(Join { device_uuid: "GPU-1".into(), ..join(1) });
        assert!(reason.contains("`GPU-1`") && reason.contains("`cpu`"), "{reason}");
    }

    #[test]
    fn timeout_names_the_missing_ranks() {
        let mut rendezvous = rendezvous(3);
        rendezvous.join(join(1));
        let deadline = rendezvous.deadline().unwrap();
        assert_eq!(rendezvous.expired(deadline - Duration::from_millis(1)), None);
        assert!(rendezvous.expired(deadline).unwrap().starts_with("ranks 0, 2 of 3"));
    }

    #[test]
    fn timeout_of_one_rank_is_singular_and_a_complete_rendezvous_never_times_out() {
        let mut rendezvous = rendezvous(2);
        rendezvous.join(join(0));
        let deadline = rendezvous.deadline().unwrap();
        let reason = "rank 1 of 2 did not join in time (launch.join_timeout)";
        assert_eq!(rendezvous.expired(deadline + Duration::from_secs(1)).unwrap(), reason);
        rendezvous.join(join(1));
        assert_eq!(rendezvous.expired(deadline + Duration::from_secs(1)), None);
    }

    #[test]
    fn foreign_and_repeated_joins_are_refused_without_failing_the_rendezvous() {
        let mut rendezvous = rendezvous(2);
        let ignored = |progress| match progress {
            Progress::Ignored(reason) => reason,
            other => panic!("{other:?}"),
        };
        rendezvous.join(join(0));
        let other_attempt = rendezvous.join(Join { attempt: Attempt(1), ..join(1) });
        assert_eq!(ignored(other_attempt), "rank 1 belongs to attempt 1, this is attempt 0");
        assert_eq!(ignored(rendezvous.join(join(0))), "rank 0 has already joined");
        assert_eq!(ignored(rendezvous.join(join(2))), "rank 2 does not exist in a job of 2 ranks");
        assert!(matches!(rendezvous.join(join(1)), Progress::Complete(_)));
    }

    proptest! {
        #[test]
        fn any_order_with_foreign_joins_completes_exactly_once(
            world in 1u32..6,
            noise in prop::collection::vec((0u32..8, 0u32..3), 0..20),
        ) {
            let mut rendezvous = rendezvous(world);
            let mut complete = 0;
            let honest = (0..world).map(|rank| (rank, 0));
            for (rank, attempt) in noise.into_iter().chain(honest) {
                match rendezvous.join(Join { attempt: Attempt(attempt), ..join(rank) }) {
                    Progress::Complete(_) => complete += 1,
                    Progress::Ignored(_) | Progress::Waiting => {}
                    Progress::Failed(reason) => prop_assert!(false, "{}", reason),
                }
            }
            prop_assert_eq!(complete, 1);
            prop_assert_eq!(next_addresses(&rendezvous, "tcp:next:1").len(), world as usize);
        }
    }
}
