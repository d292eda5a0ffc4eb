//! Examinations of idle GPUs: decides which GPUs are examined, and which of them are drained afterwards. Pure.
//!
//! ```text
//! request --choose--> examined: no job starts on them (`Jobs::examination`) --verdicts--> passed, failed, unknown
//!            '------> skipped: held by a job, in foreign use, sick, or excluded by jobs.leave_gpus
//! ```
//! Examinations are not in the journal: they end with the daemon, and the next daemon finds the GPUs free. Drained GPUs
//! are examined too, to show whether a repair was successful; they stay drained.

use std::time::Duration;

use xlaunch_host::doctor::{Finding, Level, Report};

use super::schedule::GpuSlot;
use super::{Jobs, bounded};
use crate::commands::CommandError;
use crate::view::Caller;

/// The last check, which a GPU must have completed to pass.
const DECISIVE_CHECK: &str = "rates";

/// The GPUs that are being examined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Examination {
    /// UUIDs of the GPUs.
    pub(crate) gpus: Vec<String>,
    /// Latest time at which they are free again, in milliseconds on the node's clock.
    pub(crate) until: u64,
}

/// The decision about a GPU of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) index: u32,
    pub(crate) uuid: String,
    /// The reason why it is not examined; `None` if it is.
    pub(crate) skipped: Option<String>,
}

/// The end of an examination's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExaminationEnd {
    Report(Report),
    TimedOut(Duration),
    /// The process could not be started, or ended without a report.
    Broken(String),
}

/// The result of a GPU's examination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    /// The GPU is drained, for this reason.
    Failed(String),
    /// The GPU could not be measured, for this reason.
    Unknown(String),
}

impl Jobs {
    /// Chooses the GPUs of a request, which are all if it names none. `known` are the node's GPUs by index.
    pub(crate) fn choose(
        &self,
        caller: &Caller,
        named: &[String],
        known: &[(u32, GpuSlot)],
    ) -> Result<Vec<Choice>, CommandError> {
        if !caller.admin {
            return Err(CommandError::NotAllowed("only administrators may examine GPUs".into()));
        }
        if self.examination.is_some() {
            return Err(CommandError::LimitReached(
                "GPUs of this node are being examined already: try again when that has ended".into(),
            ));
        }
        let names: Vec<_> = known.iter().map(|(index, slot)| (*index, slot.uuid.clone())).collect();
        let wanted = super::evaluate::find_gpus(named, &names)?;
        let is_wanted = |uuid: &String| named.is_empty() || wanted.contains(uuid);
        let chosen = known.iter().filter(|(_, slot)| is_wanted(&slot.uuid)).map(|(index, slot)| Choice {
            index: *index,
            uuid: slot.uuid.clone(),
            skipped: self
                .holder(&slot.uuid)
                .map(|job| format!("job {job} runs on it"))
                .or(slot.unusable.clone()),
        });
        Ok(chosen.collect())
    }

    /// Returns the job that holds a GPU.
    pub(crate) fn holder(&self, uuid: &str) -> Option<u64> {
        self.active().find(|(_, entry)| entry.gpus().any(|gpu| gpu == uuid)).map(|(job, _)| job)
    }

    /// Returns whether a GPU is being examined.
    pub(crate) fn is_examined(&self, uuid: &str) -> bool {
        self.examination.as_ref().is_some_and(|examination| examination.gpus.iter().any(|gpu| gpu == uuid))
    }
}

impl ExaminationEnd {
    /// Returns the verdict about a GPU that was examined.
    ///
    /// A failure that concerns several GPUs, such as a wrong all-reduce, is not attributed to any of them. A hanging
    /// GPU keeps the others from being examined, so after a timeout all of them are suspect.
    pub(crate) fn verdict(&self, index: u32, uuid: &str) -> Verdict {
        let report = match self {
            Self::Report(report) => report,
            Self::TimedOut(timeout) => {
                let reason = format!("doctor: timeout: no result within {} s", timeout.as_secs());
                return Verdict::Failed(reason);
            }
            Self::Broken(problem) => return Verdict::Unknown(problem.clone()),
        };
        // The driver no longer reports the UUID of a lost GPU.
        let is_own = |finding: &&Finding| {
            finding.gpu.as_ref().is_some_and(|gpu| match gpu.uuid.as_str() {
                "" => gpu.index == index,
                found => found == uuid,
            })
        };
        let own: Vec<&Finding> = report.findings.iter().filter(is_own).collect();
        let failures: Vec<String> = own
            .iter()
            .filter(|finding| finding.level == Level::Failure)
            .map(|Finding { check, message, .. }| format!("{check}: {message}"))
            .collect();
        if !failures.is_empty() {
            return Verdict::Failed(bounded(format!("doctor: {}", failures.join("; "))));
        }
        if own.iter().any(|finding| finding.check == DECISIVE_CHECK) {
            Verdict::Passed
        } else {
            Verdict::Unknown("it could not be measured".into())
        }
    }
}
