//! The scheduler: decides which queued jobs start now and on which GPUs, and why the others wait. Pure.
//!
//! ```text
//! queue order --> held, dependency, not accepted, limit of the
//!                 user or array, more than is in service?       --> waits, blocks no other
//!             --> does not fit, or would delay the other kind,
//!                 first of its kind                             --> reservation (`backfill`)
//!             --> fits, and delays no reservation               --> starts
//! ```
//! The kinds are GPU jobs and CPU jobs. They compete only for memory: cores held by GPU jobs and workers of CPU jobs
//! are counted separately.

use std::collections::{BTreeMap, BTreeSet};

use xlaunch_spec::quantities::bytes_text;

use super::backfill::{Candidate, Demand, Ledger, Reservation};
use super::{Entry, Jobs, Phase, Submitted};

/// Time after the end of a job during which its processes may still be seen on its GPUs, in milliseconds. GPUs are
/// polled every 5 s.
pub(crate) const SETTLING_MS: u64 = 15_000;

/// A GPU as the scheduler sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GpuSlot {
    pub(crate) uuid: String,
    /// The reason why no job is placed on it: sick, reserved by `jobs.leave_gpus`, or used by a foreign process.
    pub(crate) unusable: Option<String>,
}

/// The node's resources and the limits on their use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    /// GPUs in allocation order.
    pub(crate) gpus: Vec<GpuSlot>,
    /// UUIDs of GPUs that are unusable only because processes of a job that has just ended are still seen there.
    pub(crate) settling: BTreeSet<String>,
    /// Cores for GPU jobs.
    pub(crate) cores: u32,
    /// Memory of the node in bytes.
    pub(crate) memory: u64,
    /// Maximum number of workers of CPU jobs that run at a time.
    pub(crate) cpu_workers: u32,
    /// Maximum number of GPUs that a user's jobs hold at a time; 0 for no limit.
    pub(crate) gpus_per_user: u32,
    /// Maximum memory that a user's jobs hold at a time in addition to the shares of their GPUs, in bytes.
    pub(crate) memory_per_user: Option<u64>,
    /// Share of the memory that belongs to each GPU, in bytes.
    pub(crate) memory_per_gpu: u64,
    /// True if commands do not start (`jobs.allow_commands`).
    pub(crate) only_training: bool,
    /// True if jobs of root do not start (`jobs.allow_root`).
    pub(crate) no_root: bool,
}

impl Resources {
    /// Returns the memory that a job holds in addition to the shares of its GPUs, in bytes.
    fn memory_beside_gpus(&self, submitted: &Submitted) -> u64 {
        memory_beside_gpus(submitted, self.memory_per_gpu)
    }
}

/// Returns the memory that a job requests in addition to the shares of its GPUs, in bytes.
pub(super) fn memory_beside_gpus(submitted: &Submitted, memory_per_gpu: u64) -> u64 {
    let share = memory_per_gpu.saturating_mul(submitted.gpus.into());
    submitted.scheduling.memory_bytes.unwrap_or(0).saturating_sub(share)
}

/// The scheduler's decisions about the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// Jobs to start, each with the UUIDs of its GPUs, in starting order.
    pub(crate) starts: Vec<(u64, Vec<String>)>,
    /// The reasons why all other queued jobs wait.
    pub(crate) waits: BTreeMap<u64, Wait>,
    /// All queued jobs, in the order in which they were considered.
    pub(crate) queue: Vec<u64>,
}

/// The reason why a job waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wait {
    /// Text to display.
    pub(crate) reason: String,
    /// The job that must start first, which may belong to another user.
    pub(crate) first: Option<u64>,
    /// Start of the job's reservation in milliseconds on the node's clock, if it has one and the time is known.
    pub(crate) starts_by: Option<u64>,
}

/// Schedules the queue on the resources that are free at `now`.
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
    by_user: BTreeMap<u32, Holding>,
    running_by_array: BTreeMap<u64, u32>,
    /// Resources requested by earlier jobs that wait without a reservation, for another job or because of a limit of
    /// their user or array. They may start first, so no start time can be promised to a job that competes with them.
    ahead: Demand,
    /// Reservation of the first job of each kind that does not fit: CPU jobs, GPU jobs.
    reservations: [Option<Reservation>; 2],
}

/// Resources that count against the limits of a user.
#[derive(Clone, Copy, Debug, Default)]
struct Holding {
    gpus: u32,
    /// Memory in addition to the shares of these GPUs, in bytes.
    memory: u64,
}

impl Holding {
    fn plus(self, other: Self) -> Self {
        Self { gpus: self.gpus.saturating_add(other.gpus), memory: self.memory.saturating_add(other.memory) }
    }
}

impl<'a> Pass<'a> {
    fn new(jobs: &'a Jobs, resources: &'a Resources, now: u64) -> Self {
        let free = free_gpus(jobs, resources);
        let usable: BTreeSet<&str> = resources
            .gpus
            .iter()
            .filter(|gpu| gpu.unusable.is_none() || resources.settling.contains(&gpu.uuid))
            .filter(|gpu| !jobs.drained_gpus.contains_key(&gpu.uuid))
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
            by_user: BTreeMap::new(),
            running_by_array: BTreeMap::new(),
            ahead: Demand::default(),
            reservations: [None, None],
        };
        // These GPUs will be free in a moment, and a job that waits for them must not be overtaken until then.
        let is_settling = |gpu: &&GpuSlot| gpu.unusable.is_some() && usable.contains(gpu.uuid.as_str());
        let settling = resources.gpus.iter().filter(is_settling).count();
        let gpus = u32::try_from(settling).unwrap_or(u32::MAX);
        pass.ledger.hold(Demand { gpus, ..Demand::default() }, Some(now + SETTLING_MS));
        if let Some(examination) = &jobs.examination {
            let gpus = examination.gpus.iter().filter(|gpu| usable.contains(gpu.as_str())).count();
            let gpus = u32::try_from(gpus).unwrap_or(u32::MAX);
            pass.ledger.hold(Demand { gpus, ..Demand::default() }, Some(examination.until));
        }
        for (_, entry) in jobs.active() {
            let Phase::Active { at, .. } = entry.phase else { continue };
            // GPUs that have been drained or become sick since will not be free when the job ends.
            let gpus = entry.gpus().filter(|gpu| usable.contains(gpu)).count();
            let demand =
                Demand { gpus: u32::try_from(gpus).unwrap_or(u32::MAX), ..Demand::of(&entry.submitted) };
            pass.ledger.hold(demand, super::limits::released_by(&entry.submitted, at));
            pass.count(&entry.submitted);
        }
        pass
    }

    /// Counts a running job against the limits of its user and its array.
    fn count(&mut self, submitted: &Submitted) {
        let holding = self.by_user.entry(submitted.uid).or_default();
        *holding = holding.plus(holding_of(submitted, self.resources));
        if let Some(element) = submitted.array {
            *self.running_by_array.entry(element.first).or_default() += 1;
        }
    }

    /// Decides about a job: returns its GPUs if it starts now, or the reason why it waits.
    fn decide(&mut self, job: u64, submitted: &Submitted) -> Result<Vec<String>, Wait> {
        let wait = |reason: String| Err(Wait { reason, first: None, starts_by: None });
        if let Some(reason) = self.held_back(submitted) {
            return wait(reason);
        }
        let kind = usize::from(submitted.gpus > 0);
        let demand = Demand::of(submitted);
        if let Some(reason) = self.limited(submitted) {
            self.ahead = self.ahead.plus(demand);
            return wait(reason);
        }
        if !demand.fits(self.ledger.capacity()) {
            // The job does not fit even when all others have ended, so it must not keep free resources from others.
            self.ahead = self.ahead.plus(demand);
            return wait(shortage(submitted, demand, self.ledger.capacity(), "usable on this node"));
        }
        let free = self.ledger.free();
        // The list can be shorter than the count if a reload has changed the GPUs.
        let fits = demand.fits(free) && self.free_gpus.len() >= submitted.gpus as usize;
        let released = super::limits::released_by(submitted, self.now);
        let candidate = Candidate { on_gpus: submitted.gpus > 0, demand, released };
        let delayed = |reservation: &&Reservation| {
            self.would_keep_from_user(submitted, reservation.job)
                || reservation.is_delayed_by(&candidate, free)
        };
        let first = self.reservations.iter().flatten().find(|it| !fits || delayed(it)).map(|first| first.job);
        let behind = |first: u64| format!("waits for job {first} to start first");
        if self.reservations[kind].is_none() && (!fits || first.is_some()) {
            let reservation = self.reserve(job, submitted, demand);
            // A job that only waits for a job of the other kind holds up its own kind if the time of its start is
            // known.
            if !fits || reservation.at.is_some() {
                let starts_by = reservation.at.filter(|_| !demand.competes_with(self.ahead));
                self.reservations[kind] = Some(reservation);
                let reason =
                    first.filter(|_| fits).map_or_else(|| shortage(submitted, demand, free, "free"), behind);
                return Err(Wait { reason, first: first.filter(|_| fits), starts_by });
            }
        }
        if let Some(first) = first {
            self.ahead = self.ahead.plus(demand);
            return Err(Wait { reason: behind(first), first: Some(first), starts_by: None });
        }
        self.reservations.iter_mut().flatten().for_each(|reservation| reservation.give(&candidate));
        self.ledger.hold(demand, released);
        self.count(submitted);
        Ok(self.free_gpus.by_ref().take(submitted.gpus as usize).collect())
    }

    /// Returns the reason why a job may not start, whatever resources are free.
    fn held_back(&self, submitted: &Submitted) -> Option<String> {
        if let Some(hold) = &submitted.held {
            return Some(format!("held by user {}", self.jobs.user_label(hold.uid, &hold.user)));
        }
        if let Some(open) = submitted.scheduling.after.iter().find(|dependency| dependency.met != Some(true))
        {
            return Some(format!("waits for job {} to end", open.job));
        }
        if self.resources.only_training && !submitted.trainer {
            return Some("commands are not accepted here any more (jobs.allow_commands)".into());
        }
        if self.resources.no_root && submitted.uid == 0 {
            return Some("jobs of root are not accepted here any more (jobs.allow_root)".into());
        }
        self.jobs.drained.as_ref().map(|reason| format!("the node is drained: {reason}"))
    }

    /// Describes the limit of its user or array that a job would exceed, if any.
    fn limited(&self, submitted: &Submitted) -> Option<String> {
        if let Some(element) = submitted.array.filter(|element| element.parallel > 0) {
            let (most, running) = (element.parallel, self.running_by_array.get(&element.first).copied());
            if let Some(running) = running.filter(|running| *running >= most) {
                return Some(format!("{running} of at most {most} jobs of its array run"));
            }
        }
        let held = self.held_by(submitted.uid);
        self.exceeded(held.plus(holding_of(submitted, self.resources)), submitted).map(|limit| match limit {
            UserLimit::Gpus(most) => format!("its user holds {} of at most {most} GPUs", held.gpus),
            UserLimit::Memory(most) => format!(
                "its user holds {} of at most {} of memory (jobs.max_memory_per_user)",
                bytes_text(held.memory),
                bytes_text(most)
            ),
        })
    }

    fn held_by(&self, uid: u32) -> Holding {
        self.by_user.get(&uid).copied().unwrap_or_default()
    }

    /// Returns the limit that a user would exceed by holding `with_job`, which includes this job. The limit of a
    /// resource that the job does not need is ignored.
    fn exceeded(&self, with_job: Holding, submitted: &Submitted) -> Option<UserLimit> {
        let Resources { gpus_per_user, memory_per_user, .. } = *self.resources;
        if submitted.gpus > 0 && gpus_per_user > 0 && with_job.gpus > gpus_per_user {
            return Some(UserLimit::Gpus(gpus_per_user));
        }
        let takes_memory = self.resources.memory_beside_gpus(submitted) > 0;
        memory_per_user.filter(|most| takes_memory && with_job.memory > *most).map(UserLimit::Memory)
    }

    /// Returns whether the reserved job belongs to the same user, who could not hold both jobs at a time: the reserved
    /// job would then wait for its user's limit and miss its reservation.
    fn would_keep_from_user(&self, submitted: &Submitted, reserved: u64) -> bool {
        let Some(Entry { submitted: reserved, .. }) = self.jobs.jobs.get(&reserved) else { return false };
        let holding = |submitted| holding_of(submitted, self.resources);
        let both = self.held_by(submitted.uid).plus(holding(submitted)).plus(holding(reserved));
        let takes = |limit: &UserLimit| match limit {
            UserLimit::Gpus(_) => submitted.gpus > 0,
            UserLimit::Memory(_) => self.resources.memory_beside_gpus(submitted) > 0,
        };
        reserved.uid == submitted.uid && self.exceeded(both, reserved).as_ref().is_some_and(takes)
    }

    fn reserve(&self, job: u64, submitted: &Submitted, demand: Demand) -> Reservation {
        // The reservation of the other kind counts as held, because that job may start first and competes for memory.
        let others = self.reservations.iter().flatten();
        let others = others.map(|other| (other.demand, other.released));
        self.ledger.reserve(job, submitted, demand, others)
    }
}

/// A limit on the resources of a user's jobs.
enum UserLimit {
    Gpus(u32),
    /// Amount in bytes.
    Memory(u64),
}

fn holding_of(submitted: &Submitted, resources: &Resources) -> Holding {
    Holding { gpus: submitted.gpus, memory: resources.memory_beside_gpus(submitted) }
}

/// Describes the resource that is missing. `is` says what the amounts in `free` are, such as `free`.
fn shortage(submitted: &Submitted, demand: Demand, free: Demand, is: &str) -> String {
    let missing =
        |what: &str, wanted: u32, free: u32| format!("waits for {what}: {wanted} wanted, {free} {is}");
    if demand.gpus > free.gpus {
        missing("GPUs", demand.gpus, free.gpus)
    } else if demand.cpu_workers > free.cpu_workers {
        let what = if submitted.scheduling.cpus.is_some() { "CPUs" } else { "CPU workers" };
        missing(what, demand.cpu_workers, free.cpu_workers)
    } else if demand.cores > free.cores {
        missing("CPUs", demand.cores, free.cores)
    } else {
        let (wanted, free) = (bytes_text(demand.memory), bytes_text(free.memory));
        format!("waits for memory: {wanted} wanted, {free} {is}")
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
    /// Returns whether a GPU job is queued and waits only for resources of the node.
    pub(crate) fn waits_for_gpus(&self) -> bool {
        let Self { submitted, phase } = self;
        matches!(phase, Phase::Queued { .. })
            && submitted.gpus > 0
            && submitted.held.is_none()
            && submitted.is_free_of_dependencies()
    }

    /// Returns the GPUs that the job holds.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = &str> {
        let gpus: &[String] = match &self.phase {
            Phase::Active { gpus, .. } => gpus,
            Phase::Queued { .. } | Phase::Ended { .. } => &[],
        };
        gpus.iter().map(String::as_str)
    }
}
