//! Recovers jobs that are running or have files but are missing from the journal, because it was damaged, lost, or
//! replaced by an older one. Pure.
//!
//! ```text
//! found --> an agent was recorded, or its unit runs --> Submitted, Starting: adopted like any other job
//!     '---> otherwise the job was queued            --> Submitted, Ended (lost): its user must submit it again
//! ```
//! A recovered job is listed, holds its GPUs and can be cancelled by its user, and its files are kept for as long as
//! those of other jobs.

use super::{End, Jobs, Phase, Record, Submitted};

/// The reason given for the end of a job whose submission is lost.
const SUBMISSION_LOST: &str = "the daemon's journal was damaged and its submission is lost; submit it again";
/// Name of a job if its real name is unknown.
const UNKNOWN_NAME: &str = "unknown";

/// A job that has no record, with the facts known about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FoundJob {
    pub(crate) submitted: Submitted,
    /// The newest start, if the job was started.
    pub(crate) start: Option<FoundStart>,
}

/// A start of a job, as recorded in its directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FoundStart {
    pub(crate) start: u32,
    pub(crate) gpus: Vec<String>,
    pub(crate) boot: String,
    pub(crate) at: u64,
}

impl FoundStart {
    fn record(self, job: u64) -> Record {
        let Self { start, gpus, boot, at } = self;
        Record::Starting { job, start, gpus, boot, at }
    }
}

impl FoundJob {
    /// Returns the records that add the job.
    pub(crate) fn records(self, now: u64) -> Vec<Record> {
        let Self { mut submitted, start } = self;
        let job = submitted.job;
        // The request id of the submission is unknown.
        submitted.request_id = format!("found-{job}");
        if submitted.name.is_empty() {
            submitted.name = UNKNOWN_NAME.into();
        }
        submitted.gpus =
            start.as_ref().map_or(0, |start| u32::try_from(start.gpus.len()).unwrap_or(u32::MAX));
        submitted.at = start.as_ref().map_or(now, |start| start.at);
        let next = match start {
            Some(start) => start.record(job),
            None => Record::ended(job, End::Lost, SUBMISSION_LOST.into(), now),
        };
        vec![Record::Submitted(Box::new(submitted)), next]
    }
}

impl Jobs {
    /// Returns the record of a start if it is missing in the journal.
    pub(crate) fn lost_start(&self, job: u64, found: FoundStart) -> Option<Record> {
        let known = match self.jobs.get(&job)?.phase {
            Phase::Queued { starts, .. } => starts,
            Phase::Active { start, .. } => start,
            Phase::Ended { .. } => return None,
        };
        (found.start > known).then(|| found.record(job))
    }

    /// Returns whether an unlisted job was forgotten or never acknowledged, so that its files can be removed. `last` is
    /// the highest id in the journal, which must have been read completely.
    pub(crate) fn is_leftover(job: u64, last: u64, was_started: bool) -> bool {
        job <= last || (job == last.saturating_add(1) && !was_started)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::submitted;

    fn start(start: u32) -> FoundStart {
        FoundStart { start, gpus: vec!["GPU-a".into()], boot: "b".into(), at: 5 }
    }

    #[test]
    fn found_job_that_was_started_is_active_and_holds_its_gpus() {
        let mut jobs = Jobs::default();
        let submitted = Submitted { job: 7, uid: 1000, user: "anna".into(), ..Submitted::default() };
        let found = FoundJob { submitted, start: Some(start(2)) };
        found.records(9).into_iter().for_each(|record| jobs.apply(record));
        let entry = &jobs.jobs[&7];
        let Phase::Active { start: 2, gpus, .. } = &entry.phase else { panic!("{entry:?}") };
        assert_eq!((gpus.len(), entry.submitted.name.as_str(), jobs.submitted), (1, "unknown", 7));
        assert_eq!(jobs.holder("GPU-a"), Some(7));
    }

    #[test]
    fn found_job_that_waited_is_lost_with_the_reason() {
        let mut jobs = Jobs::default();
        let found = FoundJob { submitted: Submitted { job: 7, ..Submitted::default() }, start: None };
        found.records(9).into_iter().for_each(|record| jobs.apply(record));
        let Phase::Ended { end: End::Lost, reason, at: 9, .. } = &jobs.jobs[&7].phase else { panic!() };
        assert!(reason.contains("journal was damaged"), "{reason}");
    }

    #[test]
    fn start_missing_in_the_journal_is_recovered() {
        let mut jobs = Jobs::default();
        jobs.apply(submitted(1, 1, 1, 0));
        let lost = jobs.lost_start(1, start(1)).unwrap();
        jobs.apply(lost);
        assert_eq!((jobs.holder("GPU-a"), jobs.lost_start(1, start(1))), (Some(1), None));
        assert!(jobs.lost_start(1, start(2)).is_some() && jobs.lost_start(2, start(2)).is_none());
    }

    #[test]
    fn files_of_jobs_newer_than_the_journal_are_kept() {
        assert!(Jobs::is_leftover(4, 4, true), "forgotten");
        assert!(Jobs::is_leftover(5, 4, false), "never acknowledged");
        assert!(!Jobs::is_leftover(5, 4, true) && !Jobs::is_leftover(6, 4, false), "of a newer journal");
    }
}
