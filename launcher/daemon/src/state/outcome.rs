//! How a job ends, given the result that its agent has left. Pure.
//!
//! A job that ended before the daemon told it to stop has ended by itself, whatever was recorded meanwhile: the daemon
//! may have been stopped or suspended when the time limit passed.

use serde::{Deserialize, Serialize};

use super::{End, Entry, Jobs, Phase, Record, Usage, bounded};

/// Outcome of a job, as reported by its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobResult {
    pub exit: u8,
    /// True if the job was stopped on request.
    pub stopped: bool,
    pub reason: String,
    pub report: String,
    /// The rank that failed first, if one did.
    pub rank: Option<u32>,
    pub attempt: u32,
    pub start: u32,
    /// Resources that the workers have used.
    pub usage: Option<Usage>,
    /// Time from the boot to the end of the job, in milliseconds; 0 in results of version 0.3.
    pub uptime_ms: u64,
}

impl Jobs {
    /// Returns the user who has cancelled a running job, if any.
    pub(crate) fn cancelled_by(&self, job: u64) -> Option<String> {
        match &self.jobs.get(&job)?.phase {
            Phase::Active { cancelled: Some(by), .. } => Some(self.user_label(by.uid, &by.user)),
            _ => None,
        }
    }

    /// Returns the reason if the job was told to stop at its time limit and ended after that, at `ended`. Then it has
    /// failed whatever its agent reports.
    pub(crate) fn limit_reached(&self, job: u64, ended: u64) -> Option<String> {
        match self.jobs.get(&job)? {
            Entry { submitted, phase: Phase::Active { over_limit: Some(told), .. } } if *told <= ended => {
                Some(submitted.limit_reached())
            }
            _ => None,
        }
    }

    /// Returns the record of a job that has ended with this result at `at`: of its end, or of its return to the queue.
    /// `usage` was measured by systemd, if it was.
    pub(crate) fn outcome(&self, job: u64, result: JobResult, usage: Option<Usage>, at: u64) -> Record {
        let JobResult { exit, stopped, .. } = result;
        // Without systemd, only the agent knows the usage.
        let usage = usage.or(result.usage);
        let (reason, report) = (bounded(result.reason), bounded(result.report));
        let (end, reason) = match (self.limit_reached(job, at), self.cancelled_by(job)) {
            (Some(reason), _) => (End::Failed, reason),
            (None, _) if exit == 0 => (End::Done, reason),
            (None, Some(user)) if stopped => {
                let rest = if reason.is_empty() { String::new() } else { format!(": {reason}") };
                (End::Cancelled, bounded(format!("cancelled by user {user}{rest}")))
            }
            // The node is shut down, or the service that the agent is in.
            (None, None) if stopped => {
                let reason = bounded(format!("its agent was stopped, but not by the daemon: {reason}"));
                if let Some(record) = self.requeue(job, &reason, at, usage) {
                    return record;
                }
                (End::Failed, reason)
            }
            (None, _) => (End::Failed, reason),
        };
        Record::Ended { job, end, exit: Some(exit), reason, report, at, order: 0, usage }
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::Scheduling;

    use super::*;
    use crate::state::Submitted;

    /// A job with a time limit of 5 s that started at 1 s and was told to stop at `told`.
    fn limited(told: Option<u64>) -> Jobs {
        let mut jobs = Jobs::default();
        let scheduling = Scheduling { time_limit_seconds: Some(5), requeue: true, ..Scheduling::default() };
        let submitted = Submitted { job: 1, scheduling, ..Submitted::default() };
        jobs.apply(Record::Submitted(Box::new(submitted)));
        jobs.apply(Record::Starting { job: 1, start: 1, gpus: vec![], boot: "b".into(), at: 1000 });
        told.into_iter().for_each(|at| jobs.apply(Record::TimeLimitReached { job: 1, at }));
        jobs
    }

    fn ended(jobs: &Jobs, exit: u8, stopped: bool, at: u64) -> (End, String, u64) {
        let result = JobResult { exit, stopped, reason: "r".into(), ..JobResult::default() };
        match jobs.outcome(1, result, None, at) {
            Record::Ended { end, reason, at, .. } => (end, reason, at),
            record => panic!("{record:?}"),
        }
    }

    #[test]
    fn result_from_before_the_stop_at_the_time_limit_counts() {
        let late = limited(Some(9000));
        let limit = "time limit of 5s reached".to_owned();
        assert_eq!(ended(&late, 0, false, 3000), (End::Done, "r".into(), 3000));
        assert_eq!(
            ended(&late, 3, false, 8999),
            (End::Failed, "r".into(), 8999),
            "over its limit, but not stopped"
        );
        assert_eq!(ended(&late, 0, true, 9001), (End::Failed, limit.clone(), 9001));
        assert_eq!(ended(&late, 3, false, 9001), (End::Failed, limit, 9001));
        let mut again = Jobs::default();
        late.records().into_iter().for_each(|record| again.apply(record));
        assert_eq!(ended(&again, 0, false, 3000).0, End::Done, "after a compaction of the journal");
    }

    #[test]
    fn job_stopped_by_a_shutdown_before_its_time_limit_is_requeued() {
        let result = || JobResult { exit: 143, stopped: true, ..JobResult::default() };
        for (told, ended) in [(None, 3000), (Some(9000), 3000)] {
            let record = limited(told).outcome(1, result(), None, ended);
            assert!(matches!(record, Record::Requeued { job: 1, lost: true, at: 3000, .. }), "{record:?}");
        }
        let record = limited(Some(6000)).outcome(1, result(), None, 6001);
        assert!(matches!(record, Record::Ended { end: End::Failed, .. }), "{record:?}");
    }
}
