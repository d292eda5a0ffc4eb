//! Tests of reservations, backfill, fair shares, and the other reasons why jobs wait.

use super::super::schedule::{GpuSlot, Resources, schedule};
use super::*;

const HOUR: u64 = 3_600_000;
const NOW: u64 = 1000 * HOUR;

/// A node with these GPUs, 16 cores and 64 bytes of memory.
fn node(gpus: usize) -> Resources {
    let slot = |index: usize| GpuSlot { uuid: format!("g{index}"), unusable: None };
    Resources {
        gpus: (0..gpus).map(slot).collect(),
        cores: 16,
        memory: 64,
        cpu_workers: 8,
        ..Resources::default()
    }
}

fn job(id: u64, uid: u32, gpus: u32, hours: Option<u64>) -> Submitted {
    let Record::Submitted(job) = submitted(id, uid, gpus, 0) else { unreachable!() };
    with(*job, |scheduling| scheduling.time_limit_seconds = hours.map(|hours| hours * 3600))
}

fn add(jobs: &mut Jobs, submitted: Submitted) {
    jobs.apply(Record::Submitted(Box::new(submitted)));
}

fn run(jobs: &mut Jobs, submitted: Submitted, gpus: std::ops::Range<usize>, at: u64) {
    let job = submitted.job;
    add(jobs, submitted);
    let gpus = gpus.map(|index| format!("g{index}")).collect();
    jobs.apply(Record::Starting { job, start: 1, gpus, boot: "b".into(), at });
}

fn started(jobs: &Jobs, resources: &Resources) -> Vec<u64> {
    schedule(jobs, resources, NOW).starts.into_iter().map(|(job, _)| job).collect()
}

#[test]
fn short_job_fills_the_gap_before_a_reservation() {
    let mut jobs = Jobs::default();
    run(&mut jobs, job(1, 1, 6, Some(4)), 0..6, NOW);
    add(&mut jobs, job(2, 1, 8, Some(4)));
    add(&mut jobs, job(3, 1, 2, Some(5)));
    add(&mut jobs, job(4, 1, 2, None));
    add(&mut jobs, job(5, 1, 1, Some(4)));
    let now = schedule(&jobs, &node(8), NOW);
    assert_eq!(now.starts, [(5, vec!["g6".to_string()])], "only job 5 ends before job 1");
    // The limit of job 1 plus the time that its agent may take to stop.
    assert_eq!(now.waits[&2].starts_by, Some(NOW + 4 * HOUR + 60_000));
    assert_eq!(now.waits[&2].reason, "waits for GPUs: 8 wanted, 2 free");
    assert_eq!(now.waits[&3].reason, "waits for job 2 to start first");
    assert_eq!(now.waits[&3].starts_by, None);
}

#[test]
fn job_beside_a_reservation_needs_no_limit() {
    let mut jobs = Jobs::default();
    run(&mut jobs, job(1, 1, 6, Some(4)), 0..6, NOW);
    add(&mut jobs, job(2, 1, 7, None));
    add(&mut jobs, job(3, 1, 1, None));
    add(&mut jobs, job(4, 1, 1, None));
    assert_eq!(started(&jobs, &node(8)), [3], "job 2 leaves one GPU, which job 3 has taken");
}

#[test]
fn nothing_overtakes_a_job_whose_start_is_unknown() {
    let mut jobs = Jobs::default();
    run(&mut jobs, job(1, 1, 6, None), 0..6, NOW);
    add(&mut jobs, job(2, 1, 8, None));
    add(&mut jobs, job(3, 1, 1, Some(1)));
    add(&mut jobs, job(4, 1, 0, None));
    let now = schedule(&jobs, &node(8), NOW);
    assert_eq!(started(&jobs, &node(8)), [4], "a CPU job is of another kind");
    assert_eq!(now.waits[&2].starts_by, None);
}

fn with_memory(job: Submitted, memory: u64) -> Submitted {
    with(job, |scheduling| scheduling.memory_bytes = Some(memory))
}

#[test]
fn user_without_gpus_leaves_the_memory_of_the_gpus_to_others() {
    // A user can hold a quarter of the 64 bytes in addition to the shares of GPUs, which are 6 bytes each.
    let node = Resources { memory_per_user: Some(16), memory_per_gpu: 6, ..node(8) };
    let mut jobs = Jobs::default();
    run(&mut jobs, with_memory(job(1, 1, 0, None), 10), 0..0, NOW);
    add(&mut jobs, with_memory(job(2, 1, 0, None), 7));
    add(&mut jobs, with_memory(job(3, 1, 0, None), 6));
    add(&mut jobs, with_memory(job(4, 2, 8, None), 48));
    let now = schedule(&jobs, &node, NOW);
    assert_eq!(now.starts.iter().map(|(job, _)| *job).collect::<Vec<_>>(), [3, 4]);
    assert!(
        now.waits[&2].reason.starts_with("its user holds") && now.waits[&2].starts_by.is_none(),
        "{now:?}"
    );
    // A GPU job counts with the memory that it requests in addition to the shares of its GPUs.
    add(&mut jobs, with_memory(job(5, 3, 1, None), 6 + 17));
    assert!(schedule(&jobs, &node, NOW).waits[&5].reason.contains("jobs.max_memory_per_user"));
}

#[test]
fn reservation_keeps_its_users_memory_limit_free() {
    let node = Resources { memory_per_user: Some(40), ..node(8) };
    let mut jobs = Jobs::default();
    run(&mut jobs, with_memory(job(1, 2, 0, Some(1)), 30), 0..0, NOW);
    // The reservation is at the end of job 1.
    add(&mut jobs, with_memory(job(2, 1, 0, Some(1)), 38));
    add(&mut jobs, with_memory(job(3, 1, 0, Some(9)), 4));
    add(&mut jobs, with_memory(job(4, 3, 0, Some(9)), 4));
    assert_eq!(started(&jobs, &node), [4], "with job 3, its user could not start job 2 in an hour");
}

#[test]
fn drained_gpu_does_not_count_for_a_reservation() {
    let mut jobs = Jobs::default();
    run(&mut jobs, job(1, 1, 2, Some(1)), 0..2, NOW);
    run(&mut jobs, job(2, 1, 2, Some(9)), 2..4, NOW);
    add(&mut jobs, job(3, 1, 2, None));
    assert_eq!(schedule(&jobs, &node(4), NOW).waits[&3].starts_by, Some(NOW + HOUR + 60_000));
    jobs.apply(drained(&["g0"], false, "fan"));
    assert_eq!(schedule(&jobs, &node(4), NOW).waits[&3].starts_by, Some(NOW + 9 * HOUR + 60_000));
}

#[test]
fn backfilled_job_of_the_same_user_does_not_use_up_the_users_gpus() {
    let mut jobs = Jobs::default();
    run(&mut jobs, job(1, 1, 6, Some(4)), 0..6, NOW);
    add(&mut jobs, job(2, 2, 4, None));
    add(&mut jobs, job(3, 2, 1, None));
    add(&mut jobs, job(4, 3, 1, None));
    let limited = Resources { gpus_per_user: 4, ..node(8) };
    assert_eq!(started(&jobs, &limited), [4], "with job 3, job 2 would exceed the limit of its user");
    assert_eq!(started(&jobs, &node(8)), [3, 4]);
}

#[test]
fn jobs_wait_for_memory_and_cores() {
    let mut jobs = Jobs::default();
    let with = |submitted, cpus: Option<u32>, memory: Option<u64>| {
        with(submitted, |scheduling| (scheduling.cpus, scheduling.memory_bytes) = (cpus, memory))
    };
    run(&mut jobs, with(job(1, 1, 1, None), Some(12), Some(50)), 0..1, NOW);
    add(&mut jobs, with(job(2, 1, 1, None), Some(8), Some(1)));
    add(&mut jobs, with(job(3, 1, 0, None), None, Some(15)));
    add(&mut jobs, with(job(4, 1, 0, None), None, None));
    let now = schedule(&jobs, &node(8), NOW);
    assert_eq!(now.waits[&2].reason, "waits for CPUs: 8 wanted, 4 free");
    assert!(now.waits[&3].reason.starts_with("waits for memory: "), "{now:?}");
    assert_eq!(now.waits[&4].reason, "waits for job 3 to start first");
    let roomy = Resources { memory: 66, ..node(8) };
    assert_eq!(started(&jobs, &roomy), [3, 4], "job 3 leaves the memory that job 2 needs");
    let narrow = Resources { memory: 65, ..node(8) };
    assert_eq!(started(&jobs, &narrow), [4], "job 3 would take memory that job 2 needs");
}

#[test]
fn cpus_of_a_cpu_job_count_in_place_of_its_workers() {
    let mut jobs = Jobs::default();
    add(&mut jobs, with(job(1, 1, 0, None), |scheduling| scheduling.cpus = Some(6)));
    add(&mut jobs, with(job(2, 1, 0, None), |scheduling| scheduling.cpus = Some(3)));
    let now = schedule(&jobs, &node(0), NOW);
    assert_eq!(now.starts.len(), 1);
    assert_eq!(now.waits[&2].reason, "waits for CPUs: 3 wanted, 2 free");
}

#[test]
fn user_who_has_used_less_comes_first_within_a_priority() {
    let mut jobs = Jobs::default();
    run(&mut jobs, job(1, 1, 4, None), 0..4, NOW - 2 * HOUR);
    jobs.apply(ended(1, NOW - HOUR));
    run(&mut jobs, job(2, 2, 1, None), 0..1, NOW - HOUR);
    for (id, uid) in [(3, 1), (4, 2), (5, 3), (6, 1)] {
        add(&mut jobs, job(id, uid, 1, None));
    }
    assert_eq!(jobs.queue(NOW), [5, 4, 3, 6], "running jobs count, too");
    jobs.apply(Record::Reprioritised { job: 6, priority: 1, uid: 0, at: NOW });
    assert_eq!(jobs.queue(NOW), [6, 5, 4, 3]);
    assert_eq!(of(jobs.records()).queue(NOW), [6, 5, 4, 3], "after compaction");
}

#[test]
fn held_job_waits_and_blocks_no_other() {
    let mut jobs = of([submitted(1, 1, 2, 0), submitted(2, 1, 2, 0)]);
    jobs.apply(Record::Held { job: 1, uid: 0, user: String::new(), admin: true, at: 1 });
    let now = schedule(&jobs, &node(2), NOW);
    assert_eq!(started(&jobs, &node(2)), [2]);
    assert_eq!(now.waits[&1].reason, "held by user root");
    assert_eq!(jobs.queue(NOW), [2, 1], "held jobs come last");
    jobs.apply(Record::Released { job: 1, uid: 0, at: 2 });
    assert_eq!(started(&jobs, &node(2)), [1]);
}

#[test]
fn array_limit_bounds_its_concurrent_jobs() {
    let element = Element { first: 1, index: 0, parallel: 2 };
    let first = Submitted { array: Some(element), ..job(1, 1, 1, None) };
    let indices = vec![4, 7, 9, 11];
    let mut jobs = of([Record::SubmittedArray { first: Box::new(first), indices }]);
    assert_eq!(jobs.array(1), [1, 2, 3, 4]);
    assert_eq!(jobs.jobs[&3].submitted.name, "[9]");
    assert_eq!(jobs.job_of_request(1, "", "r1"), Some(1));
    let now = schedule(&jobs, &node(8), NOW);
    assert_eq!(started(&jobs, &node(8)), [1, 2]);
    assert_eq!(now.waits[&3].reason, "2 of at most 2 jobs of its array run");
    jobs.apply(Record::Starting { job: 1, start: 1, gpus: vec!["g0".into()], boot: "b".into(), at: NOW });
    assert_eq!(started(&jobs, &node(8)), [2]);
    assert!(!jobs.array_has_ended(1));
    for job in 1..=4 {
        jobs.apply(ended(job, NOW));
    }
    assert!(jobs.array_has_ended(1));
    assert_eq!(of(jobs.records()), jobs);
}

#[test]
fn outcome_of_a_dependency_outlives_it() {
    use DependencyCondition::{Any, Fail, Ok as Done};
    let after = |id, list: &[(u64, DependencyCondition)]| {
        let dependency = |&(job, condition): &(u64, DependencyCondition)| Dependency {
            job,
            condition: condition.into(),
            met: None,
        };
        with(job(id, 1, 0, None), |scheduling| scheduling.after = list.iter().map(dependency).collect())
    };
    let mut jobs = of([submitted(1, 1, 0, 0), submitted(2, 1, 0, 0)]);
    for waiting in [after(3, &[(1, Done), (2, Any)]), after(4, &[(1, Fail)]), after(5, &[(4, Done)])] {
        add(&mut jobs, waiting);
    }
    let now = schedule(&jobs, &node(0), NOW);
    assert_eq!(now.waits[&3].reason, "waits for job 1 to end");
    assert_eq!(started(&jobs, &node(0)), [1, 2]);
    jobs.apply(ended(1, NOW));
    jobs.apply(Record::Forgotten { job: 1 });
    assert_eq!(jobs.unsatisfiable(), [(4, "dependency not met: job 1 did not fail".to_string())]);
    let Record::Ended { job: 2, .. } = ended(2, NOW) else { unreachable!() };
    jobs.apply(Record::Ended {
        job: 2,
        end: End::Lost,
        exit: None,
        reason: String::new(),
        report: String::new(),
        at: NOW,
        order: 0,
        usage: None,
    });
    assert!(started(&jobs, &node(0)).contains(&3), "done, and ended in whatever way");
    jobs.apply(Record::Ended {
        job: 4,
        end: End::Cancelled,
        exit: None,
        reason: String::new(),
        report: String::new(),
        at: NOW,
        order: 0,
        usage: None,
    });
    assert_eq!(jobs.unsatisfiable(), [(5, "dependency not met: job 4 did not succeed".to_string())]);
    assert_eq!(of(jobs.records()), jobs);
}

#[test]
fn lost_job_goes_back_to_the_queue_ten_times() {
    let mut jobs = Jobs::default();
    add(&mut jobs, with(job(1, 1, 0, None), |scheduling| scheduling.requeue = true));
    let usage = Some(Usage { cpu_ms: 7, peak_memory_bytes: Some(9) });
    for start in 1..=11 {
        jobs.apply(Record::Starting { job: 1, start, gpus: vec![], boot: "b".into(), at: NOW });
        let Some(record) = jobs.requeue(1, "reboot", NOW + HOUR, usage) else {
            assert_eq!(start, 11);
            return;
        };
        jobs.apply(record);
        assert_eq!(jobs.jobs[&1].submitted.requeues, start);
        let total = Usage { cpu_ms: u64::from(start) * 7, peak_memory_bytes: Some(9) };
        assert_eq!(jobs.jobs[&1].totals(), (u64::from(start) * HOUR, Some(total)));
        assert_eq!(of(jobs.records()), jobs);
    }
    panic!("requeued {} times", jobs.jobs[&1].submitted.requeues);
}

#[test]
fn cancelled_and_non_requeueable_jobs_are_not_requeued() {
    let mut jobs = of([submitted(1, 1, 0, 0), starting(1, &[])]);
    assert_eq!(jobs.requeue(1, "reboot", NOW, None), None);
    add(&mut jobs, with(job(2, 1, 0, None), |scheduling| scheduling.requeue = true));
    jobs.apply(Record::Starting { job: 2, start: 1, gpus: vec![], boot: "b".into(), at: NOW });
    assert!(jobs.requeue(2, "reboot", NOW, None).is_some());
    jobs.apply(Record::Cancelled { job: 2, uid: 1, user: String::new(), at: NOW });
    assert_eq!(jobs.requeue(2, "reboot", NOW, None), None);
}
