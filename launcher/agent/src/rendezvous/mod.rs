//! How the ranks of one attempt meet: a pure state machine, who waits for it, and the gRPC service that feeds it.
//!
//! ```text
//! Meeting --last rank joined--> Met
//!    | a rank disagrees or is not expected: that rank is refused, the meeting fails
//!    '-- deadline: the meeting fails, naming the missing
//! ```

mod listener;
pub mod meeting;
pub mod service;

use std::time::Instant;

use xlaunch_proto::convert::{Join, Joined};
use xlaunch_proto::ids::{Attempt, Digest, NcclId, WorldSize};

/// The meeting of one attempt.
#[derive(Debug)]
pub struct Rendezvous {
    world: WorldSize,
    attempt: Attempt,
    version: String,
    config_hash: Digest,
    deadline: Instant,
    joined: Vec<Option<Join>>,
}

/// What a join led to.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Others are missing.
    Waiting,
    /// All have joined: what each of them is told.
    Complete(Joined),
    /// This rank is not part of the meeting, which goes on without it.
    Ignored(String),
    /// This rank disagrees: the meeting fails, for this reason.
    Failed(String),
}

impl Rendezvous {
    /// A meeting of `world` ranks that all have this build and this job.
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

    /// When the meeting fails if ranks are missing; `None` once all are there.
    pub fn deadline(&self) -> Option<Instant> {
        self.joined.iter().any(Option::is_none).then_some(self.deadline)
    }

    /// A rank asks to join.
    pub fn join(&mut self, join: Join) -> Progress {
        let (rank, world) = (join.rank, self.world);
        if join.attempt != self.attempt {
            return Progress::Ignored(format!(
                "rank {rank} belongs to attempt {}, this is attempt {}",
                join.attempt, self.attempt
            ));
        }
        match self.joined.get(rank.index()) {
            None => return Progress::Ignored(format!("rank {rank} of a job with {world} ranks")),
            Some(Some(_)) => return Progress::Ignored(format!("rank {rank} has joined already")),
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

    /// Why the meeting fails at `now`, naming who is missing.
    pub fn expired(&self, now: Instant) -> Option<String> {
        self.deadline().filter(|deadline| now >= *deadline)?;
        let missing: Vec<String> = (0..self.world.0)
            .filter(|rank| self.joined[*rank as usize].is_none())
            .map(|rank| rank.to_string())
            .collect();
        let (noun, list) = (if missing.len() == 1 { "rank" } else { "ranks" }, missing.join(", "));
        Some(format!("{noun} {list} of {} did not join in time (launch.join_timeout)", self.world))
    }

    fn disagreement(&self, join: &Join) -> Option<String> {
        let rank = join.rank;
        if join.version != self.version {
            return Some(format!("rank {rank} is xlaunch {}, the agent is {}", join.version, self.version));
        }
        if join.config_hash != self.config_hash {
            return Some(format!(
                "rank {rank} has a job with config hash {}, the agent's is {}",
                join.config_hash, self.config_hash
            ));
        }
        let other = self.joined.iter().flatten().next()?;
        (join.layout_hash != other.layout_hash).then(|| {
            format!(
                "rank {rank} has bucket layout {}, rank {} has {}",
                join.layout_hash, other.rank, other.layout_hash
            )
        })
    }

    fn complete(&self) -> Option<Result<Joined, String>> {
        let all: Vec<&Join> = self.joined.iter().map(Option::as_ref).collect::<Option<_>>()?;
        let nccl_id: Option<NcclId> = all.first().and_then(|join| join.nccl_id);
        let rings = all.iter().filter(|join| !join.ring_address.is_empty()).count();
        let gpus = all.iter().any(|join| join.device_uuid != "cpu");
        if all.len() > 1 && gpus && nccl_id.is_none() {
            return Some(Err("rank 0 brought no NCCL id for a job on GPUs".into()));
        }
        if rings != 0 && rings != all.len() {
            return Some(Err(format!("{rings} of {} ranks brought a ring address", all.len())));
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

    fn meeting(world: u32) -> Rendezvous {
        Rendezvous::new(world, 0, Digest::of(b"job"), Instant::now() + Duration::from_secs(60))
    }

    #[test]
    fn the_last_rank_completes_the_meeting() {
        let mut meeting = meeting(3);
        assert_eq!(meeting.join(join(2)), Progress::Waiting);
        assert_eq!(meeting.join(join(0)), Progress::Waiting);
        let Progress::Complete(joined) = meeting.join(join(1)) else { panic!("not complete") };
        assert_eq!(joined.ring_addresses, ["unix:/r0", "unix:/r1", "unix:/r2"]);
        assert_eq!(meeting.deadline(), None);
    }

    #[test]
    fn whoever_disagrees_is_named_with_both_values() {
        let failed = |other: Join| {
            let mut meeting = meeting(2);
            meeting.join(join(0));
            match meeting.join(other) {
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
    fn the_missing_are_named_at_the_deadline() {
        let mut meeting = meeting(3);
        meeting.join(join(1));
        let deadline = meeting.deadline().unwrap();
        assert_eq!(meeting.expired(deadline - Duration::from_millis(1)), None);
        assert!(meeting.expired(deadline).unwrap().starts_with("ranks 0, 2 of 3"));
    }

    proptest! {
        #[test]
        fn whatever_order_and_noise_a_meeting_completes_once(world in 1u32..6, noise in prop::collection::vec((0u32..8, 0u32..3), 0..20)) {
            let mut meeting = meeting(world);
            let mut complete = 0;
            let honest = (0..world).map(|rank| (rank, 0));
            for (rank, attempt) in noise.into_iter().chain(honest) {
                match meeting.join(Join { attempt: Attempt(attempt), ..join(rank) }) {
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
