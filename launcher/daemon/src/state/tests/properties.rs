//! Tests properties of arbitrary sequences of records, even of records that do not fit each other.

use proptest::prelude::*;

use super::super::schedule::{GpuSlot, Resources, schedule};
use super::*;

const GPUS: [&str; 4] = ["a", "b", "c", "d"];

fn gpus() -> impl Strategy<Value = Vec<String>> {
    proptest::sample::subsequence(GPUS.map(str::to_string).to_vec(), 0..=GPUS.len())
}

fn waiting(job: u64, after: u64) -> Record {
    let Record::Submitted(mut submitted) = submitted(job, u32::try_from(job % 2).unwrap(), 0, 0) else {
        unreachable!()
    };
    let condition = DependencyCondition::Ok.into();
    submitted.scheduling.after = vec![Dependency { job: after, condition, met: None }];
    Record::Submitted(submitted)
}

fn any_record() -> impl Strategy<Value = Record> {
    let job = 1..6_u64;
    let end = prop_oneof![Just(End::Done), Just(End::Failed), Just(End::Cancelled), Just(End::Lost)];
    prop_oneof![
        4 => (job.clone(), 0..4_u32, -1..2).prop_map(|(job, gpus, priority)| {
            submitted(job, u32::try_from(job % 2).unwrap(), gpus, priority)
        }),
        4 => (job.clone(), 1..4_u32, gpus(), 1..9_u64).prop_map(|(job, start, gpus, at)| {
            Record::Starting { job, start, gpus, boot: "b".into(), at }
        }),
        1 => (job.clone(), 0..3_u32).prop_map(|(job, uid)| Record::Cancelled { job, uid, user: String::new(), at: 0 }),
        2 => (job.clone(), end, any::<Option<u8>>(), 1..9_u64).prop_map(|(job, end, exit, at)| {
            Record::Ended { job, end, exit, reason: "x".into(), report: "y".into(), at, order: 0, usage: None }
        }),
        1 => job.clone().prop_map(|job| requeued(job, "z")),
        1 => (job.clone(), 0..9_u64).prop_map(|(job, at)| {
            Record::Requeued { job, reason: "z".into(), lost: true, at, usage: None }
        }),
        1 => (job.clone(), any::<bool>())
            .prop_map(|(job, admin)| Record::Held { job, uid: 1, user: String::new(), admin, at: 0 }),
        1 => job.clone().prop_map(|job| Record::Released { job, uid: 1, at: 0 }),
        1 => (job.clone(), -1..2).prop_map(|(job, priority)| Record::Reprioritised { job, priority, uid: 1, at: 0 }),
        1 => job.clone().prop_map(|job| Record::Warned { job, at: 0 }),
        1 => job.clone().prop_map(|job| Record::TimeLimitReached { job, at: 0 }),
        1 => (1..9_u64).prop_map(|seconds| Record::HalfLife { seconds }),
        2 => (job.clone(), job.clone()).prop_map(|(job, after)| waiting(job, after)),
        1 => (gpus(), any::<bool>()).prop_map(|(gpus, undo)| {
            Record::Drained { gpus, undo, reason: "fan".into(), uid: 0, at: 0 }
        }),
        1 => job.prop_map(|job| Record::Forgotten { job }),
        1 => (0..9_u64, 0..9_u64).prop_map(|(submitted, ended)| Record::Counted { submitted, ended }),
    ]
}

proptest! {
    #[test]
    fn compaction_preserves_the_state(records in proptest::collection::vec(any_record(), 0..40)) {
        let jobs = of(records);
        prop_assert_eq!(of(jobs.records()), jobs);
    }

    #[test]
    fn schedule_uses_free_resources_within_limits(
        records in proptest::collection::vec(any_record(), 0..40),
        cpu_workers in 0..4_u32,
        gpus_per_user in 0..4_u32,
    ) {
        let jobs = of(records);
        let slot = |gpu: &str| GpuSlot { uuid: gpu.into(), unusable: (gpu == "d").then(|| "sick".into()) };
        let gpus = GPUS.map(slot).to_vec();
        let unlimited = Resources { gpus, cores: 4, memory: 8, ..Resources::default() };
        let resources = Resources { cpu_workers, gpus_per_user, ..unlimited };
        let schedule = schedule(&jobs, &resources, 10);

        let mut seen: Vec<u64> = schedule.starts.iter().map(|(job, _)| *job).collect();
        seen.extend(schedule.waits.keys());
        seen.sort_unstable();
        let mut queue = jobs.queue(10);
        queue.sort_unstable();
        prop_assert_eq!(seen, queue, "each queued job starts or waits");

        let mut taken: Vec<&String> = schedule.starts.iter().flat_map(|(_, gpus)| gpus).collect();
        let all = taken.len();
        taken.sort();
        taken.dedup();
        prop_assert_eq!(taken.len(), all, "no GPU is given twice");
        for gpu in taken {
            let is_held = |entry: &Entry| matches!(&entry.phase, Phase::Active { gpus, .. } if gpus.contains(gpu));
            prop_assert!(gpu != "d" && !jobs.drained_gpus.contains_key(gpu));
            prop_assert!(!jobs.jobs.values().any(is_held), "{} is held", gpu);
        }
        for (job, gpus) in &schedule.starts {
            let submitted = &jobs.jobs[job].submitted;
            prop_assert_eq!(gpus.len(), submitted.gpus as usize);
            prop_assert!(jobs.drained.is_none());
            if submitted.gpus == 0 {
                prop_assert!(submitted.workers <= cpu_workers);
            } else if gpus_per_user > 0 {
                prop_assert!(submitted.gpus <= gpus_per_user);
            }
        }
    }
}
