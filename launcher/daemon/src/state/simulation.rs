//! Simulates a node to measure how long jobs wait under a policy. Used by `cargo bench -p xlaunch-daemon --bench
//! schedule --profile release`.
//!
//! Jobs arrive at random and are scheduled by the daemon's own code. The results depend only on the seed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::Scheduling;

use super::schedule::{GpuSlot, Resources, schedule};
use super::{End, Jobs, Record, Submitted};

const GPUS: u32 = 8;
const USERS: u64 = 12;
/// Share of the GPUs that arriving jobs would keep busy if they were packed without gaps.
const LOAD: f64 = 0.85;
/// Milliseconds since 1970 at the first arrival.
const BEGIN: u64 = 1_700_000_000_000;

/// The scheduling policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Jobs start strictly in order of submission. Users set no time limits, so no job can be backfilled.
    Fifo,
    /// Time limits are twice the run time, so that jobs can be backfilled, and users are ordered by their past usage.
    FairShare,
}

/// Results that users of the node experience.
#[derive(Clone, Copy, Debug)]
pub struct Results {
    pub mean_wait: Duration,
    /// 95th percentile of the waiting time.
    pub p95_wait: Duration,
    /// Fraction of the GPU time, up to the end of the last job, during which GPUs are held.
    pub utilisation: f64,
    /// Time from the first arrival to the end of the last job.
    pub makespan: Duration,
}

struct Job {
    arrives: u64,
    runs: u64,
    gpus: u32,
    uid: u32,
}

/// Simulates this many jobs.
pub fn simulate(jobs: usize, seed: u64, policy: Policy) -> Results {
    let plan = plan(jobs, seed);
    let mut node = Jobs::default();
    let (mut arrivals, mut ends) = (plan.iter().zip(1_u64..).peekable(), BTreeSet::<(u64, u64)>::new());
    let (mut waits, mut last) = (Vec::with_capacity(jobs), BEGIN);
    loop {
        let arrival = arrivals.peek().map(|(job, _)| job.arrives);
        let end = ends.first().map(|(at, _)| *at);
        let Some(now) = arrival.into_iter().chain(end).min() else { break };
        while let Some((job, id)) = arrivals.next_if(|(job, _)| job.arrives <= now) {
            node.apply(Record::Submitted(Box::new(submitted(id, job, policy))));
        }
        while let Some(&(at, job)) = ends.first().filter(|(at, _)| *at <= now) {
            ends.remove(&(at, job));
            let (reason, report) = (String::new(), String::new());
            node.apply(Record::Ended {
                job,
                end: End::Done,
                exit: Some(0),
                reason,
                report,
                at,
                order: 0,
                usage: None,
            });
            node.apply(Record::Forgotten { job });
            last = at;
        }
        for (job, gpus) in schedule(&node, &resources(), now).starts {
            let planned = usize::try_from(job - 1).ok().and_then(|index| plan.get(index));
            let Some(planned) = planned else { continue };
            node.apply(Record::Starting { job, start: 1, gpus, boot: String::new(), at: now });
            ends.insert((now + planned.runs, job));
            waits.push(now - planned.arrives);
        }
    }
    waits.sort_unstable();
    let makespan = last - BEGIN;
    let held: u64 = plan.iter().map(|job| job.runs * u64::from(job.gpus)).sum();
    Results {
        mean_wait: Duration::from_millis(waits.iter().sum::<u64>() / waits.len().max(1) as u64),
        p95_wait: Duration::from_millis(waits.get(waits.len() * 95 / 100).copied().unwrap_or(0)),
        utilisation: held as f64 / (makespan * u64::from(GPUS)) as f64,
        makespan: Duration::from_millis(makespan),
    }
}

/// Measures one pass over a queue of this length on a full node. Returns the fastest of several passes.
pub fn time_of_pass(queued: usize, policy: Policy) -> Duration {
    let mut node = Jobs::default();
    for (job, id) in plan(queued + 1, 1).iter().zip(1..) {
        node.apply(Record::Submitted(Box::new(submitted(id, job, policy))));
    }
    let gpus = (0..GPUS - 1).map(uuid).collect();
    node.apply(Record::Starting { job: 1, start: 1, gpus, boot: String::new(), at: BEGIN });
    let pass = || {
        let begin = Instant::now();
        std::hint::black_box(schedule(&node, &resources(), BEGIN + 1000));
        begin.elapsed()
    };
    (0..20).map(|_| pass()).min().unwrap_or_default()
}

fn submitted(job: u64, planned: &Job, policy: Policy) -> Submitted {
    let fair = policy == Policy::FairShare;
    Submitted {
        job,
        uid: if fair { planned.uid } else { 1 },
        gpus: planned.gpus,
        workers: planned.gpus,
        rate: planned.gpus * 1000,
        scheduling: Scheduling {
            time_limit_seconds: fair.then_some(2 * planned.runs.div_ceil(1000)),
            ..Scheduling::default()
        },
        at: planned.arrives,
        request_id: job.to_string(),
        ..Submitted::default()
    }
}

fn uuid(index: u32) -> String {
    format!("GPU-{index}")
}

fn resources() -> Resources {
    let slot = |index| GpuSlot { uuid: uuid(index), unusable: None };
    Resources {
        gpus: (0..GPUS).map(slot).collect(),
        cores: 128,
        memory: 1 << 40,
        cpu_workers: 128,
        ..Resources::default()
    }
}

/// Plans the jobs: Poisson arrivals; run times between a minute and two days with a Pareto tail; half of the jobs
/// request one GPU.
fn plan(jobs: usize, seed: u64) -> Vec<Job> {
    let mut random = Random(seed);
    let mut plan: Vec<Job> = (0..jobs)
        .map(|_| {
            let runs = (60_000.0 * random.unit().powf(-1.0 / 0.8)).min(172_800_000.0) as u64;
            let gpus = match random.unit() {
                ..0.5 => 1,
                ..0.7 => 2,
                ..0.9 => 4,
                _ => 8,
            };
            // A few users submit most of the jobs.
            let uid = 1000 + (random.unit().powi(2) * USERS as f64) as u32;
            Job { arrives: 0, runs, gpus, uid }
        })
        .collect();
    let work: f64 = plan.iter().map(|job| job.runs as f64 * f64::from(job.gpus)).sum();
    let interval = work / (f64::from(GPUS) * LOAD * jobs as f64);
    let mut at = BEGIN as f64;
    for job in &mut plan {
        at -= interval * random.unit().ln();
        job.arrives = at as u64;
    }
    plan
}

/// SplitMix64 pseudo-random number generator.
struct Random(u64);

impl Random {
    /// Returns a number in (0, 1].
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        ((word >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }
}
