//! The scheduler: which queued jobs start now, on which GPUs, and why the others wait. Pure.
//!
//! ```text
//! queue order --> held, dependency, limit of the user or array? --> waits, blocks no other
//!             --> does not fit, or would delay the other kind,
//!                 first of its kind                             --> reservation (`backfill`)
//!             --> fits, and delays no reservation               --> starts
//! ```
//! Kinds are GPU jobs and CPU jobs. They compete for memory only: the cores that GPU jobs hold and the workers of CPU
//! jobs are counted separately.

use std::collections::{BTreeMap, BTreeSet};

use xlaunch_proto::quantities::bytes_text;

use super::backfill::{Candidate, Demand, Ledger, Reservation};
use super::{Entry, Jobs, Phase, Submitted};

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
    /// Cores for GPU jobs.
    pub(crate) cores: u32,
    /// Bytes.
    pub(crate) memory: u64,
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
    /// Why every other queued job waits.
    pub(crate) waits: BTreeMap<u64, Wait>,
    /// All of these jobs, in the order in which they were considered.
    pub(crate) queue: Vec<u64>,
}

/// Why a job waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wait {
    /// For display.
    pub(crate) reason: String,
    /// When its reservation starts, in milliseconds since 1970, if it has one and the time is known.
    pub(crate) starts_by: Option<u64>,
}

/// Schedules the queue on what is free at `now`.
pub(crate) fn schedule(jobs: &Jobs, resources: &Resources, now: u64) -> Schedule {
    let mut pass = Pass::new(jobs, resources, now);
    let queue = jobs.queue(now);
    for &job in &queue {
        let Some(Entry { submitted, .. }) = jobs.jobs.get(&job) else { continue };
        match pass.decide(job, submitted) {
            Ok(gpus) => pass.schedule.starts.push((job, gpus)),
            Err(wait) => drop(pass.schedule.waits.insert(job, wait)),
        }
    }
    Schedule { queue, ..pass.schedule }
}

/// The state of one pass over the queue.
struct Pass<'a> {
    jobs: &'a Jobs,
    resources: &'a Resources,
    now: u64,
    schedule: Schedule,
    free_gpus: std::vec::IntoIter<String>,
    ledger: Ledger,
    gpus_by_user: BTreeMap<u32, u32>,
    running_by_array: BTreeMap<u64, u32>,
    /// What earlier jobs want that wait without a reservation, for another job or for a limit of their user or array.
    /// They may start first, so no time can be promised to a job that competes with them.
    ahead: Demand,
    /// Of the first job of each kind that does not fit: CPU jobs, GPU jobs.
    reservations: [Option<Reservation>; 2],
}

impl<'a> Pass<'a> {
    fn new(jobs: &'a Jobs, resources: &'a Resources, now: u64) -> Self {
        let free = free_gpus(jobs, resources);
        let usable: BTreeSet<&str> = resources
            .gpus
            .iter()
            .filter(|gpu| gpu.unusable.is_none() && !jobs.drained_gpus.contains_key(&gpu.uuid))
            .map(|gpu| gpu.uuid.as_str())
            .collect();
        let capacity = Demand {
            gpus: u32::try_from(usable.len()).unwrap_or(u32::MAX),
            cores: resources.cores,
            cpu_workers: resources.cpu_workers,
            memory: resources.memory,
        };
        let mut pass = Self {
            jobs,
            resources,
            now,
            schedule: Schedule::default(),
            free_gpus: free.into_iter(),
            ledger: Ledger::new(capacity, now),
            gpus_by_user: BTreeMap::new(),
            running_by_array: BTreeMap::new(),
            ahead: Demand::default(),
            reservations: [None, None],
        };
        if let Some(examination) = &jobs.examination {
            let gpus = examination.gpus.iter().filter(|gpu| usable.contains(gpu.as_str())).count();
            let gpus = u32::try_from(gpus).unwrap_or(u32::MAX);
            pass.ledger.hold(Demand { gpus, ..Demand::default() }, Some(examination.until));
        }
        for (_, entry) in jobs.active() {
            let Phase::Active { at, .. } = entry.phase else { continue };
            // GPUs that were drained or broke since will not be free when the job ends.
            let gpus = entry.gpus().filter(|gpu| usable.contains(gpu)).count();
            let demand =
                Demand { gpus: u32::try_from(gpus).unwrap_or(u32::MAX), ..Demand::of(&entry.submitted) };
            pass.ledger.hold(demand, super::limits::released_by(&entry.submitted, at));
            pass.count(&entry.submitted);
        }
        pass
    }

    /// Counts a job that runs against the limits of its user and its array.
    fn count(&mut self, submitted: &Submitted) {
        let gpus = self.gpus_by_user.entry(submitted.uid).or_default();
        *gpus = gpus.saturating_add(submitted.gpus);
        if let Some(element) = submitted.array {
            *self.running_by_array.entry(element.first).or_default() += 1;
        }
    }

    /// The GPUs of a job that starts now, or why it waits.
    fn decide(&mut self, job: u64, submitted: &Submitted) -> Result<Vec<String>, Wait> {
        let wait = |reason: String| Err(Wait { reason, starts_by: None });
        if let Some(reason) = self.held_back(submitted) {
            return wait(reason);
        }
        let kind = usize::from(submitted.gpus > 0);
        let demand = Demand::of(submitted);
        if let Some(reason) = self.limited(submitted) {
            self.ahead = self.ahead.plus(demand);
            return wait(reason);
        }
        let free = self.ledger.free();
        // The list is shorter than the count if a reload has changed the GPUs.
        let fits = demand.fits(free) && self.free_gpus.len() >= submitted.gpus as usize;
        let released = super::limits::released_by(submitted, self.now);
        let candidate = Candidate { uid: submitted.uid, on_gpus: submitted.gpus > 0, demand, released };
        let held = self.gpus_by_user.get(&submitted.uid).copied().unwrap_or(0);
        let limit = self.resources.gpus_per_user;
        let delayed = |reservation: &&Reservation| reservation.is_delayed_by(&candidate, free, held, limit);
        let first = self.reservations.iter().flatten().find(|it| !fits || delayed(it)).map(|first| first.job);
        let behind = |first: u64| format!("waits for job {first} to start first");
        if self.reservations[kind].is_none() && (!fits || first.is_some()) {
            let reservation = self.reserve(job, submitted, demand);
            // A job that only waits for one of the other kind holds up its own kind if it is known until when.
            if !fits || reservation.at.is_some() {
                let starts_by = reservation.at.filter(|_| !demand.competes_with(self.ahead));
                self.reservations[kind] = Some(reservation);
                let reason = first.filter(|_| fits).map_or_else(|| shortage(submitted, demand, free), behind);
                return Err(Wait { reason, starts_by });
            }
        }
        if let Some(first) = first {
            self.ahead = self.ahead.plus(demand);
            return wait(behind(first));
        }
        self.reservations.iter_mut().flatten().for_each(|reservation| reservation.give(&candidate));
        self.ledger.hold(demand, released);
        self.count(submitted);
        Ok(self.free_gpus.by_ref().take(submitted.gpus as usize).collect())
    }

    /// Why a job may not start, whatever is free.
    fn held_back(&self, submitted: &Submitted) -> Option<String> {
        if let Some(hold) = submitted.held {
            return Some(format!("held by user {}", self.jobs.user_label(hold.uid)));
        }
        if let Some(open) = submitted.after.iter().find(|dependency| dependency.met != Some(true)) {
            return Some(format!("waits for job {} to end", open.job));
        }
        self.jobs.drained.as_ref().map(|reason| format!("the node is drained: {reason}"))
    }

    /// Which limit on the jobs of its user or array a job would exceed.
    fn limited(&self, submitted: &Submitted) -> Option<String> {
        if let Some(element) = submitted.array.filter(|element| element.parallel > 0) {
            let (most, running) = (element.parallel, self.running_by_array.get(&element.first).copied());
            if let Some(running) = running.filter(|running| *running >= most) {
                return Some(format!("{running} of at most {most} jobs of its array run"));
            }
        }
        let holds = self.gpus_by_user.get(&submitted.uid).copied().unwrap_or(0);
        let limit = self.resources.gpus_per_user;
        let exceeds = submitted.gpus > 0 && limit > 0 && holds.saturating_add(submitted.gpus) > limit;
        exceeds.then(|| format!("its user holds {holds} of at most {limit} GPUs"))
    }

    fn reserve(&self, job: u64, submitted: &Submitted, demand: Demand) -> Reservation {
        // What the other kind has reserved counts as held: it may start first and compete for memory.
        let others = self.reservations.iter().flatten();
        let others = others.map(|other| (other.demand, other.released));
        self.ledger.reserve(job, submitted, demand, others)
    }
}

/// What is missing.
fn shortage(submitted: &Submitted, demand: Demand, free: Demand) -> String {
    let missing =
        |what: &str, wanted: u32, free: u32| format!("waits for {what}: {wanted} wanted, {free} free");
    if demand.gpus > free.gpus {
        missing("GPUs", demand.gpus, free.gpus)
    } else if demand.cpu_workers > free.cpu_workers {
        let what = if submitted.cpus.is_some() { "CPUs" } else { "CPU workers" };
        missing(what, demand.cpu_workers, free.cpu_workers)
    } else if demand.cores > free.cores {
        missing("CPUs", demand.cores, free.cores)
    } else {
        let (wanted, free) = (bytes_text(demand.memory), bytes_text(free.memory));
        format!("waits for memory: {wanted} wanted, {free} free")
    }
}

fn free_gpus(jobs: &Jobs, resources: &Resources) -> Vec<String> {
    let held: BTreeSet<&str> = jobs.active().flat_map(|(_, entry)| entry.gpus()).collect();
    let usable = resources.gpus.iter().filter(|gpu| {
        gpu.unusable.is_none()
            && !held.contains(gpu.uuid.as_str())
            && !jobs.is_examined(&gpu.uuid)
            && !jobs.drained_gpus.contains_key(&gpu.uuid)
    });
    usable.map(|gpu| gpu.uuid.clone()).collect()
}

impl Entry {
    /// The GPUs that it holds.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &str> {
        let gpus: &[String] = match &self.phase {
            Phase::Active { gpus, .. } => gpus,
            Phase::Queued { .. } | Phase::Ended { .. } => &[],
        };
        gpus.iter().map(String::as_str)
    }
}
