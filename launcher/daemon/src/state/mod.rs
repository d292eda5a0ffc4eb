//! The jobs of a node, as a fold over the journal's records. Pure: no clock, no IO.
//!
//! [`Jobs::apply`] takes what has happened. [`mod@commands`] and [`schedule`] decide what happens next, as records that
//! the manager writes to the journal before it acts on them.
//!
//! ```text
//! Submitted -> Queued --Starting--> Active --Ended--> Ended --Forgotten--> removed
//!                |  ^                |  ^ |
//!                |  |                |  '-' Cancelled
//!                |  '----Requeued----'
//!                '--Ended (cancelled)---------------->
//! ```
//! A submitted job is queued until the scheduler starts it; `Starting` is written before its agent is started, so a job
//! is active from the moment at which its agent may exist. `Cancelled` marks an active job: its agent is told to stop
//! and it stays active until the agent has exited. A start that provably never happened puts the job back in the queue.
//! The end of a job is final. Of each user the ended jobs beyond `jobs.keep` are forgotten, oldest
//! first.
//!
//! Invariants: a job holds GPUs only while it is active; applying [`Jobs::records`] to an empty value gives an equal
//! value.

pub(crate) mod commands;
pub(crate) mod schedule;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::accounting::Usage;

/// Maximum length of a reason, a report or a command line.
pub(crate) const MAX_TEXT_BYTES: usize = 4096;
/// Ended jobs of a user that never started, such as cancelled ones, that are kept.
const KEPT_UNSTARTED: usize = 100;

/// A change to a job or the node. Fields are only ever added, with defaults; an unknown kind of record was written by a
/// newer version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub(crate) enum Record {
    /// A job was added to the queue.
    Submitted(Box<Submitted>),
    /// The agent is about to be started and may run from now on. `start` counts from 1.
    Starting { job: u64, start: u32, gpus: Vec<String>, boot: String, at: u64 },
    /// A user cancelled an active job.
    Cancelled { job: u64, uid: u32, at: u64 },
    /// `exit` is unknown if the agent left no result. `order` counts ends from 1; 0 means the next one.
    Ended {
        job: u64,
        end: End,
        exit: Option<u8>,
        reason: String,
        report: String,
        at: u64,
        #[serde(default, skip_serializing_if = "is_zero")]
        order: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// The agent never ran: the job is back in the queue.
    Requeued { job: u64, reason: String },
    /// An administrator took GPUs (all of the node if the list is empty) out of service, or put them back.
    Drained { gpus: Vec<String>, undo: bool, reason: String, uid: u32, at: u64 },
    /// The job was removed with its files.
    Forgotten { job: u64 },
    /// Totals since the node's first job, including forgotten ones. First record of a rewritten journal.
    Counted { submitted: u64, ended: u64 },
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A job as submitted. Its environment is not in the journal but in its directory ([`crate::files`]).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Submitted {
    pub job: u64,
    pub request_id: String,
    pub uid: u32,
    /// The user's name; empty in records of version 0.1.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    pub name: String,
    /// Runs the built-in trainer, not a command.
    pub trainer: bool,
    pub priority: i32,
    /// Number of GPUs held while it runs; 0 for a CPU job.
    pub gpus: u32,
    pub workers: u32,
    /// Seconds between SIGTERM and SIGKILL of its workers.
    #[serde(rename = "patience")]
    pub shutdown_timeout: f64,
    pub command_line: String,
    pub work_dir: String,
    pub at: u64,
}

/// How a job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    Done,
    Failed,
    Cancelled,
    Lost,
}

/// The state of a job in the diagram above.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Phase {
    /// `reason` says why an earlier start did not happen.
    Queued { starts: u32, reason: String },
    /// Its agent may run. `cancelled` is the user who cancelled it.
    Active { start: u32, gpus: Vec<String>, boot: String, at: u64, cancelled: Option<u32> },
    Ended {
        end: End,
        exit: Option<u8>,
        reason: String,
        report: String,
        gpus: Vec<String>,
        started: u64,
        at: u64,
        /// Which end this was on the node, from 1: clocks can be set back.
        order: u64,
        /// `None` if it is unknown.
        usage: Option<Usage>,
    },
}

/// Cuts a text from outside to what the journal and replies can hold many of.
pub(crate) fn bounded(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let most = MAX_TEXT_BYTES - "…".len();
        text.truncate((0..=most).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0));
        text.push('…');
    }
    text
}

/// One job.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) submitted: Submitted,
    pub(crate) phase: Phase,
}

/// All jobs, and what administrators have taken out of service.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Jobs {
    /// By id.
    pub(crate) jobs: BTreeMap<u64, Entry>,
    /// Ids by user and request id, for repeated submissions.
    requests: BTreeMap<(u32, String), u64>,
    /// The highest job id assigned so far.
    pub(crate) submitted: u64,
    /// Number of jobs that have ended, including forgotten ones.
    pub(crate) ended: u64,
    /// Why the node is drained.
    pub(crate) drained: Option<String>,
    /// Why GPUs are drained, by UUID.
    pub(crate) drained_gpus: BTreeMap<String, String>,
}

impl Jobs {
    /// Applies a record. One that does not fit the job's phase, as can follow a damaged part of the journal, changes
    /// nothing.
    pub(crate) fn apply(&mut self, record: Record) {
        match record {
            Record::Submitted(submitted) => self.add(*submitted),
            Record::Starting { job, start, gpus, boot, at } => {
                if let Some(entry) = self.jobs.get_mut(&job)
                    && !matches!(entry.phase, Phase::Ended { .. })
                {
                    entry.phase = Phase::Active { start, gpus, boot, at, cancelled: None };
                }
            }
            Record::Cancelled { job, uid, .. } => {
                if let Some(Entry { phase: Phase::Active { cancelled, .. }, .. }) = self.jobs.get_mut(&job) {
                    *cancelled = Some(uid);
                }
            }
            Record::Ended { job, end, exit, reason, report, at, order, usage } => {
                let Some(entry) = self.jobs.get_mut(&job) else { return };
                let (gpus, started) = match &mut entry.phase {
                    Phase::Queued { .. } => (Vec::new(), 0),
                    Phase::Active { gpus, at, .. } => (std::mem::take(gpus), *at),
                    Phase::Ended { .. } => return,
                };
                self.ended = self.ended.saturating_add(1);
                let order = if order > 0 { order } else { self.ended };
                entry.phase = Phase::Ended { end, exit, reason, report, gpus, started, at, order, usage };
            }
            Record::Requeued { job, reason } => {
                if let Some(entry) = self.jobs.get_mut(&job)
                    && let Phase::Active { start, .. } = entry.phase
                {
                    entry.phase = Phase::Queued { starts: start, reason };
                }
            }
            Record::Drained { gpus, undo, reason, .. } => self.set_drained(gpus, undo, &reason),
            Record::Forgotten { job } => {
                if let Some(entry) = self.jobs.remove(&job) {
                    self.requests.remove(&(entry.submitted.uid, entry.submitted.request_id));
                }
            }
            Record::Counted { submitted, ended } => {
                (self.submitted, self.ended) = (self.submitted.max(submitted), self.ended.max(ended));
            }
        }
    }

    fn add(&mut self, submitted: Submitted) {
        let job = submitted.job;
        if self.jobs.contains_key(&job) {
            return;
        }
        self.submitted = self.submitted.max(job);
        // A request id is accepted again only after its job was forgotten. That record was lost.
        if let Some(forgotten) = self.requests.insert((submitted.uid, submitted.request_id.clone()), job) {
            self.jobs.remove(&forgotten);
        }
        let phase = Phase::Queued { starts: 0, reason: String::new() };
        self.jobs.insert(job, Entry { submitted, phase });
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

    /// The shortest list of records that reproduces this value, for compacting the journal.
    pub(crate) fn records(&self) -> Vec<Record> {
        let kept = self.jobs.values().filter(|entry| matches!(entry.phase, Phase::Ended { .. })).count();
        let mut records = vec![Record::Counted {
            submitted: self.submitted,
            ended: self.ended.saturating_sub(kept as u64),
        }];
        for (&job, entry) in &self.jobs {
            records.push(Record::Submitted(Box::new(entry.submitted.clone())));
            records.extend(records_to_reach(job, &entry.phase));
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
        records
    }

    /// The job that this user's request with this id added, if it was seen before.
    pub(crate) fn job_of_request(&self, uid: u32, request_id: &str) -> Option<u64> {
        self.requests.get(&(uid, request_id.to_owned())).copied()
    }

    /// A user in messages: the name that came with one of the user's jobs, otherwise the number. Makes no lookup.
    pub(crate) fn user_label(&self, uid: u32) -> String {
        let of_user = |entry: &&Entry| entry.submitted.uid == uid && !entry.submitted.user.is_empty();
        match self.jobs.values().find(of_user) {
            Some(entry) => entry.submitted.user.clone(),
            None if uid == 0 => "root".into(),
            None => uid.to_string(),
        }
    }

    /// Jobs whose agent may run.
    pub(crate) fn active(&self) -> impl Iterator<Item = (u64, &Entry)> {
        let active = |entry: &&Entry| matches!(entry.phase, Phase::Active { .. });
        self.jobs.iter().map(|(job, entry)| (*job, entry)).filter(move |(_, entry)| active(entry))
    }

    /// Queued jobs in starting order: by priority, then by submission.
    pub(crate) fn queue(&self) -> Vec<u64> {
        let queued = self.jobs.iter().filter(|(_, entry)| matches!(entry.phase, Phase::Queued { .. }));
        let mut queue: Vec<_> =
            queued.map(|(job, entry)| (Reverse(entry.submitted.priority), *job)).collect();
        queue.sort_unstable();
        queue.into_iter().map(|(_, job)| job).collect()
    }

    /// Jobs to forget: of each user all ended ones except the `keep` that ended last, and except the
    /// [`KEPT_UNSTARTED`] last of those that never started, so that cancelled submissions push out no results.
    pub(crate) fn ended_beyond(&self, keep: usize) -> Vec<u64> {
        let mut ended: BTreeMap<(u32, bool), Vec<(u64, u64)>> = BTreeMap::new();
        for (job, entry) in &self.jobs {
            if let Phase::Ended { started, order, .. } = entry.phase {
                ended.entry((entry.submitted.uid, started > 0)).or_default().push((order, *job));
            }
        }
        let mut forgotten = Vec::new();
        for ((_, has_started), mut jobs) in ended {
            let keep = if has_started { keep } else { keep.min(KEPT_UNSTARTED) };
            jobs.sort_unstable();
            jobs.truncate(jobs.len().saturating_sub(keep));
            forgotten.extend(jobs.into_iter().map(|(_, job)| job));
        }
        forgotten
    }
}

/// Records that take a submitted job to this phase.
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
            vec![starting(*starts, &[], "", 0), Record::Requeued { job, reason: reason.clone() }]
        }
        Phase::Active { start, gpus, boot, at, cancelled } => {
            let cancelled = cancelled.map(|uid| Record::Cancelled { job, uid, at: 0 });
            std::iter::once(starting(*start, gpus, boot, *at)).chain(cancelled).collect()
        }
        Phase::Ended { end, exit, reason, report, gpus, started, at, order, usage } => {
            let started = (*started > 0 || !gpus.is_empty()).then(|| starting(1, gpus, "", *started));
            let (reason, report) = (reason.clone(), report.clone());
            let (end, exit, at, order, usage) = (*end, *exit, *at, *order, *usage);
            let ended = Record::Ended { job, end, exit, reason, report, at, order, usage };
            started.into_iter().chain([ended]).collect()
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
