use super::super::schedule::{GpuSlot, Resources, Schedule, schedule};
use super::*;

fn resources(gpus: &[&str], cpu_workers: u32) -> Resources {
    let gpus = gpus.iter().map(|gpu| GpuSlot { uuid: gpu.to_string(), unusable: None }).collect();
    Resources { gpus, cpu_workers, cores: 64, memory: 64 << 30, ..Resources::default() }
}

fn starts(schedule: &Schedule) -> Vec<(u64, String)> {
    schedule.starts.iter().map(|(job, gpus)| (*job, gpus.join(" "))).collect()
}

/// A queued CPU job with this number of workers.
fn on_cpu(job: u64, workers: u32) -> Record {
    let Record::Submitted(mut job) = submitted(job, 1, 0, 0) else { unreachable!() };
    job.workers = workers;
    Record::Submitted(job)
}

#[test]
fn workers_and_gpus_of_any_number_are_counted() {
    let jobs = of([
        on_cpu(1, u32::MAX),
        on_cpu(2, 2),
        submitted(3, 1, u32::MAX, 0),
        submitted(4, 1, 2, 0),
        starting(1, &[]),
        starting(2, &[]),
        starting(3, &[]),
        starting(4, &[]),
        on_cpu(5, 1),
        submitted(6, 1, 1, 0),
    ]);
    let now = schedule(&jobs, &Resources { gpus_per_user: 2, ..resources(&["a"], 4) }, 0);
    assert_eq!((starts(&now), now.waits.keys().copied().collect()), (vec![], vec![5, 6]));
}

#[test]
fn gpu_has_one_job_and_unusable_gpus_have_none() {
    let mut jobs =
        of([submitted(1, 1, 2, 0), starting(1, &["a", "b"]), submitted(2, 1, 1, 0), submitted(3, 1, 1, 0)]);
    jobs.apply(drained(&["c"], false, "fan"));
    let mut resources = resources(&["a", "b", "c", "d", "e"], 0);
    resources.gpus[3].unusable = Some("sick".into());
    let now = schedule(&jobs, &resources, 10);
    assert_eq!(starts(&now), [(2, "e".into())]);
    assert_eq!(now.waits[&3].reason, "waits for GPUs: 1 wanted, 0 free");
    jobs.apply(ended(1, 20));
    assert_eq!(starts(&schedule(&jobs, &resources, 10)), [(2, "a".into()), (3, "b".into())]);
}

#[test]
fn large_job_is_not_overtaken_except_by_priority_and_cpu_jobs() {
    let jobs = of([
        submitted(1, 1, 1, 0),
        starting(1, &["a"]),
        submitted(2, 1, 4, 0),
        submitted(3, 2, 1, 0),
        submitted(4, 2, 0, 0),
        submitted(5, 2, 1, 7),
    ]);
    let now = schedule(&jobs, &resources(&["a", "b", "c", "d"], 1), 10);
    assert_eq!(starts(&now), [(5, "b".into()), (4, String::new())]);
    assert_eq!(now.waits[&2].reason, "waits for GPUs: 4 wanted, 2 free");
    assert_eq!(now.waits[&3].reason, "waits for job 2 to start first");
}

#[test]
fn job_that_needs_exactly_the_free_gpus_starts() {
    let jobs = of([submitted(1, 1, 2, 0), submitted(2, 1, 1, 0)]);
    assert_eq!(
        starts(&schedule(&jobs, &resources(&["a", "b", "c"], 0), 10)),
        [(1, "a b".into()), (2, "c".into())]
    );
    let now = schedule(&jobs, &resources(&["a"], 0), 10);
    assert_eq!(starts(&now), [(2, "a".into())]);
    assert_eq!(now.waits[&1].reason, "waits for GPUs: 2 wanted, 1 usable on this node");
}

#[test]
fn oversized_job_does_not_block_free_resources() {
    // Each of jobs 1 to 4 requests more than is in service.
    let with = |job: Record, change: fn(&mut Submitted)| {
        let Record::Submitted(mut submitted) = job else { unreachable!() };
        change(&mut submitted);
        Record::Submitted(submitted)
    };
    let mut jobs = of([
        submitted(1, 1, 4, 0),
        with(submitted(2, 1, 1, 0), |job| job.scheduling.memory_bytes = Some(65 << 30)),
        with(submitted(3, 1, 1, 0), |job| job.scheduling.cpus = Some(65)),
        on_cpu(4, 3),
        submitted(5, 2, 2, 0),
        on_cpu(6, 2),
    ]);
    jobs.apply(drained(&["c"], false, "fan"));
    let mut resources = resources(&["a", "b", "c", "d"], 2);
    resources.gpus[3].unusable = Some("sick".into());
    let now = schedule(&jobs, &resources, 10);
    assert_eq!(starts(&now), [(5, "a b".into()), (6, String::new())]);
    let reasons: Vec<_> = (1..=4).map(|job| now.waits[&job].reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "waits for GPUs: 4 wanted, 2 usable on this node",
            "waits for memory: 65 GiB wanted, 64 GiB usable on this node",
            "waits for CPUs: 65 wanted, 64 usable on this node",
            "waits for CPU workers: 3 wanted, 2 usable on this node",
        ]
    );
    // GPUs in use are in service, so others wait for a job that needs them.
    let jobs =
        of([submitted(1, 1, 2, 0), starting(1, &["a", "b"]), submitted(2, 1, 4, 0), submitted(3, 2, 1, 0)]);
    resources.gpus[3].unusable = None;
    assert!(schedule(&jobs, &resources, 10).starts.is_empty());
}

#[test]
fn large_job_is_not_overtaken_while_the_gpus_of_an_ended_job_settle() {
    let mut jobs =
        of([submitted(1, 1, 1, 0), starting(1, &["a"]), submitted(2, 1, 2, 0), submitted(3, 1, 1, 0)]);
    jobs.apply(ended(1, 20));
    let mut resources = resources(&["a", "b"], 0);
    resources.gpus[0].unusable = Some("used by a process outside any job".into());
    resources.settling.insert("a".into());
    let now = schedule(&jobs, &resources, 30);
    assert!(now.starts.is_empty() && now.waits[&2].reason.ends_with("2 wanted, 1 free"), "{now:?}");
    resources.settling.clear();
    assert_eq!(starts(&schedule(&jobs, &resources, 30)), [(3, "b".into())], "a process that stays");
}

#[test]
fn commands_and_jobs_of_root_wait_while_they_are_not_accepted() {
    let Record::Submitted(mut command) = submitted(1, 1, 0, 0) else { unreachable!() };
    command.trainer = false;
    let jobs = of([Record::Submitted(command), submitted(2, 0, 0, 0), submitted(3, 1, 0, 0)]);
    let accepting = resources(&[], 4);
    assert_eq!(starts(&schedule(&jobs, &accepting, 10)).len(), 3);
    let now = schedule(&jobs, &Resources { only_training: true, no_root: true, ..accepting }, 10);
    assert_eq!(starts(&now), [(3, String::new())]);
    assert!(now.waits[&1].reason.contains("jobs.allow_commands"), "{now:?}");
    assert!(now.waits[&2].reason.contains("jobs.allow_root"), "{now:?}");
}

#[test]
fn cpu_jobs_share_the_workers_that_active_cpu_jobs_leave() {
    let jobs = of([
        on_cpu(1, 2),
        starting(1, &[]),
        // Workers of GPU jobs do not count, whether they are running or start now.
        submitted(2, 1, 3, 0),
        starting(2, &["a", "b", "c"]),
        submitted(3, 1, 1, 0),
        on_cpu(4, 2),
        on_cpu(5, 1),
        on_cpu(6, 1),
    ]);
    let now = schedule(&jobs, &resources(&["a", "b", "c", "d"], 5), 10);
    assert_eq!(starts(&now), [(3, "d".into()), (4, String::new()), (5, String::new())]);
    assert_eq!(now.waits[&6].reason, "waits for CPU workers: 1 wanted, 0 free");
    let now = schedule(&jobs, &resources(&["a", "b", "c"], 3), 10);
    assert!(now.starts.is_empty(), "{now:?}");
    assert_eq!(now.waits[&3].reason, "waits for GPUs: 1 wanted, 0 free", "not blocked by CPU jobs");
    assert_eq!(now.waits[&4].reason, "waits for CPU workers: 2 wanted, 1 free");
    assert_eq!(now.waits[&5].reason, "waits for job 4 to start first", "although it would fit");
    // A reload can lower the limit below the number of running workers.
    assert_eq!(
        schedule(&jobs, &resources(&[], 1), 10).waits[&4].reason,
        "waits for CPU workers: 2 wanted, 1 usable on this node"
    );
}

#[test]
fn gpu_limit_of_a_user_delays_only_that_user() {
    let jobs = of([submitted(1, 1, 2, 0), submitted(2, 1, 1, 0), submitted(3, 2, 1, 0)]);
    let now = schedule(&jobs, &Resources { gpus_per_user: 2, ..resources(&["a", "b", "c"], 0) }, 10);
    assert_eq!(starts(&now), [(1, "a b".into()), (3, "c".into())]);
    assert_eq!(now.waits[&2].reason, "its user holds 2 of at most 2 GPUs");
}

#[test]
fn gpu_limit_counts_active_jobs_and_spares_cpu_jobs() {
    let jobs = of([
        submitted(1, 1, 1, 0),
        starting(1, &["a"]),
        submitted(2, 1, 2, 0),
        submitted(3, 1, 1, 0),
        submitted(4, 1, 0, 0),
    ]);
    let limited = |gpus_per_user| Resources { gpus_per_user, ..resources(&["a", "b", "c", "d"], 1) };
    let now = schedule(&jobs, &limited(2), 10);
    assert_eq!(starts(&now), [(3, "b".into()), (4, String::new())], "job 3 reaches the limit exactly");
    assert_eq!(now.waits[&2].reason, "its user holds 1 of at most 2 GPUs");
    let now = schedule(&jobs, &limited(0), 10);
    assert_eq!(starts(&now), [(2, "b c".into()), (3, "d".into()), (4, String::new())], "0 is no limit");
    assert_eq!(starts(&schedule(&jobs, &limited(1), 10)), [(4, String::new())]);
}

#[test]
fn drained_node_starts_nothing_and_gives_the_reason() {
    let jobs = of([submitted(1, 1, 0, 0), submitted(2, 1, 1, 0), drained(&[], false, "new fans")]);
    let now = schedule(&jobs, &resources(&["a"], 4), 10);
    assert!(now.starts.is_empty(), "{now:?}");
    assert_eq!([&now.waits[&1].reason, &now.waits[&2].reason], ["the node is drained: new fans"; 2]);
}
