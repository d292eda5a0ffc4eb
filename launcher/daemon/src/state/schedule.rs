//! The scheduler: which queued jobs start now, on which GPUs. Pure.
//!
//! Jobs start in queue order. A job that does not fit yet blocks the later ones of its kind (GPU or CPU), so that large
//! jobs do not starve: there is no backfill. A job that is held back by its user's GPU limit blocks no other.

use std::collections::{BTreeMap, BTreeSet};

use super::{Entry, Jobs, Phase};

/// A GPU as the scheduler sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GpuSlot {
    pub(crate) uuid: String,
    /// Why no job is placed on it: sick, reserved by `jobs.leave_gpus`, or used by a foreign process.
    pub(crate) unusable: Option<String>,
}

/// The node's resources and the limits on their use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    /// In allocation order.
    pub(crate) gpus: Vec<GpuSlot>,
    /// Maximum number of workers of CPU jobs that run at a time.
    pub(crate) cpu_workers: u32,
    /// Maximum number of GPUs that a user's jobs hold at a time; 0 for no limit.
    pub(crate) gpus_per_user: u32,
}

/// What to do with the queue now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// Jobs to start, each with the UUIDs of its GPUs, in starting order.
    pub(crate) starts: Vec<(u64, Vec<String>)>,
    /// Why every other queued job waits, for display.
    pub(crate) waits: BTreeMap<u64, String>,
}

/// Schedules the queue on what is free.
pub(crate) fn schedule(jobs: &Jobs, resources: &Resources) -> Schedule {
    let mut schedule = Schedule::default();
    let mut free = free_gpus(jobs, resources);
    let mut free_cpu_workers = resources.cpu_workers.saturating_sub(active_cpu_workers(jobs));
    let mut held = gpus_held_by_user(jobs);
    // The first job that does not fit, of CPU jobs and of GPU jobs.
    let mut blocked: [Option<u64>; 2] = [None, None];
    for job in jobs.queue() {
        let Some(Entry { submitted, .. }) = jobs.jobs.get(&job) else { continue };
        if let Some(reason) = &jobs.drained {
            schedule.waits.insert(job, format!("the node is drained: {reason}"));
            continue;
        }
        let on_gpus = submitted.gpus > 0;
        if let Some(first) = blocked[usize::from(on_gpus)] {
            schedule.waits.insert(job, format!("waits for job {first} to start first"));
            continue;
        }
        let wanted = submitted.gpus as usize;
        let holds = held.entry(submitted.uid).or_default();
        let limit = resources.gpus_per_user;
        if on_gpus && limit > 0 && holds.saturating_add(submitted.gpus) > limit {
            schedule.waits.insert(job, format!("its user holds {holds} of at most {limit} GPUs"));
        } else if on_gpus && free.len() < wanted {
            blocked[1] = Some(job);
            schedule.waits.insert(job, format!("waits for GPUs: {wanted} wanted, {} free", free.len()));
        } else if !on_gpus && free_cpu_workers < submitted.workers {
            blocked[0] = Some(job);
            let wanted = submitted.workers;
            let reason = format!("waits for CPU workers: {wanted} wanted, {free_cpu_workers} free");
            schedule.waits.insert(job, reason);
        } else {
            *holds = holds.saturating_add(submitted.gpus);
            free_cpu_workers -= if on_gpus { 0 } else { submitted.workers };
            schedule.starts.push((job, free.drain(..wanted).collect()));
        }
    }
    schedule
}

fn free_gpus(jobs: &Jobs, resources: &Resources) -> Vec<String> {
    let held: BTreeSet<&str> = jobs.active().flat_map(|(_, entry)| held_gpus(entry)).collect();
    let usable = resources.gpus.iter().filter(|gpu| {
        gpu.unusable.is_none()
            && !held.contains(gpu.uuid.as_str())
            && !jobs.drained_gpus.contains_key(&gpu.uuid)
    });
    usable.map(|gpu| gpu.uuid.clone()).collect()
}

fn held_gpus(entry: &Entry) -> impl Iterator<Item = &str> {
    let gpus: &[String] = match &entry.phase {
        Phase::Active { gpus, .. } => gpus,
        Phase::Queued { .. } | Phase::Ended { .. } => &[],
    };
    gpus.iter().map(String::as_str)
}

fn active_cpu_workers(jobs: &Jobs) -> u32 {
    let on_cpu = jobs.active().filter(|(_, entry)| entry.submitted.gpus == 0);
    on_cpu.fold(0, |workers, (_, entry)| workers.saturating_add(entry.submitted.workers))
}

fn gpus_held_by_user(jobs: &Jobs) -> BTreeMap<u32, u32> {
    let mut users = BTreeMap::new();
    for (_, entry) in jobs.active() {
        let held: &mut u32 = users.entry(entry.submitted.uid).or_default();
        *held = held.saturating_add(entry.submitted.gpus);
    }
    users
}
