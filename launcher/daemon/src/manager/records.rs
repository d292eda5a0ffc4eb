//! Writes records to the journal and applies them.

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::Manager;
use crate::accounting::Account;
use crate::commands::CommandError;
use crate::state::{Jobs, Record};
use xlaunch_proto::v1::NodeJobState;

/// State of the accounting file: whether all of its lines are known to be in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccountingState {
    Unknown,
    Written,
    Failed,
}

/// Time for which an ended job is kept even beyond `jobs.keep`, so that clients that wait for it learn how it ended.
const FORGET_DELAY: Duration = Duration::from_secs(5);
/// Minimum size for a compaction. The journal must also have grown to twice its last compacted size.
const COMPACT_ABOVE_BYTES: u64 = 4 << 20;

impl AccountingState {
    /// Returns the initial state after a journal with these jobs was read.
    pub(super) fn of(jobs: &Jobs) -> Self {
        if jobs.unaccounted.is_empty() { Self::Written } else { Self::Unknown }
    }
}

impl Manager {
    /// Records an event that has happened, whether or not it can be written to the journal. Then forgets the oldest
    /// ended jobs.
    pub(super) fn record_event(&mut self, record: Record) {
        let on_gpus = self.jobs.active().any(|(_, entry)| entry.submitted.gpus > 0);
        if let Record::Ended { job, end, reason, .. } = &record {
            // The reason comes from the agent, so it is logged as a field, where it cannot be mistaken for another
            // message.
            info!(job, reason, "job {job} has ended: {}", NodeJobState::from(*end).label());
        }
        if self.write(record.clone()).is_err() {
            self.unsaved = true;
            self.apply(record);
        }
        if on_gpus {
            // The last poll still saw the job's processes, which would count as foreign now that no job holds the GPU.
            self.setup.gpu_monitor.poll_now();
        }
        self.forget_old_jobs();
    }

    /// Writes the accounts of ended jobs that may not be in the accounting file yet. After a failure, the next tick
    /// tries again.
    pub(super) fn write_accounts(&mut self) {
        if self.jobs.unaccounted.is_empty() || self.accounting_state == AccountingState::Failed {
            return;
        }
        match tokio::task::block_in_place(|| self.try_write_accounts()) {
            Ok(()) => {
                self.accounting_state = AccountingState::Written;
                let jobs = self.jobs.unaccounted.iter().copied().collect();
                self.record_event(Record::Accounted { jobs });
            }
            Err(error) => {
                let count = self.jobs.unaccounted.len();
                warn!("failed to write the accounts of {count} jobs, trying again: {error}");
                self.accounting_state = AccountingState::Failed;
            }
        }
    }

    fn try_write_accounts(&self) -> io::Result<()> {
        let written = match self.accounting_state {
            AccountingState::Written => BTreeSet::new(),
            // The file may have lines that the journal has not recorded as written.
            AccountingState::Unknown | AccountingState::Failed => self.setup.accounting.ids()?,
        };
        let missing = self.jobs.unaccounted.difference(&written).filter(|job| !self.accounted.contains(job));
        let entries = missing.filter_map(|job| self.jobs.jobs.get(job));
        let mut accounts: Vec<_> = entries.filter_map(|entry| Account::of(entry, self.skew)).collect();
        accounts.sort_unstable_by_key(|account| account.order);
        if accounts.is_empty() { Ok(()) } else { self.setup.accounting.append(&accounts) }
    }

    /// Makes the next [`write_accounts`](Self::write_accounts) try again.
    pub(super) fn retry_accounts(&mut self) {
        if self.accounting_state == AccountingState::Failed {
            self.accounting_state = AccountingState::Unknown;
        }
    }

    pub(super) fn remove_submission(&self, job: u64) {
        if let Err(error) = tokio::task::block_in_place(|| self.setup.dirs.remove_submission(job)) {
            warn!(job, "failed to remove the submission of job {job}: {error}");
        }
        let entry = self.jobs.jobs.get(&job);
        if let Some(element) = entry.and_then(|entry| entry.submitted.array) {
            self.remove_ended_array(element.first);
        }
    }

    /// Removes the submission of an array if its last job has ended.
    pub(super) fn remove_ended_array(&self, first: u64) {
        if self.jobs.array_has_ended(first)
            && let Err(error) = tokio::task::block_in_place(|| self.setup.dirs.remove_array(first))
        {
            warn!(job = first, "failed to remove the submission of the array of job {first}: {error}");
        }
    }

    /// Forgets the oldest ended jobs, except those that have just ended: a later tick forgets these.
    pub(super) fn forget_old_jobs(&mut self) {
        let keep = self.setup.config.borrow().jobs.keep;
        let kept_up_to = self.kept_up_to;
        let is_recent = |job| {
            let ended = self.runtime.get(&job).and_then(|runtime| runtime.ended);
            ended.is_some_and(|at| at.elapsed() < FORGET_DELAY)
        };
        let old = self.jobs.ended_beyond(keep, is_recent);
        for job in old.into_iter().filter(|job| *job > kept_up_to) {
            if self.write(Record::Forgotten { job }).is_err() {
                return;
            }
            self.runtime.remove(&job);
            if let Err(error) = tokio::task::block_in_place(|| self.setup.dirs.remove(job)) {
                warn!(job, "failed to remove the directory of job {job}: {error}");
            }
        }
    }

    /// Writes a record to the journal, then applies it. After an error it is not applied.
    pub(super) fn write(&mut self, record: Record) -> Result<(), CommandError> {
        self.write_all(vec![record])
    }

    /// Writes records to the journal together, then applies them. After an error none of them is applied.
    pub(super) fn write_all(&mut self, records: Vec<Record>) -> Result<(), CommandError> {
        if records.is_empty() {
            return Ok(());
        }
        self.rewrite_journal_if_needed();
        let failed = |why: &dyn std::fmt::Display| {
            CommandError::Unavailable(format!("failed to write the daemon's journal: {why}"))
        };
        if self.unsaved {
            return Err(failed(&"earlier changes could not be written either; is the disk full?"));
        }
        if let Err(error) = tokio::task::block_in_place(|| self.setup.journal.append(&records)) {
            warn!("failed to append to the journal: {error}");
            // After a failed append, the contents on disk are unknown, so the file is rewritten.
            self.unsaved = true;
            self.rewrite_journal_if_needed();
            return Err(failed(&error));
        }
        records.into_iter().for_each(|record| self.apply(record));
        Ok(())
    }

    fn apply(&mut self, record: Record) {
        let jobs = record.jobs();
        let ended = matches!(record, Record::Ended { .. });
        self.jobs.apply(record);
        if ended {
            for job in jobs.clone() {
                self.runtime.entry(job).or_default().ended = Some(Instant::now());
                self.remove_submission(job);
                self.run_end_hook(job);
            }
        }
        self.changed.extend(jobs);
    }

    /// Rewrites the journal from `jobs` if changes are missing in it, or if a compaction is due.
    pub(super) fn rewrite_journal_if_needed(&mut self) {
        let limit = COMPACT_ABOVE_BYTES.max(self.compacted_bytes.saturating_mul(2));
        if !self.unsaved && self.setup.journal.len_bytes() <= limit {
            return;
        }
        let records = self.jobs.records();
        match tokio::task::block_in_place(|| self.setup.journal.rewrite(&records)) {
            Ok(()) => (self.unsaved, self.compacted_bytes) = (false, self.setup.journal.len_bytes()),
            Err(error) => {
                // If only the compaction has failed, as on a full disk, records can still be appended to the old file.
                self.unsaved |= self.setup.journal.is_broken();
                warn!("failed to rewrite the journal: {error}");
            }
        }
    }
}
