//! From what happens to the journal, and to what is true.

use tracing::{info, warn};

use super::Manager;
use crate::orders::Refused;
use crate::state::Record;
use xlaunch_proto::labels::node_job_state;

/// Bytes of a journal that is worth shortening, where it has more than so many for each job.
const LONG: u64 = 4 << 20;
const PER_JOB: u64 = 16 << 10;

impl Manager {
    /// What has happened has happened, whether it can be written down or not.
    pub(super) fn end(&mut self, record: Record) {
        let on_gpus = self.jobs.active().any(|(_, entry)| entry.submitted.gpus > 0);
        if let Record::Ended { job, end, reason, .. } = &record {
            // An agent's word is a field: it cannot look like another message.
            info!(job, reason, "job {job} has ended: {}", node_job_state((*end).into()));
        }
        if self.write(record.clone()).is_err() {
            self.unsaved = true;
            self.apply(record);
        }
        if on_gpus {
            // The last look has seen its processes there: they are strangers' until the next.
            self.look.again();
        }
        self.forget();
    }

    fn forget(&mut self) {
        let keep = self.config.borrow().keep;
        for job in self.jobs.beyond(keep) {
            if self.write(Record::Forgotten { job }).is_err() {
                return;
            }
            self.live.remove(&job);
            if let Err(error) = tokio::task::block_in_place(|| self.dirs.remove(job)) {
                warn!(job, "failed to remove the directory of job {job}: {error}");
            }
        }
    }

    /// Writes down what is then true.
    pub(super) fn write(&mut self, record: Record) -> Result<(), Refused> {
        self.save();
        let broken = |error: &dyn std::fmt::Display| {
            Refused::Broken(format!("the daemon cannot write to its journal: {error}"))
        };
        if self.unsaved {
            return Err(broken(&"it is behind what has happened; is the disk full?"));
        }
        if let Err(error) = tokio::task::block_in_place(|| self.journal.append(&record)) {
            warn!("failed to write to the journal: {error}");
            // What it holds now, nobody knows: it is written anew.
            self.unsaved = true;
            self.save();
            return Err(broken(&error));
        }
        self.apply(record);
        Ok(())
    }

    fn apply(&mut self, record: Record) {
        use Record::{Cancelled, Counted, Drained, Ended, Forgotten, Requeued, Starting, Submitted};
        let job = match &record {
            Submitted(submitted) => Some(submitted.job),
            Starting { job, .. }
            | Cancelled { job, .. }
            | Ended { job, .. }
            | Requeued { job, .. }
            | Forgotten { job } => Some(*job),
            Drained { .. } | Counted { .. } => None,
        };
        self.changed.extend(job);
        self.jobs.apply(record);
    }

    /// Brings the journal up to what is true, where it is not, and shortens a long one.
    pub(super) fn save(&mut self) {
        let long = self.journal.len_bytes() > LONG.max(PER_JOB * self.jobs.jobs.len() as u64);
        if !self.unsaved && !long {
            return;
        }
        let records = self.jobs.records();
        match tokio::task::block_in_place(|| self.journal.rewrite(&records)) {
            Ok(()) => self.unsaved = false,
            Err(error) => {
                self.unsaved = true;
                warn!("failed to write the journal: {error}");
            }
        }
    }
}
