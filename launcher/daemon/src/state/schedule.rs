//! Which jobs start now, on which GPUs. Pure.
//!
//! Jobs go in the order of the queue. One that does not fit yet keeps later ones of its kind (on GPUs, or on the CPU) from
//! passing it: whatever its size, its turn comes. One that is held back by its user's limit is passed.

use std::collections::{BTreeMap, BTreeSet};

use super::{Entry, Jobs, Phase};

/// A GPU as jobs are placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its UUID.
    pub uuid: String,
    /// Why it takes no job whatever the queue says: sick, left to others, used by a stranger.
    pub unusable: Option<String>,
}

/// What there is, and who may have how much.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// In the order in which they are given away.
    pub gpus: Vec<Slot>,
    /// Workers of CPU jobs at a time.
    pub cpu_workers: u32,
    /// GPUs that a user's jobs may hold; 0 for all.
    pub gpus_per_user: u32,
}

/// The jobs that start now, each with its GPUs; and why others do not, for the one that is next of its kind and for those
/// held back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// In order.
    pub starts: Vec<(u64, Vec<String>)>,
    /// What a job waits for, in words.
    pub waits: BTreeMap<u64, String>,
}

/// The schedule of this moment.
pub fn schedule(jobs: &Jobs, room: &Room) -> Schedule {
    let mut schedule = Schedule::default();
    let mut free = free_gpus(jobs, room);
    let mut cpu = room.cpu_workers.saturating_sub(cpu_workers(jobs));
    let mut held = held_by_user(jobs);
    let mut blocked: [Option<u64>; 2] = [None, None];
    for job in jobs.queue() {
        let Some(Entry { submitted, .. }) = jobs.jobs.get(&job) else { continue };
        if let Some(reason) = &jobs.drained {
            schedule.waits.insert(job, format!("the node is drained: {reason}"));
            continue;
        }
        let on_gpus = submitted.gpus > 0;
        if let Some(first) = blocked[usize::from(on_gpus)] {
            schedule.waits.insert(job, format!("waits behind job {first}"));
            continue;
        }
        let wants = submitted.gpus as usize;
        let holds = held.entry(submitted.uid).or_default();
        if on_gpus && room.gpus_per_user > 0 && *holds + submitted.gpus > room.gpus_per_user {
            let limit = room.gpus_per_user;
            schedule.waits.insert(job, format!("its user holds {holds} of at most {limit} GPUs"));
        } else if on_gpus && free.len() < wants {
            blocked[1] = Some(job);
            schedule.waits.insert(job, format!("waits for GPUs: {wants} wanted, {} free", free.len()));
        } else if !on_gpus && cpu < submitted.workers {
            blocked[0] = Some(job);
            let wants = submitted.workers;
            schedule.waits.insert(job, format!("waits for CPU workers: {wants} wanted, {cpu} free"));
        } else {
            *holds += submitted.gpus;
            cpu -= if on_gpus { 0 } else { submitted.workers };
            schedule.starts.push((job, free.drain(..wants).collect()));
        }
    }
    schedule
}

fn free_gpus(jobs: &Jobs, room: &Room) -> Vec<String> {
    let held: BTreeSet<&str> = jobs.active().flat_map(|(_, entry)| held(entry)).collect();
    let usable = room.gpus.iter().filter(|gpu| {
        gpu.unusable.is_none()
            && !held.contains(gpu.uuid.as_str())
            && !jobs.drained_gpus.contains_key(&gpu.uuid)
    });
    usable.map(|gpu| gpu.uuid.clone()).collect()
}

/// GPUs that this job holds.
fn held(entry: &Entry) -> impl Iterator<Item = &str> {
    let gpus: &[String] = match &entry.phase {
        Phase::Active { gpus, .. } => gpus,
        Phase::Queued { .. } | Phase::Ended { .. } => &[],
    };
    gpus.iter().map(String::as_str)
}

/// Workers of CPU jobs that run.
fn cpu_workers(jobs: &Jobs) -> u32 {
    let on_cpu = jobs.active().filter(|(_, entry)| entry.submitted.gpus == 0);
    on_cpu.map(|(_, entry)| entry.submitted.workers).sum()
}

fn held_by_user(jobs: &Jobs) -> BTreeMap<u32, u32> {
    let mut users = BTreeMap::new();
    for (_, entry) in jobs.active() {
        *users.entry(entry.submitted.uid).or_default() += entry.submitted.gpus;
    }
    users
}
