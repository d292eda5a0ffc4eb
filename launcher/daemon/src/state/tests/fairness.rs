//! Tests properties of complete histories: jobs arrive, start as scheduled, and end within their limits.

use std::collections::BTreeMap;

use proptest::prelude::*;
use xlaunch_proto::v1::{Dependency, DependencyCondition, Scheduling};

use super::super::limits::released_by;
use super::super::schedule::{GpuSlot, Resources, schedule};
use std::borrow::Cow;

use super::*;
use crate::view::Caller;

/// The random properties of a job.
#[derive(Clone, Debug)]
struct Plan {
    arrives: u64,
    /// Run time in milliseconds, at most the limit.
    runs: u64,
    limit: Option<u64>,
    uid: u32,
    gpus: u32,
    cpus: Option<u32>,
    memory: Option<u64>,
    /// The job that it depends on, counted back from its own number; 0 for none.
    after: u64,
    parallel: u32,
}

const RESOURCES: (u32, u32, u64, u32) = (4, 8, 16, 4);

fn node(gpus_per_user: u32) -> Resources {
    let (gpus, cores, memory, cpu_workers) = RESOURCES;
    let slot = |index| GpuSlot { uuid: format!("g{index}"), unusable: None };
    Resources {
        gpus: (0..gpus).map(slot).collect(),
        cores,
        memory,
        cpu_workers,
        gpus_per_user,
        ..Resources::default()
    }
}

fn plans(users: u32) -> impl Strategy<Value = Vec<Plan>> {
    let (gpus, _, memory, workers) = RESOURCES;
    let plan = (
        0..400_000_u64,
        1..200_u64,
        proptest::option::weighted(0.7, 1..4_u64),
        (0..users, 0..=gpus),
        proptest::option::of(1..=workers),
        proptest::option::of(1..=memory),
        (prop_oneof![3 => Just(0_u64), 1 => 1..4_u64], prop_oneof![3 => Just(0_u32), 1 => 1..3_u32]),
    );
    let plan = plan.prop_map(|(arrives, runs, times, (uid, gpus), cpus, memory, (after, parallel))| Plan {
        arrives,
        runs: runs * 1000,
        limit: times.map(|times| runs * times),
        uid,
        gpus,
        cpus,
        memory,
        after,
        parallel,
    });
    proptest::collection::vec(plan, 1..25).prop_map(|mut plans| {
        plans.sort_by_key(|plan| plan.arrives);
        plans
    })
}

fn record(jobs: &Jobs, job: u64, plan: &Plan, with_dependencies: bool) -> Record {
    let depends = with_dependencies && (1..job).contains(&plan.after);
    let condition = DependencyCondition::Any.into();
    let after = depends.then(|| Dependency { job: job - plan.after, condition, met: None });
    let mut after: Vec<_> = after.into_iter().collect();
    let admin = Caller { uid: 0, name: Cow::Borrowed(""), admin: true };
    jobs.look_up_dependencies(&admin, &mut after).unwrap();
    // All of these jobs share one array, and so its limit.
    let array = (with_dependencies && plan.parallel > 0).then_some(Element {
        first: 1,
        index: u32::try_from(job).unwrap(),
        parallel: plan.parallel,
    });
    Record::Submitted(Box::new(Submitted {
        job,
        request_id: format!("r{job}"),
        uid: plan.uid,
        gpus: plan.gpus,
        workers: plan.gpus.max(1),
        scheduling: Scheduling {
            time_limit_seconds: plan.limit,
            cpus: plan.cpus,
            memory_bytes: plan.memory,
            after,
            ..Scheduling::default()
        },
        array,
        ..Submitted::default()
    }))
}

/// Runs all jobs to their end. `check` is called with the jobs and the promised starts after each pass. Returns the
/// start time of each job.
fn run(
    plans: &[Plan],
    resources: &Resources,
    with_dependencies: bool,
    mut check: impl FnMut(&Jobs, u64, &BTreeMap<u64, u64>),
) -> BTreeMap<u64, u64> {
    let mut jobs = Jobs::default();
    let (mut arrivals, mut ends) = (plans.iter().zip(1..).peekable(), BTreeMap::<(u64, u64), ()>::new());
    let (mut started, mut promised) = (BTreeMap::new(), BTreeMap::new());
    loop {
        let arrival = arrivals.peek().map(|(plan, _)| plan.arrives + 1);
        let end = ends.keys().next().map(|(at, _)| *at);
        let Some(now) = arrival.into_iter().chain(end).min() else { return started };
        while let Some((plan, job)) = arrivals.next_if(|(plan, _)| plan.arrives < now) {
            jobs.apply(record(&jobs, job, plan, with_dependencies));
        }
        while let Some((&(at, job), ())) = ends.first_key_value().filter(|((at, _), ())| *at <= now) {
            ends.remove(&(at, job));
            jobs.apply(ended(job, now));
        }
        let pass = schedule(&jobs, resources, now);
        for (job, gpus) in pass.starts {
            assert_eq!(gpus.len(), jobs.jobs[&job].submitted.gpus as usize);
            jobs.apply(Record::Starting { job, start: 1, gpus, boot: "b".into(), at: now });
            started.insert(job, now);
            ends.insert((now + plans[usize::try_from(job).unwrap() - 1].runs, job), ());
        }
        for (job, wait) in pass.waits {
            if let Some(at) = wait.starts_by {
                let first = promised.entry(job).or_insert(at);
                *first = at.min(*first);
            }
        }
        check(&jobs, now, &promised);
    }
}

/// Asserts that the resources held by running jobs do not exceed the node's.
fn assert_within_limits(jobs: &Jobs, resources: &Resources) {
    let active = || jobs.active().map(|(_, entry)| &entry.submitted);
    let mut held: Vec<&str> = jobs.active().flat_map(|(_, entry)| entry.gpus()).collect();
    let all = held.len();
    held.sort_unstable();
    held.dedup();
    assert_eq!(held.len(), all, "a GPU has two jobs");
    let cores: u32 = active().filter(|it| it.gpus > 0).filter_map(|it| it.scheduling.cpus).sum();
    let workers: u32 =
        active().filter(|it| it.gpus == 0).map(|it| it.scheduling.cpus.unwrap_or(it.workers)).sum();
    let memory: u64 = active().filter_map(|it| it.scheduling.memory_bytes).sum();
    assert!(cores <= resources.cores && workers <= resources.cpu_workers && memory <= resources.memory);
    let mut by_user = BTreeMap::<u32, u32>::new();
    active().for_each(|it| *by_user.entry(it.uid).or_default() += it.gpus);
    let limit = resources.gpus_per_user;
    assert!(limit == 0 || by_user.values().all(|gpus| *gpus <= limit), "{by_user:?}");
}

proptest! {
    #[test]
    fn every_job_starts_and_no_limit_is_exceeded(plans in plans(3), gpus_per_user in prop_oneof![Just(0), Just(4)]) {
        let resources = node(gpus_per_user);
        let started = run(&plans, &resources, true, |jobs, _, _| {
            assert_within_limits(jobs, &resources);
            assert_eq!(&of(jobs.records()), jobs, "replayed");
            let of_arrays = jobs.active().filter(|(_, entry)| entry.submitted.array.is_some()).count();
            // Jobs with different limits share the array here, so the largest limit applies.
            assert!(of_arrays <= 2, "{of_arrays} jobs of an array run");
        });
        prop_assert_eq!(started.len(), plans.len(), "a job starves");
    }

    #[test]
    fn reservation_is_never_delayed_by_backfilled_jobs(
        plans in plans(1),
        gpus_per_user in prop_oneof![Just(0), Just(4)],
    ) {
        // With a single user, later jobs are always queued after earlier ones.
        let mut last = BTreeMap::new();
        let started = run(&plans, &node(gpus_per_user), false, |_, _, promised| last.clone_from(promised));
        for (job, promised) in last {
            prop_assert!(started[&job] <= promised, "job {} starts at {} > {}", job, started[&job], promised);
        }
    }
}

#[test]
fn job_waiting_for_the_other_kind_is_not_overtaken_by_its_own_kind() {
    let plan = |arrives, runs, limit, gpus, cpus, memory| {
        let (uid, after, parallel) = (0, 0, 0);
        Plan { arrives, runs, limit, uid, gpus, cpus, memory, after, parallel }
    };
    let plans = [
        plan(0, 190_000, None, 1, None, None),
        plan(0, 77_000, Some(77), 0, None, None),
        // Job 3 waits for a CPU that job 2 holds.
        plan(0, 1000, Some(1), 0, Some(4), Some(1)),
        // Job 4 would fit, but would delay job 3, which needs some of the memory.
        plan(1, 11_000, None, 1, None, Some(16)),
        // Job 5 would take the GPU that job 4 needs then.
        plan(1, 300_000, Some(300), 3, None, None),
    ];
    let mut promised = BTreeMap::new();
    let started = run(&plans, &node(0), false, |_, _, all| promised.clone_from(all));
    assert!(started[&4] <= promised[&4] && started[&4] < started[&5], "{started:?} {promised:?}");
}

#[test]
fn reservation_includes_the_time_to_stop() {
    let mut submitted = Submitted { shutdown_timeout: 30.0, ..Submitted::default() };
    submitted.scheduling.time_limit_seconds = Some(100);
    assert_eq!(released_by(&submitted, 5000), Some(5000 + 100_000 + 30_000 + 60_000));
}
