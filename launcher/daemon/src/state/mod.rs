//! The jobs of a node, as a fold over the journal's records. Pure: no clock, no IO.
//!
//! [`Jobs::apply`] applies events that have happened. [`mod@evaluate`] and [`schedule`] decide what happens next, in
//! the form of records that the manager writes to the journal before it acts on them.
//!
//! ```text
//! Submitted -> Queued --Starting--> Active --Ended--> Ended --Forgotten--> removed
//!              ^ |  ^               |  ^ |
//!              | |  |               |  '-' Cancelled, Warned, TimeLimitReached
//!              | |  '---Requeued----'
//!              '-' Held, Released, Reprioritised
//!                '--Ended (cancelled)---------------->
//! ```
//! A submitted job is queued until the scheduler starts it. `Starting` is written before its agent is started, so a job
//! is active from the moment at which its agent may exist. `Cancelled` and `TimeLimitReached` mark an active job: its
//! agent is told to stop, and the job stays active until the agent has exited. A start that provably never happened
//! puts the job back in the queue, and so does the loss of a job that was submitted for requeueing. The end of a job is
//! final. Ended jobs of a user beyond `jobs.keep` are forgotten, oldest first.
//!
//! Invariants:
//! - a job holds GPUs only while it is active;
//! - applying [`Jobs::records`] to an empty value gives an equal value, except for the examination of GPUs and the jobs
//!   being adopted, which end with the daemon.

mod backfill;
pub(crate) mod clock;
mod dependencies;
pub(crate) mod evaluate;
pub(crate) mod examination;
pub(crate) mod limits;
mod outcome;
mod record;
pub(crate) mod recovery;
pub(crate) mod schedule;
#[doc(hidden)]
pub mod simulation;
mod usage;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use xlaunch_proto::convert::node::MAX_ARRAY_JOBS;

pub use outcome::JobResult;
pub(crate) use record::{Canceller, Element, End, Hold, Record, bounded};
pub use record::{Submitted, Usage};

use clock::NodeClock;
use dependencies::Dependents;
use examination::Examination;
use usage::FairShares;

/// Number of a user's ended jobs that are kept among those that never started, such as cancelled ones, and among those
/// that have just ended.
const KEPT_UNSTARTED: usize = 100;

/// The state of a job in the diagram above.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Phase {
    /// `reason` is the reason why an earlier start did not happen.
    Queued { starts: u32, reason: String },
    /// The job's agent may be running.
    Active {
        start: u32,
        gpus: Vec<String>,
        boot: String,
        at: u64,
        cancelled: Option<Canceller>,
        /// True if the warning signal before the time limit was sent.
        warned: bool,
        /// Time at which the job was told to stop because it had reached its time limit.
        over_limit: Option<u64>,
    },
    Ended {
        end: End,
        exit: Option<u8>,
        reason: String,
        report: String,
        gpus: Vec<String>,
        /// Number of the last start, counted from 1; 0 if the job ended in the queue.
        start: u32,
        started: u64,
        at: u64,
        /// Sequence number among the ended jobs of the node, counted from 1. Times cannot be used instead, as clocks
        /// can be set back.
        order: u64,
        /// `None` if unknown.
        usage: Option<Usage>,
    },
}

/// One job.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) submitted: Submitted,
    pub(crate) phase: Phase,
}

/// A submission's request: the user's id and name, and the request id.
type Request = (u32, String, String);

/// All jobs of the node, and its resources that were taken out of service.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Jobs {
    /// Jobs by id.
    pub(crate) jobs: BTreeMap<u64, Entry>,
    /// Ids of the active jobs, which are few compared with those that wait or have ended.
    active: BTreeSet<u64>,
    /// Ids by user and request id, for repeated submissions.
    requests: BTreeMap<Request, u64>,
    /// The highest job id assigned so far.
    pub(crate) submitted: u64,
    /// Number of jobs that have ended, including forgotten ones.
    pub(crate) ended: u64,
    /// The reason why the node is drained, if it is.
    pub(crate) drained: Option<String>,
    /// The reasons why GPUs are drained, by UUID.
    pub(crate) drained_gpus: BTreeMap<String, String>,
    /// Active jobs of an earlier daemon whose agents have not been found yet. Not in the journal.
    pub(crate) adopted: BTreeSet<u64>,
    /// GPUs that are reserved for a running examination. Not in the journal.
    pub(crate) examination: Option<Examination>,
    /// Past usage of users, for fair shares.
    pub(crate) usage: FairShares,
    /// Dependencies of queued jobs.
    dependents: Dependents,
    pub(crate) clock: NodeClock,
    /// The latest time in a record.
    latest: u64,
    /// Ended jobs that may not be in the accounting file yet, and so must not be forgotten.
    pub(crate) unaccounted: BTreeSet<u64>,
}

impl Jobs {
    /// Applies a record. A record that does not fit the job's phase, which can happen after a damaged part of the
    /// journal, changes nothing.
    pub(crate) fn apply(&mut self, record: Record) {
        self.see(&record);
        match record {
            Record::Submitted(submitted) => self.add(*submitted),
            Record::SubmittedArray { first, indices } => {
                self.add_array(&first, &indices);
            }
            Record::Held { job, uid, user, admin, .. } => {
                self.change(job, |submitted| submitted.held = Some(Hold { uid, user, admin }));
            }
            Record::Released { job, .. } => self.change(job, |submitted| submitted.held = None),
            Record::Reprioritised { job, priority, .. } => {
                self.change(job, |submitted| submitted.priority = priority);
            }
            Record::Starting { job, start, gpus, boot, at } => {
                if let Some(entry) = self.jobs.get_mut(&job)
                    && !matches!(entry.phase, Phase::Ended { .. })
                {
                    let (cancelled, warned, over_limit) = (None, false, None);
                    entry.phase = Phase::Active { start, gpus, boot, at, cancelled, warned, over_limit };
                    self.active.insert(job);
                }
            }
            Record::Warned { job, .. } => {
                if let Some(Entry { phase: Phase::Active { warned, .. }, .. }) = self.jobs.get_mut(&job) {
                    *warned = true;
                }
            }
            Record::TimeLimitReached { job, at } => {
                if let Some(Entry { phase: Phase::Active { over_limit, .. }, .. }) = self.jobs.get_mut(&job) {
                    over_limit.get_or_insert(at);
                }
            }
            Record::Cancelled { job, uid, user, .. } => {
                if let Some(Entry { phase: Phase::Active { cancelled, .. }, .. }) = self.jobs.get_mut(&job) {
                    *cancelled = Some(Canceller { uid, user });
                }
            }
            Record::Ended { job, end, exit, reason, report, at, order, usage } => {
                let Some((gpus, start, started)) = self.leave(job, at) else { return };
                self.ended = self.ended.saturating_add(1);
                let order = if order > 0 { order } else { self.ended };
                if let Some(entry) = self.jobs.get_mut(&job) {
                    entry.phase =
                        Phase::Ended { end, exit, reason, report, gpus, start, started, at, order, usage };
                    self.unaccounted.insert(job);
                }
                self.settle_dependents(job, end);
            }
            Record::Requeued { job, reason, lost, at, usage } => {
                let Some(Entry { phase: Phase::Active { start, .. }, .. }) = self.jobs.get(&job) else {
                    return;
                };
                let starts = *start;
                let left = self.leave(job, at);
                if let Some(entry) = self.jobs.get_mut(&job) {
                    if let (true, Some((.., started))) = (lost, left) {
                        let Submitted { requeues, earlier_ms, earlier_usage, .. } = &mut entry.submitted;
                        *requeues += 1;
                        *earlier_ms = earlier_ms.saturating_add(run_ms(started, at));
                        *earlier_usage = Usage::total(*earlier_usage, usage);
                    }
                    entry.phase = Phase::Queued { starts, reason };
                }
            }
            Record::Drained { gpus, undo, reason, .. } => self.set_drained(gpus, undo, &reason),
            Record::Resumed { .. } => self.drained = None,
            Record::Accounted { jobs } => {
                self.unaccounted.retain(|job| !jobs.contains(job));
            }
            Record::Forgotten { job } => self.forget(job),
            Record::Counted { submitted, ended } => {
                (self.submitted, self.ended) = (self.submitted.max(submitted), self.ended.max(ended));
            }
            Record::Clock { boot, offset, .. } => self.clock = NodeClock::new(boot, offset),
            Record::Used { uid, gpu_seconds, at } => self.usage.set(uid, gpu_seconds, at),
            Record::HalfLife { seconds } => self.usage.set_half_life(seconds),
        }
    }

    fn add(&mut self, submitted: Submitted) {
        let job = submitted.job;
        if self.jobs.contains_key(&job) {
            return;
        }
        self.submitted = self.submitted.max(job);
        // All jobs of an array share one request, which is stored under the first job.
        if submitted.array.is_none_or(|element| element.first == job) {
            let request = request(&submitted);
            // A request id is accepted again only after its job was forgotten, so the record of that must be lost.
            if let Some(forgotten) = self.requests.get(&request).copied() {
                self.forget(forgotten);
            }
            self.requests.insert(request, job);
        }
        self.dependents.add(&submitted);
        let phase = Phase::Queued { starts: 0, reason: String::new() };
        self.jobs.insert(job, Entry { submitted, phase });
    }

    fn add_array(&mut self, first: &Submitted, indices: &[u32]) {
        let parallel = first.array.map_or(0, |element| element.parallel);
        // An inclusive range, because an unbounded one overflows after the last number.
        for (job, &index) in (first.job..=u64::MAX).zip(indices) {
            let array = Some(Element { first: first.job, index, parallel });
            let name = format!("{}[{index}]", first.name);
            self.add(Submitted { job, name, array, ..first.clone() });
        }
    }

    /// Changes the submission of a job if it is queued.
    fn change(&mut self, job: u64, change: impl FnOnce(&mut Submitted)) {
        if let Some(Entry { submitted, phase: Phase::Queued { .. } }) = self.jobs.get_mut(&job) {
            change(submitted);
        }
    }

    /// Takes a job out of its phase, and charges its user for the time until `at`. Returns the GPUs that an active job
    /// held, the number of its start and its time; no GPUs and 0 for a queued job; `None` for an ended one.
    fn leave(&mut self, job: u64, at: u64) -> Option<(Vec<String>, u32, u64)> {
        let entry = self.jobs.get_mut(&job)?;
        match &mut entry.phase {
            Phase::Queued { .. } => Some((Vec::new(), 0, 0)),
            Phase::Active { start, gpus, at: started, .. } => {
                self.active.remove(&job);
                self.adopted.remove(&job);
                self.usage.charge(&entry.submitted, *started, at);
                Some((std::mem::take(gpus), *start, *started))
            }
            Phase::Ended { .. } => None,
        }
    }

    fn forget(&mut self, job: u64) {
        let Some(Entry { submitted, .. }) = self.jobs.remove(&job) else { return };
        self.active.remove(&job);
        self.adopted.remove(&job);
        self.unaccounted.remove(&job);
        self.dependents.remove(&submitted);
        if submitted.array.is_none_or(|element| element.first == job) {
            self.requests.remove(&request(&submitted));
        }
    }

    fn set_drained(&mut self, gpus: Vec<String>, undo: bool, reason: &str) {
        match (gpus.is_empty(), undo) {
            (true, true) => {
                self.drained = None;
                self.drained_gpus.clear();
            }
            (true, false) => self.drained = Some(reason.into()),
            (false, true) => gpus.iter().for_each(|gpu| drop(self.drained_gpus.remove(gpu))),
            (false, false) => self.drained_gpus.extend(gpus.into_iter().map(|gpu| (gpu, reason.into()))),
        }
    }

    /// Returns the shortest list of records that reproduces this value, for compacting the journal.
    pub(crate) fn records(&self) -> Vec<Record> {
        let kept = self.jobs.values().filter(|entry| matches!(entry.phase, Phase::Ended { .. })).count();
        let mut records = vec![Record::Counted {
            submitted: self.submitted,
            ended: self.ended.saturating_sub(kept as u64),
        }];
        records.extend(self.clock_record());
        for (&job, entry) in &self.jobs {
            records.push(Record::Submitted(Box::new(entry.submitted.clone())));
            records.extend(records_to_reach(job, &entry.phase));
        }
        let ended = self.jobs.iter().filter(|(_, entry)| matches!(entry.phase, Phase::Ended { .. }));
        let accounted: Vec<u64> =
            ended.map(|(job, _)| *job).filter(|job| !self.unaccounted.contains(job)).collect();
        if !accounted.is_empty() {
            records.push(Record::Accounted { jobs: accounted });
        }
        let drained = |gpus, reason: &String| Record::Drained {
            gpus,
            undo: false,
            reason: reason.clone(),
            uid: 0,
            at: 0,
        };
        records.extend(self.drained.iter().map(|reason| drained(Vec::new(), reason)));
        records.extend(self.drained_gpus.iter().map(|(gpu, reason)| drained(vec![gpu.clone()], reason)));
        // These must be last, because the records of ended jobs above charge their users again, in part.
        records.extend(self.usage.records());
        records
    }

    /// Returns the job that an earlier request of this user with the same id has added, if there is one.
    pub(crate) fn job_of_request(&self, uid: u32, user: &str, request_id: &str) -> Option<u64> {
        let request = |user: &str| (uid, user.to_owned(), request_id.to_owned());
        // Jobs of version 0.1 have no user name.
        self.requests.get(&request(user)).or_else(|| self.requests.get(&request(""))).copied()
    }

    /// Returns the jobs of the array with this first job that have not been forgotten.
    pub(crate) fn array(&self, first: u64) -> Vec<u64> {
        let ids = first..first.saturating_add(MAX_ARRAY_JOBS as u64);
        let of_array = |entry: &Entry| entry.submitted.array.is_some_and(|element| element.first == first);
        self.jobs.range(ids).filter(|(_, entry)| of_array(entry)).map(|(job, _)| *job).collect()
    }

    /// Returns whether no job of this array is queued or active.
    pub(crate) fn array_has_ended(&self, first: u64) -> bool {
        let mut phases = self.array(first).into_iter().filter_map(|job| Some(&self.jobs.get(&job)?.phase));
        phases.all(|phase| matches!(phase, Phase::Ended { .. }))
    }

    /// Returns the label of a user in messages: the given name, or else the name stored with one of the user's jobs, or
    /// else the user id. Makes no lookup.
    pub(crate) fn user_label(&self, uid: u32, user: &str) -> String {
        if !user.is_empty() {
            return user.into();
        }
        let of_user = |entry: &&Entry| entry.submitted.uid == uid && !entry.submitted.user.is_empty();
        match self.jobs.values().find(of_user) {
            Some(entry) => entry.submitted.user.clone(),
            None if uid == 0 => "root".into(),
            None => uid.to_string(),
        }
    }

    /// Returns the jobs whose agent may be running.
    pub(crate) fn active(&self) -> impl Iterator<Item = (u64, &Entry)> {
        self.active.iter().filter_map(|job| Some((*job, self.jobs.get(job)?)))
    }

    pub(crate) fn queued(&self) -> impl Iterator<Item = u64> {
        self.jobs.iter().filter(|(_, entry)| matches!(entry.phase, Phase::Queued { .. })).map(|(job, _)| *job)
    }

    /// Returns the queued jobs in starting order: by priority, then by the decayed usage of their users, then by
    /// submission. Jobs that are held or wait for other jobs come last.
    pub(crate) fn queue(&self, now: u64) -> Vec<u64> {
        let used = self.used(now);
        let mut queue: Vec<_> = Vec::new();
        for (job, Entry { submitted, phase }) in &self.jobs {
            if matches!(phase, Phase::Queued { .. }) {
                let waits = submitted.held.is_some() || !submitted.is_free_of_dependencies();
                let used = used.get(&submitted.uid).copied().unwrap_or(0.0);
                queue.push((waits, Reverse(submitted.priority), used, *job));
            }
        }
        queue.sort_unstable_by(|one, other| {
            let by_rank = (one.0, one.1).cmp(&(other.0, other.1));
            by_rank.then(one.2.total_cmp(&other.2)).then(one.3.cmp(&other.3))
        });
        queue.into_iter().map(|(.., job)| job).collect()
    }

    /// Returns the jobs to forget: for each user, all ended jobs except the last `keep` that were started and the last
    /// [`KEPT_UNSTARTED`] that were not. They are counted separately, so that cancelled submissions do not displace
    /// results. The last [`KEPT_UNSTARTED`] of either kind are kept while `is_recent` returns true for them.
    pub(crate) fn ended_beyond(&self, keep: usize, is_recent: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut ended: BTreeMap<(u32, bool), Vec<(u64, u64)>> = BTreeMap::new();
        for (job, entry) in &self.jobs {
            if let Phase::Ended { started, order, .. } = entry.phase
                && !self.unaccounted.contains(job)
            {
                ended.entry((entry.submitted.uid, started > 0)).or_default().push((order, *job));
            }
        }
        let mut forgotten = Vec::new();
        for ((_, has_started), mut jobs) in ended {
            let keep = if has_started { keep } else { keep.min(KEPT_UNSTARTED) };
            jobs.sort_unstable();
            let (beyond, first_recent) =
                (jobs.len().saturating_sub(keep), jobs.len().saturating_sub(KEPT_UNSTARTED));
            let jobs = jobs.into_iter().map(|(_, job)| job).take(beyond).enumerate();
            forgotten
                .extend(jobs.filter(|(at, job)| *at < first_recent || !is_recent(*job)).map(|(_, job)| job));
        }
        forgotten
    }
}

impl Entry {
    /// Returns the run time of an ended job in milliseconds, and its usage, in all starts together.
    pub(crate) fn totals(&self) -> (u64, Option<Usage>) {
        let Submitted { earlier_ms, earlier_usage, .. } = self.submitted;
        match self.phase {
            Phase::Ended { started, at, usage, .. } => {
                (earlier_ms.saturating_add(run_ms(started, at)), Usage::total(earlier_usage, usage))
            }
            Phase::Queued { .. } | Phase::Active { .. } => (earlier_ms, earlier_usage),
        }
    }
}

/// Returns the time between start and end; 0 if the job never started.
fn run_ms(started: u64, ended: u64) -> u64 {
    if started > 0 { ended.saturating_sub(started) } else { 0 }
}

fn request(submitted: &Submitted) -> Request {
    (submitted.uid, submitted.user.clone(), submitted.request_id.clone())
}

/// Returns the records that take a submitted job to this phase.
fn records_to_reach(job: u64, phase: &Phase) -> Vec<Record> {
    let starting = |start, gpus: &[String], boot: &str, at| Record::Starting {
        job,
        start,
        gpus: gpus.to_vec(),
        boot: boot.into(),
        at,
    };
    match phase {
        Phase::Queued { starts: 0, reason } if reason.is_empty() => Vec::new(),
        Phase::Queued { starts, reason } => {
            let requeued = Record::Requeued { job, reason: reason.clone(), lost: false, at: 0, usage: None };
            vec![starting(*starts, &[], "", 0), requeued]
        }
        Phase::Active { start, gpus, boot, at, cancelled, warned, over_limit } => {
            let warned = warned.then_some(Record::Warned { job, at: 0 });
            let over_limit = over_limit.map(|at| Record::TimeLimitReached { job, at });
            let by = cancelled.clone();
            let cancelled = by.map(|Canceller { uid, user }| Record::Cancelled { job, uid, user, at: 0 });
            let marks = warned.into_iter().chain(over_limit).chain(cancelled);
            std::iter::once(starting(*start, gpus, boot, *at)).chain(marks).collect()
        }
        Phase::Ended { end, exit, reason, report, gpus, start, started, at, order, usage } => {
            let has_started = *start > 0 || *started > 0 || !gpus.is_empty();
            let started = has_started.then(|| starting(*start, gpus, "", *started));
            let (reason, report) = (reason.clone(), report.clone());
            let (end, exit, at, order, usage) = (*end, *exit, *at, *order, *usage);
            let ended = Record::Ended { job, end, exit, reason, report, at, order, usage };
            started.into_iter().chain([ended]).collect()
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
