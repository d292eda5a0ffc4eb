//! Takes over from an earlier daemon: adopts its jobs, and completes its unfinished operations.
//!
//! Normally the journal determines which jobs exist. If it could not be read completely, or is older than the files and
//! units found, those take precedence: nothing is removed, and jobs that run or have files are listed again
//! ([`crate::state::recovery`]).

use std::collections::BTreeSet;

use tracing::{info, warn};
use xlaunch_host::clock;
use xlaunch_proto::convert::node::Work;

use super::Manager;
use super::records::AccountingState;
use crate::boot_id;
use crate::files::{AgentRecord, FoundDir};
use crate::journal::Integrity;
use crate::state::clock::NodeClock;
use crate::state::recovery::{FoundJob, FoundStart};
use crate::state::{Entry, Jobs, Phase, Record, Submitted};
use crate::users;

impl Manager {
    pub(super) fn recover(&mut self) {
        let last_clock = self.jobs.clock.clone();
        let clock = self.jobs.start_clock(&boot_id(), clock::uptime_ms(), clock::unix_ms());
        clock.into_iter().for_each(|record| self.record_event(record));
        let is_complete = self.find_unlisted_jobs();
        self.find_lost_starts();
        let has_ended = |entry: &Entry| matches!(entry.phase, Phase::Ended { .. });
        if self.jobs.jobs.values().any(|entry| !has_ended(entry)) {
            // A journal that was restored from a copy may list jobs that have ended since.
            let mut accounted = self.accounted_ids();
            accounted.retain(|job| self.jobs.jobs.get(job).is_some_and(|entry| !has_ended(entry)));
            self.accounted = accounted;
        }
        let ended: Vec<_> = self.jobs.jobs.iter().filter(|it| has_ended(it.1)).map(|it| *it.0).collect();
        for job in ended {
            self.load_last_status(job);
            if is_complete {
                self.remove_submission(job);
            }
        }
        if is_complete {
            self.setup.dirs.arrays().into_iter().for_each(|first| self.remove_ended_array(first));
        }
        self.adopt_active_jobs(&last_clock);
    }

    /// Lists jobs that are missing in the journal, and removes the files of forgotten jobs. Returns whether the journal
    /// is complete.
    fn find_unlisted_jobs(&mut self) -> bool {
        let last = self.jobs.submitted;
        let now = self.now();
        let units = std::mem::take(&mut self.setup.units);
        let units: Vec<_> = units.into_iter().filter(|(job, _)| !self.jobs.jobs.contains_key(job)).collect();
        let dirs: Vec<_> =
            self.setup.dirs.all().into_iter().filter(|job| !self.jobs.jobs.contains_key(job)).collect();
        let is_leftover =
            |job: &u64| Jobs::is_leftover(*job, last, self.setup.dirs.newest_agent(*job).is_some());
        if self.setup.integrity == Integrity::Intact && units.is_empty() && dirs.iter().all(is_leftover) {
            for job in dirs {
                // The submission was never acknowledged, or the job was forgotten.
                if let Err(error) = self.setup.dirs.remove(job) {
                    warn!(job, "failed to remove the directory of job {job}: {error}");
                }
            }
            return true;
        }
        warn!(
            "the journal is incomplete: job files are not removed, and jobs missing in it are listed again"
        );
        // Accounts of jobs that are listed again may have been written before.
        self.accounting_state = AccountingState::Unknown;
        let ids =
            dirs.iter().copied().chain(self.setup.dirs.arrays()).chain(units.iter().map(|(job, _)| *job));
        self.kept_up_to = ids.chain(self.highest_used_id()).chain([last]).max().unwrap_or(last);
        if self.kept_up_to > last {
            self.record_event(Record::Counted { submitted: self.kept_up_to, ended: 0 });
        }
        let found = dirs.into_iter().filter_map(|job| Some(self.found_job(job, self.setup.dirs.found(job)?)));
        let mut found: Vec<_> = found.collect();
        for (job, uid) in units {
            match found.iter_mut().find(|found| found.submitted.job == job) {
                Some(found) => drop(found.start.get_or_insert_with(|| first_start(now))),
                None => {
                    let submitted = Submitted { job, uid, ..Submitted::default() };
                    found.push(FoundJob { submitted, start: Some(first_start(now)) });
                }
            }
        }
        found.into_iter().for_each(|found| self.list_again(found));
        false
    }

    /// Returns the highest id that may have been assigned to a job that has left no files.
    fn highest_used_id(&self) -> Option<u64> {
        // A torn record was probably not acknowledged, so its id is considered unused.
        let reserved = (self.setup.integrity == Integrity::Damaged).then(|| self.setup.ids.reserved());
        self.accounted_ids().last().copied().into_iter().chain(reserved).max()
    }

    fn accounted_ids(&self) -> BTreeSet<u64> {
        self.setup.accounting.ids().unwrap_or_else(|error| {
            warn!("failed to read the accounting file: {error}");
            BTreeSet::new()
        })
    }

    fn found_job(&self, job: u64, dir: FoundDir) -> FoundJob {
        let now = self.now();
        let FoundDir { uid, gid, description, agent } = dir;
        let user = agent.as_ref().map(|agent| agent.user.clone()).unwrap_or_default();
        let mut submitted = Submitted { job, uid, gid, user, ..Submitted::default() };
        if let Some(description) = description {
            let longest = self.setup.config.borrow().jobs.max_grace.0.as_secs_f64();
            (submitted.trainer, submitted.shutdown_timeout) = match &description.work {
                Work::Trainer(spec) => {
                    (true, spec.launch.shutdown_timeout.max(spec.launch.shutdown_timeout_max))
                }
                Work::Command(spec) => (false, spec.shutdown_timeout.as_secs_f64()),
            };
            submitted.shutdown_timeout = submitted.shutdown_timeout.min(longest);
            (submitted.name, submitted.workers) = (description.name, description.workers);
            submitted.work_dir = description.work_dir.to_string_lossy().into_owned();
        }
        FoundJob { submitted, start: agent.map(|agent| found_start(agent, now)) }
    }

    fn list_again(&mut self, mut found: FoundJob) {
        let Submitted { job, uid, .. } = found.submitted;
        if found.submitted.user.is_empty() {
            let account = tokio::task::block_in_place(|| users::find(uid));
            found.submitted.user = account.ok().flatten().map(|account| account.name).unwrap_or_default();
        }
        warn!(job, uid, "job {job} is not in the journal and is listed again");
        let now = self.now();
        found.records(now).into_iter().for_each(|record| self.record_event(record));
    }

    /// Finds starts that are missing in the journal. Those jobs would otherwise be started a second time.
    fn find_lost_starts(&mut self) {
        let now = self.now();
        let jobs: Vec<u64> = self.jobs.jobs.keys().copied().collect();
        for job in jobs {
            let found = self.setup.dirs.newest_agent(job).map(|agent| found_start(agent, now));
            if let Some(record) = found.and_then(|start| self.jobs.lost_start(job, start)) {
                warn!(job, "the start of job {job} is not in the journal");
                self.record_event(record);
            }
        }
    }

    /// Adopts the active jobs of this boot. Those of an earlier one, with `last_clock`, have ended.
    fn adopt_active_jobs(&mut self, last_clock: &NodeClock) {
        let boot_now = boot_id();
        let active: Vec<_> = self.jobs.active().map(|(job, entry)| (job, entry.clone())).collect();
        for (job, entry) in active {
            let Phase::Active { start, boot, .. } = &entry.phase else { continue };
            if *boot == boot_now {
                info!(job, "job {job} is adopted");
                self.jobs.adopted.insert(job);
                self.follow(job, false);
                continue;
            }
            let result =
                self.setup.dirs.result(job, entry.submitted.uid).filter(|result| result.start == *start);
            match result {
                Some(result) => self.on_ended(job, result, None, last_clock),
                None => self.on_lost(job, "the node was rebooted while it ran", None),
            }
        }
    }
}

fn found_start(agent: AgentRecord, now: u64) -> FoundStart {
    let AgentRecord { start, process, gpus, boot, at, .. } = agent;
    // Version 0.2 recorded the boot only for processes. A unit can only be running if it was started in this boot.
    let boot = if boot.is_empty() { process.map_or_else(boot_id, |process| process.boot) } else { boot };
    FoundStart { start, gpus, boot, at: if at > 0 { at } else { now } }
}

/// Returns the start of a unit that has no record.
fn first_start(now: u64) -> FoundStart {
    FoundStart { start: 1, gpus: Vec::new(), boot: boot_id(), at: now }
}
