//! Writing records to the journal and applying them.

use std::collections::BTreeSet;
use std::io;

use tracing::{info, warn};

use super::Manager;
use crate::accounting::Account;
use crate::commands::CommandError;
use crate::state::{Jobs, Record};
use xlaunch_proto::labels::node_job_state;

/// Whether all lines of the accounting file are known to be in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccountingState {
    Unknown,
    Written,
    Failed,
}

/// The journal is compacted when it has grown to twice its last compacted size, and to this.
const COMPACT_ABOVE_BYTES: u64 = 4 << 20;

impl AccountingState {
    /// The state when a journal with these jobs was read.
    pub(super) fn of(jobs: &Jobs) -> Self {
        if jobs.unaccounted.is_empty() { Self::Written } else { Self::Unknown }
    }
}

impl Manager {
    /// Records an event that has happened whether or not it can be written, then forgets the oldest ended jobs.
    pub(super) fn record_event(&mut self, record: Record) {
        let on_gpus = self.jobs.active().any(|(_, entry)| entry.submitted.gpus > 0);
        if let Record::Ended { job, end, reason, .. } = &record {
            // The reason comes from the agent. As a field it cannot be mistaken for another message.
            info!(job, reason, "job {job} has ended: {}", node_job_state((*end).into()));
        }
        if self.write(record.clone()).is_err() {
            self.unsaved = true;
            self.apply(record);
        }
        if on_gpus {
            // The last poll still saw the job's processes, which count as foreign now that no job holds the GPU.
            self.gpu_monitor.poll_now();
        }
        self.forget_old_jobs();
    }

    /// Writes the accounts of ended jobs that may not be in the accounting file. After a failure, the next tick tries
    /// again.
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
            // Lines may have been written that the journal does not mention.
            AccountingState::Unknown | AccountingState::Failed => self.accounting.ids()?,
        };
        let missing = self.jobs.unaccounted.difference(&written);
        let entries = missing.filter_map(|job| self.jobs.jobs.get(job));
        let mut accounts: Vec<_> = entries.filter_map(|entry| Account::of(entry, self.skew)).collect();
        accounts.sort_unstable_by_key(|account| account.order);
        if accounts.is_empty() { Ok(()) } else { self.accounting.append(&accounts) }
    }

    /// Lets the next [`write_accounts`](Self::write_accounts) try again.
    pub(super) fn retry_accounts(&mut self) {
        if self.accounting_state == AccountingState::Failed {
            self.accounting_state = AccountingState::Unknown;
        }
    }

    pub(super) fn remove_submission(&self, job: u64) {
        if let Err(error) = tokio::task::block_in_place(|| self.dirs.remove_submission(job)) {
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
            && let Err(error) = tokio::task::block_in_place(|| self.dirs.remove_array(first))
        {
            warn!(job = first, "failed to remove the submission of the array of job {first}: {error}");
        }
    }

    pub(super) fn forget_old_jobs(&mut self) {
        let keep = self.config.borrow().jobs.keep;
        let kept_up_to = self.kept_up_to;
        for job in self.jobs.ended_beyond(keep).into_iter().filter(|job| *job > kept_up_to) {
            if self.write(Record::Forgotten { job }).is_err() {
                return;
            }
            self.runtime.remove(&job);
            if let Err(error) = tokio::task::block_in_place(|| self.dirs.remove(job)) {
                warn!(job, "failed to remove the directory of job {job}: {error}");
            }
        }
    }

    /// Writes a record to the journal, then applies it. On an error it is not applied.
    pub(super) fn write(&mut self, record: Record) -> Result<(), CommandError> {
        self.rewrite_journal_if_needed();
        let failed = |why: &dyn std::fmt::Display| {
            CommandError::Unavailable(format!("failed to write the daemon's journal: {why}"))
        };
        if self.unsaved {
            return Err(failed(&"earlier changes could not be written either; is the disk full?"));
        }
        if let Err(error) = tokio::task::block_in_place(|| self.journal.append(&record)) {
            warn!("failed to append to the journal: {error}");
            // The file's content on disk is unknown after a failed append, so it is rewritten.
            self.unsaved = true;
            self.rewrite_journal_if_needed();
            return Err(failed(&error));
        }
        self.apply(record);
        Ok(())
    }

    fn apply(&mut self, record: Record) {
        let jobs = record.jobs();
        let ended = matches!(record, Record::Ended { .. });
        self.jobs.apply(record);
        if ended {
            for job in jobs.clone() {
                self.remove_submission(job);
                self.run_end_hook(job);
            }
        }
        self.changed.extend(jobs);
    }

    /// Rewrites the journal from `jobs` if it lacks changes or is due for compaction.
    pub(super) fn rewrite_journal_if_needed(&mut self) {
        let limit = COMPACT_ABOVE_BYTES.max(self.compacted_bytes.saturating_mul(2));
        if !self.unsaved && self.journal.len_bytes() <= limit {
            return;
        }
        let records = self.jobs.records();
        match tokio::task::block_in_place(|| self.journal.rewrite(&records)) {
            Ok(()) => (self.unsaved, self.compacted_bytes) = (false, self.journal.len_bytes()),
            Err(error) => {
                // The old file can still be appended to if only the compaction has failed, as on a full disk.
                self.unsaved |= self.journal.is_broken();
                warn!("failed to rewrite the journal: {error}");
            }
        }
    }
}
