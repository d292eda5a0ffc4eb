//! Reservations and backfill (EASY). Pure.
//!
//! The first job that does not fit gets a reservation at the earliest time at which, according to the time limits of
//! running jobs, enough resources are free. Later jobs start before it only if they do not delay it.
//!
//! A later job delays a reservation unless it has ended by then, or its resources are free in addition to the reserved
//! ones. If the time of the reservation is unknown, because a job that it depends on has no limit, no job of the same
//! kind overtakes it, and jobs of the other kind leave the reserved memory free.
//!
//! Invariant: if running jobs respect their limits and no job is put before it in the queue, a job with a reservation
//! starts no later than its reservation says.

use super::Submitted;

/// The resources that a job holds while it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    pub(super) gpus: u32,
    /// Cores of GPU jobs.
    pub(super) cores: u32,
    /// Workers of CPU jobs.
    pub(super) cpu_workers: u32,
    /// Memory in bytes.
    pub(super) memory: u64,
}

impl Demand {
    pub(super) fn of(submitted: &Submitted) -> Self {
        let on_gpus = submitted.gpus > 0;
        let cpus = submitted.scheduling.cpus.unwrap_or(if on_gpus { 0 } else { submitted.workers });
        Self {
            gpus: submitted.gpus,
            cores: if on_gpus { cpus } else { 0 },
            cpu_workers: if on_gpus { 0 } else { cpus },
            memory: submitted.scheduling.memory_bytes.unwrap_or(0),
        }
    }

    pub(super) fn fits(self, free: Self) -> bool {
        self.gpus <= free.gpus
            && self.cores <= free.cores
            && self.cpu_workers <= free.cpu_workers
            && self.memory <= free.memory
    }

    /// Returns whether both need some of the same resource.
    pub(super) fn competes_with(self, other: Self) -> bool {
        self.gpus.min(other.gpus) > 0
            || self.cores.min(other.cores) > 0
            || self.cpu_workers.min(other.cpu_workers) > 0
            || self.memory.min(other.memory) > 0
    }

    /// Returns whether this and `other` fit together, considering only resources that this needs.
    fn fits_beside(self, other: Self, free: Self) -> bool {
        let fits = |own: u64, other: u64, free: u64| own == 0 || own.saturating_add(other) <= free;
        fits(self.gpus.into(), other.gpus.into(), free.gpus.into())
            && fits(self.cores.into(), other.cores.into(), free.cores.into())
            && fits(self.cpu_workers.into(), other.cpu_workers.into(), free.cpu_workers.into())
            && fits(self.memory, other.memory, free.memory)
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            gpus: self.gpus.saturating_add(other.gpus),
            cores: self.cores.saturating_add(other.cores),
            cpu_workers: self.cpu_workers.saturating_add(other.cpu_workers),
            memory: self.memory.saturating_add(other.memory),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            gpus: self.gpus.saturating_sub(other.gpus),
            cores: self.cores.saturating_sub(other.cores),
            cpu_workers: self.cpu_workers.saturating_sub(other.cpu_workers),
            memory: self.memory.saturating_sub(other.memory),
        }
    }
}

/// Resources that are held, and the times at which they are released.
#[derive(Debug)]
pub(super) struct Ledger {
    capacity: Demand,
    now: u64,
    held: Demand,
    /// Times and amounts of releases, in no particular order. Resources without an entry are never released.
    releases: Vec<(u64, Demand)>,
}

impl Ledger {
    pub(super) fn new(capacity: Demand, now: u64) -> Self {
        Self { capacity, now, held: Demand::default(), releases: Vec::new() }
    }

    pub(super) fn hold(&mut self, demand: Demand, released: Option<u64>) {
        self.held = self.held.plus(demand);
        self.releases.extend(released.map(|at| (at.max(self.now), demand)));
    }

    /// Returns all resources, held or not.
    pub(super) fn capacity(&self) -> Demand {
        self.capacity
    }

    /// Returns the resources that are free now. Jobs may hold more than the capacity, as limits can be lowered while
    /// they run.
    pub(super) fn free(&self) -> Demand {
        self.capacity.minus(self.held)
    }

    /// Reserves the resources that a job needs. `others` are other reservations, which count as held from now until
    /// they are released.
    pub(super) fn reserve(
        &self,
        job: u64,
        submitted: &Submitted,
        demand: Demand,
        others: impl Iterator<Item = (Demand, Option<u64>)>,
    ) -> Reservation {
        let mut later = Self { releases: self.releases.clone(), ..*self };
        others.for_each(|(demand, released)| later.hold(demand, released));
        later.releases.sort_unstable_by_key(|(at, _)| *at);
        let mut reservation = Reservation {
            job,
            on_gpus: submitted.gpus > 0,
            demand,
            at: demand.fits(later.free()).then_some(self.now),
            beside: Demand::default(),
            released: None,
        };
        for (at, released) in std::mem::take(&mut later.releases) {
            if reservation.at.is_some_and(|reserved| reserved < at) {
                break;
            }
            later.held = later.held.minus(released);
            if demand.fits(later.free()) {
                reservation.at = Some(at);
            }
        }
        if let Some(at) = reservation.at {
            reservation.beside = later.free().minus(demand);
            reservation.released = super::limits::released_by(submitted, at);
        }
        reservation
    }
}

/// The reservation of the first job of a kind that does not fit.
#[derive(Clone, Debug)]
pub(super) struct Reservation {
    pub(super) job: u64,
    on_gpus: bool,
    pub(super) demand: Demand,
    /// Start of the reservation; `None` if unknown.
    pub(super) at: Option<u64>,
    /// Resources that are free at that time in addition to the reserved ones.
    beside: Demand,
    /// Latest end of the reservation; `None` if unknown.
    pub(super) released: Option<u64>,
}

/// A job that could start now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) on_gpus: bool,
    pub(super) demand: Demand,
    /// Latest time at which the job would end; `None` if unknown.
    pub(super) released: Option<u64>,
}

impl Reservation {
    /// Returns whether this candidate would delay the reserved job. `free` are the resources that are free now.
    pub(super) fn is_delayed_by(&self, candidate: &Candidate, free: Demand) -> bool {
        match self.at {
            None => candidate.on_gpus == self.on_gpus || !candidate.demand.fits_beside(self.demand, free),
            Some(at) => !candidate.ends_by(at) && !candidate.demand.fits(self.beside),
        }
    }

    /// Accounts for a candidate that starts. If it runs beyond the start of the reservation, its resources are no
    /// longer free in addition to the reserved ones.
    pub(super) fn give(&mut self, candidate: &Candidate) {
        if self.at.is_some_and(|at| !candidate.ends_by(at)) {
            self.beside = self.beside.minus(candidate.demand);
        }
    }
}

impl Candidate {
    fn ends_by(&self, at: u64) -> bool {
        self.released.is_some_and(|released| released <= at)
    }
}
