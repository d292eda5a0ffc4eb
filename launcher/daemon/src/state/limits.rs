//! Time limits: determines which running jobs are due for a warning or a stop, and when the next one is due. Pure.
//!
//! A job's time starts with its `Starting` record. A warning is recorded before it is sent, so that it is sent at most
//! once; a stop is recorded before it is requested, so that it is not lost. A user's `cancel` takes precedence: a job
//! that is being cancelled gets neither, and nor does a job of an earlier daemon before its agent has been found: it
//! may have ended within its limit.

use std::time::Duration;

use xlaunch_spec::quantities::time_text;

use super::{Entry, Jobs, Phase, Record, Submitted, Usage};

/// Time for a stopped agent to exit, in addition to the shutdown timeout of its workers. Then it is killed.
pub(crate) const AGENT_STOP_MARGIN: Duration = Duration::from_secs(60);

/// Maximum number of requeues. A job that is lost more often probably takes its node down.
const MAX_REQUEUES: u32 = 10;

/// Warnings and stops that are due at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Due {
    /// Jobs whose workers must be sent a signal, with the signal.
    pub(crate) warnings: Vec<(u64, i32)>,
    /// Jobs that must be stopped.
    pub(crate) stops: Vec<u64>,
    /// Time at which the next warning or stop is due, in milliseconds on the node's clock.
    pub(crate) next: Option<u64>,
}

/// Determines the warnings and stops that are due now.
pub(crate) fn due(jobs: &Jobs, now: u64) -> Due {
    let mut due = Due::default();
    let mut next = |at: u64| due.next = Some(due.next.map_or(at, |next| next.min(at)));
    for (job, Entry { submitted, phase }) in jobs.active() {
        let Phase::Active { at, cancelled: None, warned, over_limit: None, .. } = *phase else { continue };
        let Some(limit) = reached_at(submitted, at).filter(|_| !jobs.adopted.contains(&job)) else {
            continue;
        };
        if now >= limit {
            due.stops.push(job);
            continue;
        }
        next(limit);
        if let Some(warning) = submitted.scheduling.warning.filter(|_| !warned) {
            let warn_at = limit.saturating_sub(warning.seconds_before.saturating_mul(1000));
            if now >= warn_at {
                due.warnings.push((job, warning.signal));
            } else {
                next(warn_at);
            }
        }
    }
    due
}

impl Jobs {
    /// Returns the record that puts a lost job back in the queue; `None` if it ends instead.
    pub(crate) fn requeue(&self, job: u64, reason: &str, at: u64, usage: Option<Usage>) -> Option<Record> {
        let Entry { submitted, phase } = self.jobs.get(&job)?;
        let runs = matches!(phase, Phase::Active { cancelled: None, .. });
        let runs = runs && self.limit_reached(job, at).is_none();
        let again = runs && submitted.scheduling.requeue && submitted.requeues < MAX_REQUEUES;
        again.then(|| Record::Requeued { job, reason: reason.into(), lost: true, at, usage })
    }
}

/// Returns the time at which a job that started at `started` reaches its time limit.
pub(crate) fn reached_at(submitted: &Submitted, started: u64) -> Option<u64> {
    submitted.scheduling.time_limit_seconds.map(|limit| started.saturating_add(limit.saturating_mul(1000)))
}

/// Returns the latest time at which a job that starts at `started` has released its resources: its time limit plus the
/// time that it may take to stop.
pub(crate) fn released_by(submitted: &Submitted, started: u64) -> Option<u64> {
    let margin = AGENT_STOP_MARGIN.as_secs_f64() + submitted.shutdown_timeout.max(0.0);
    Some(reached_at(submitted, started)?.saturating_add((margin * 1000.0) as u64))
}

impl Submitted {
    /// Returns the reason given when a job is stopped at its time limit.
    pub(crate) fn limit_reached(&self) -> String {
        format!(
            "time limit of {} reached",
            time_text(Duration::from_secs(self.scheduling.time_limit_seconds.unwrap_or(0)))
        )
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::{Scheduling, WarningSignal};

    use super::*;

    fn running(time_limit_seconds: Option<u64>, warning: Option<WarningSignal>) -> Jobs {
        let mut jobs = Jobs::default();
        let scheduling = Scheduling { time_limit_seconds, warning, ..Scheduling::default() };
        let submitted = Submitted { job: 1, scheduling, ..Submitted::default() };
        jobs.apply(Record::Submitted(Box::new(submitted)));
        jobs.apply(Record::Starting { job: 1, start: 1, gpus: vec![], boot: String::new(), at: 5000 });
        jobs
    }

    #[test]
    fn job_is_warned_once_and_stopped_once() {
        let mut jobs = running(Some(100), Some(WarningSignal { signal: 10, seconds_before: 60 }));
        let expect = |jobs: &Jobs, now, warnings: &[(u64, i32)], stops: &[u64], next| {
            let expected = Due { warnings: warnings.to_vec(), stops: stops.to_vec(), next };
            assert_eq!(due(jobs, now), expected, "at {now}");
        };
        expect(&jobs, 44_999, &[], &[], Some(45_000));
        expect(&jobs, 45_000, &[(1, 10)], &[], Some(105_000));
        jobs.apply(Record::Warned { job: 1, at: 45_000 });
        expect(&jobs, 45_001, &[], &[], Some(105_000));
        expect(&jobs, 105_000, &[], &[1], None);
        jobs.apply(Record::TimeLimitReached { job: 1, at: 105_000 });
        expect(&jobs, 105_001, &[], &[], None);
        assert_eq!(released_by(&jobs.jobs[&1].submitted, 5000), Some(165_000));
    }

    #[test]
    fn missed_time_limit_stops_the_job_without_a_warning() {
        let jobs = running(Some(100), Some(WarningSignal { signal: 10, seconds_before: 60 }));
        assert_eq!(due(&jobs, 999_000), Due { stops: vec![1], ..Due::default() });
    }

    #[test]
    fn warning_longer_than_the_limit_is_due_at_the_start() {
        let jobs = running(Some(10), Some(WarningSignal { signal: 10, seconds_before: 60 }));
        assert_eq!(due(&jobs, 5000).warnings, [(1, 10)]);
    }

    #[test]
    fn jobs_without_a_limit_and_cancelled_ones_are_left_alone() {
        assert_eq!(due(&running(None, None), u64::MAX), Due::default());
        let mut jobs = running(Some(100), None);
        jobs.apply(Record::Cancelled { job: 1, uid: 1, user: String::new(), at: 6000 });
        assert_eq!(due(&jobs, u64::MAX), Due::default());
    }

    #[test]
    fn limit_of_an_adopted_job_is_due_once_its_agent_is_found() {
        let mut jobs = running(Some(100), None);
        jobs.adopted.insert(1);
        assert_eq!(due(&jobs, 999_000), Due::default());
        jobs.adopted.clear();
        assert_eq!(due(&jobs, 999_000).stops, [1]);
    }
}
