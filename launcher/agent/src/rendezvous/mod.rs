//! The rendezvous of the ranks of one attempt: a pure state machine, the callers that wait for it, and the gRPC service
//! that feeds it.
//!
//! ```text
//! waiting --last rank joined--> complete
//!    | a rank disagrees (version, configuration, bucket layout, data): the rendezvous fails, naming both values
//!    '-- deadline: the rendezvous fails, naming the missing ranks
//! ```
//! A rank of another attempt, or one that has joined already, is refused without failing the others.

pub mod barrier;
mod listener;
pub mod service;

use std::time::Instant;

use xlaunch_proto::convert::{Join, Joined};
use xlaunch_proto::ids::{Attempt, Digest, NcclId, WorldSize};

/// The rendezvous of one attempt.
#[derive(Debug)]
pub struct Rendezvous {
    world: WorldSize,
    attempt: Attempt,
    version: String,
    config_hash: Digest,
    deadline: Instant,
    joined: Vec<Option<Join>>,
}

/// The state after a join.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Other ranks are missing.
    Waiting,
    /// All ranks have joined: the reply for each of them.
    Complete(Joined),
    /// The rank does not belong to this rendezvous, which continues without it; the reason.
    Ignored(String),
    /// The rank disagrees with the others: the rendezvous fails, for this reason.
    Failed(String),
}

impl Rendezvous {
    /// A rendezvous of `world` ranks that must run this version and this job.
    pub fn new(world: u32, attempt: u32, config_hash: Digest, deadline: Instant) -> Self {
        Self {
            world: WorldSize(world),
            attempt: Attempt(attempt),
            version: xlaunch_proto::VERSION.into(),
            config_hash,
            deadline,
            joined: (0..world).map(|_| None).collect(),
        }
    }

    /// When the rendezvous times out; `None` once all ranks have joined.
    pub fn deadline(&self) -> Option<Instant> {
        self.joined.iter().any(Option::is_none).then_some(self.deadline)
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
        match self.joined.get(rank.index()) {
            None => {
                return Progress::Ignored(format!("rank {rank} does not exist in a job of {world} ranks"));
            }
            Some(Some(_)) => return Progress::Ignored(format!("rank {rank} has already joined")),
            Some(None) => {}
        }
        if let Some(problem) = self.disagreement(&join) {
            return Progress::Failed(problem);
        }
        self.joined[rank.index()] = Some(join);
        match self.complete() {
            None => Progress::Waiting,
            Some(Ok(joined)) => Progress::Complete(joined),
            Some(Err(problem)) => Progress::Failed(problem),
        }
    }

    /// The reason for a timeout at `now`, which names the missing ranks.
    pub fn expired(&self, now: Instant) -> Option<String> {
        self.deadline().filter(|deadline| now >= *deadline)?;
        let missing: Vec<String> = (0..self.world.0)
            .filter(|rank| self.joined[*rank as usize].is_none())
            .map(|rank| rank.to_string())
            .collect();
        let (noun, list) = (if missing.len() == 1 { "rank" } else { "ranks" }, missing.join(", "));
        Some(format!("{noun} {list} of {} did not join in time (launch.join_timeout)", self.world))
    }

    /// How the rank disagrees with the agent, or with the ranks that have joined.
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
        (join.layout_hash != other.layout_hash).then(|| {
            format!(
                "rank {rank} has another bucket layout or other training data than rank {}: {} and {}",
                other.rank, join.layout_hash, other.layout_hash
            )
        })
    }

    /// The reply once all ranks have joined, if what they sent allows a collective.
    fn complete(&self) -> Option<Result<Joined, String>> {
        let all: Vec<&Join> = self.joined.iter().map(Option::as_ref).collect::<Option<_>>()?;
        let nccl_id: Option<NcclId> = all.first().and_then(|join| join.nccl_id);
        let rings = all.iter().filter(|join| !join.ring_address.is_empty()).count();
        let gpus = all.iter().any(|join| join.device_uuid != "cpu");
        if all.len() > 1 && gpus && nccl_id.is_none() {
            return Some(Err("rank 0 sent no NCCL id for a job on GPUs".into()));
        }
        if rings != 0 && rings != all.len() {
            return Some(Err(format!("only {rings} of {} ranks sent a ring address", all.len())));
        }
        let ring_addresses =
            if rings == 0 { Vec::new() } else { all.iter().map(|join| join.ring_address.clone()).collect() };
        Some(Ok(Joined { world_size: self.world, attempt: self.attempt, nccl_id, ring_addresses }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;
    use xlaunch_proto::ids::Rank;

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
        Rendezvous::new(world, 0, Digest::of(b"job"), Instant::now() + Duration::from_secs(60))
    }

    #[test]
    fn last_rank_completes_the_rendezvous() {
        let mut rendezvous = rendezvous(3);
        assert_eq!(rendezvous.join(join(2)), Progress::Waiting);
        assert_eq!(rendezvous.join(join(0)), Progress::Waiting);
        let Progress::Complete(joined) = rendezvous.join(join(1)) else { panic!("not complete") };
        assert_eq!(joined.ring_addresses, ["unix:/r0", "unix:/r1", "unix:/r2"]);
        assert_eq!(rendezvous.deadline(), None);
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
        assert!(reason.contains("NCCL id"), "{reason}");
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

    #[test]
    fn gpu_ranks_need_an_nccl_id_unless_there_is_one_rank() {
        let gpu = |rank, nccl_id| Join {
            device_uuid: "GPU-1".into(),
            nccl_id,
            ring_address: String::new(),
            ..join(rank)
        };
        let id = NcclId([7; 128]);
        let complete = |world, nccl_id| {
            let mut rendezvous = rendezvous(world);
            (1..world).for_each(|rank| drop(rendezvous.join(gpu(rank, None))));
            match rendezvous.join(gpu(0, nccl_id)) {
                Progress::Complete(joined) => Ok((joined.nccl_id, joined.ring_addresses)),
                Progress::Failed(reason) => Err(reason),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(complete(2, Some(id)), Ok((Some(id), Vec::new())));
        assert_eq!(complete(1, None), Ok((None, Vec::new())));
        assert!(complete(2, None).unwrap_err().contains("NCCL id"));
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
                    Progress::Complete(joined) => {
                        complete += 1;
                        prop_assert_eq!(joined.world_size.0, world);
                    }
                    Progress::Ignored(_) | Progress::Waiting => {}
                    Progress::Failed(reason) => prop_assert!(false, "{}", reason),
                }
            }
            prop_assert_eq!(complete, 1);
        }
    }
}
