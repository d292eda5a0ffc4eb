//! The jobs of a node, as a fold over records: what the journal holds is all there is to know of them.
//!
//! Nothing here looks at the world. [`Jobs::apply`] takes what has happened; [`mod@orders`] and
//! [`schedule`] say what is to happen next, as records that the manager writes down before it acts on them.
//!
//! ```text
//! Submitted -> Queued --Starting--> Active --Ended--> Ended --Forgotten--> gone
//!                 |                  |  ^
//!                 |                  '--' Cancelled: asked to end
//!                 '--Ended (cancelled)-->
//! ```

pub mod orders;
pub mod schedule;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What has happened. Fields are only ever added, with defaults; a kind of record that is not known is a newer version's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
#[expect(
    missing_docs,
    reason = "`at` is milliseconds since 1970; the rest is named after messages and states"
)]
pub enum Record {
    /// A job is in the queue.
    Submitted(Box<Submitted>),
    /// Its agent is about to be started, for the `start`th time from 1: it may run from now on.
    Starting { job: u64, start: u32, gpus: Vec<String>, boot: String, at: u64 },
    /// It shall end.
    Cancelled { job: u64, uid: u32, at: u64 },
    /// It has ended.
    Ended { job: u64, end: End, exit: Option<u8>, reason: String, report: String, at: u64 },
    /// Its agent was never there: it is in the queue again.
    Requeued { job: u64, reason: String },
    /// An administrator takes the node (where there is no list) or GPUs out of service, or puts them back.
    Drained { gpus: Vec<String>, undo: bool, reason: String, uid: u32, at: u64 },
    /// Nothing is kept of it.
    Forgotten { job: u64 },
    /// So many jobs have been submitted and have ended, remembered or not. Begins a rewritten journal.
    Counted { submitted: u64, ended: u64 },
}

/// A job as it was submitted. Its description, with its environment, is in its directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Submitted {
    pub job: u64,
    pub request_id: String,
    pub uid: u32,
    pub name: String,
    /// Of the built-in trainer.
    pub trainer: bool,
    pub priority: i32,
    /// Held while it runs; 0 for a job on the CPU.
    pub gpus: u32,
    pub workers: u32,
    /// Seconds that its workers get to end.
    pub patience: f64,
    pub command_line: String,
    pub work_dir: String,
    pub at: u64,
}

/// How a job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "named after the states of the wire")]
pub enum End {
    Done,
    Failed,
    Cancelled,
    Lost,
}

/// Where a job is.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "as in the records")]
pub enum Phase {
    /// It waits; `reason` says what happened to an earlier start.
    Queued { starts: u32, reason: String },
    /// Its agent may run.
    Active { start: u32, gpus: Vec<String>, boot: String, at: u64, cancelled: Option<u32> },
    /// It is over.
    Ended {
        end: End,
        exit: Option<u8>,
        reason: String,
        report: String,
        gpus: Vec<String>,
        started: u64,
        at: u64,
    },
}

/// One job.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// What was asked for.
    pub submitted: Submitted,
    /// Where it is.
    pub phase: Phase,
}

/// All jobs, and what administrators have decided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Jobs {
    /// By id.
    pub jobs: BTreeMap<u64, Entry>,
    /// By user and request.
    requests: BTreeMap<(u32, String), u64>,
    /// Ids that have been given away.
    pub submitted: u64,
    /// Jobs that have ended, remembered or not.
    pub ended: u64,
    /// Why the node takes no jobs.
    pub drained: Option<String>,
    /// Why GPUs take none, by UUID.
    pub drained_gpus: BTreeMap<String, String>,
}

impl Jobs {
    /// Takes what has happened. A record that does not fit, as behind a damaged part of the journal, changes nothing.
    pub fn apply(&mut self, record: Record) {
        match record {
            Record::Submitted(submitted) => {
                self.submitted = self.submitted.max(submitted.job);
                self.requests.insert((submitted.uid, submitted.request_id.clone()), submitted.job);
                let phase = Phase::Queued { starts: 0, reason: String::new() };
                self.jobs.insert(submitted.job, Entry { submitted: *submitted, phase });
            }
            Record::Starting { job, start, gpus, boot, at } => {
                if let Some(entry) = self.jobs.get_mut(&job) {
                    entry.phase = Phase::Active { start, gpus, boot, at, cancelled: None };
                }
            }
            Record::Cancelled { job, uid, .. } => {
                if let Some(Entry { phase: Phase::Active { cancelled, .. }, .. }) = self.jobs.get_mut(&job) {
                    *cancelled = Some(uid);
                }
            }
            Record::Ended { job, end, exit, reason, report, at } => {
                let Some(entry) = self.jobs.get_mut(&job) else { return };
                let (gpus, started) = match &mut entry.phase {
                    Phase::Queued { .. } => (Vec::new(), 0),
                    Phase::Active { gpus, at, .. } => (std::mem::take(gpus), *at),
                    Phase::Ended { .. } => return,
                };
                self.ended += 1;
                entry.phase = Phase::Ended { end, exit, reason, report, gpus, started, at };
            }
            Record::Requeued { job, reason } => {
                if let Some(entry) = self.jobs.get_mut(&job)
                    && let Phase::Active { start, .. } = entry.phase
                {
                    entry.phase = Phase::Queued { starts: start, reason };
                }
            }
            Record::Drained { gpus, undo, reason, .. } => self.drain(gpus, undo, &reason),
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

    fn drain(&mut self, gpus: Vec<String>, undo: bool, reason: &str) {
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

    /// Records from which the same comes out: what a journal is shortened to.
    pub fn records(&self) -> Vec<Record> {
        let over = self.jobs.values().filter(|entry| matches!(entry.phase, Phase::Ended { .. })).count();
        let mut records = vec![Record::Counted {
            submitted: self.submitted,
            ended: self.ended.saturating_sub(over as u64),
        }];
        for (&job, entry) in &self.jobs {
            records.push(Record::Submitted(Box::new(entry.submitted.clone())));
            records.extend(history(job, &entry.phase));
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

    /// The job that an earlier request of this user with this id has added.
    pub fn of_request(&self, uid: u32, request_id: &str) -> Option<u64> {
        self.requests.get(&(uid, request_id.to_owned())).copied()
    }

    /// Jobs that run or may run.
    pub fn active(&self) -> impl Iterator<Item = (u64, &Entry)> {
        let active = |entry: &&Entry| matches!(entry.phase, Phase::Active { .. });
        self.jobs.iter().map(|(job, entry)| (*job, entry)).filter(move |(_, entry)| active(entry))
    }

    /// Jobs that wait, in the order in which they are to start: by priority, then as they came.
    pub fn queue(&self) -> Vec<u64> {
        let queued = self.jobs.iter().filter(|(_, entry)| matches!(entry.phase, Phase::Queued { .. }));
        let mut queue: Vec<_> = queued.map(|(job, entry)| (-entry.submitted.priority, *job)).collect();
        queue.sort_unstable();
        queue.into_iter().map(|(_, job)| job).collect()
    }

    /// What has ended beyond the newest `keep`, oldest first.
    pub fn beyond(&self, keep: usize) -> Vec<u64> {
        let ended = |entry: &Entry| match entry.phase {
            Phase::Ended { at, .. } => Some(at),
            _ => None,
        };
        let mut ended: Vec<_> =
            self.jobs.iter().filter_map(|(job, entry)| Some((ended(entry)?, *job))).collect();
        ended.sort_unstable();
        ended.truncate(ended.len().saturating_sub(keep));
        ended.into_iter().map(|(_, job)| job).collect()
    }
}

/// What has brought a job to this phase.
fn history(job: u64, phase: &Phase) -> Vec<Record> {
    let starting = |start, gpus: &[String], boot: &str, at| Record::Starting {
        job,
        start,
        gpus: gpus.to_vec(),
        boot: boot.into(),
        at,
    };
    match phase {
        Phase::Queued { starts: 0, .. } => Vec::new(),
        Phase::Queued { starts, reason } => {
            vec![starting(*starts, &[], "", 0), Record::Requeued { job, reason: reason.clone() }]
        }
        Phase::Active { start, gpus, boot, at, cancelled } => {
            let cancelled = cancelled.map(|uid| Record::Cancelled { job, uid, at: 0 });
            std::iter::once(starting(*start, gpus, boot, *at)).chain(cancelled).collect()
        }
        Phase::Ended { end, exit, reason, report, gpus, started, at } => {
            let started = (*started > 0).then(|| starting(1, gpus, "", *started));
            let (reason, report) = (reason.clone(), report.clone());
            let ended = Record::Ended { job, end: *end, exit: *exit, reason, report, at: *at };
            started.into_iter().chain([ended]).collect()
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
