//! Writing records to the journal and applying them.

use tracing::{info, warn};

use super::Manager;
use crate::accounting::Account;
use crate::commands::CommandError;
use crate::state::Record;
use xlaunch_proto::labels::node_job_state;

/// The journal is compacted when it has grown to twice its last compacted size, and to this.
const COMPACT_ABOVE_BYTES: u64 = 4 << 20;

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

    /// Adds an ended job to the accounting file.
    fn account(&self, account: &Account) {
        let job = account.job;
        if let Err(error) = tokio::task::block_in_place(|| self.accounting.append(account)) {
            warn!(job, "failed to write the account of job {job}, until the next start: {error}");
        }
    }

    /// Adds the accounts that an earlier daemon has recorded in the journal but not written.
    pub(super) fn complete_accounting(&self) {
        let last = match self.accounting.last_order() {
            Ok(last) => last,
            Err(error) => return warn!("failed to read the accounting file: {error}"),
        };
        let accounts = self.jobs.jobs.values().filter_map(Account::of);
        let mut missing: Vec<_> = accounts.filter(|account| account.order > last).collect();
        missing.sort_unstable_by_key(|account| account.order);
        missing.iter().for_each(|account| self.account(account));
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
        for job in self.jobs.ended_beyond(keep) {
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
                if let Some(account) = self.jobs.jobs.get(&job).and_then(Account::of) {
                    self.account(&account);
                }
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
                self.unsaved = true;
                warn!("failed to rewrite the journal: {error}");
            }
        }
    }
}
