//! The node's clock, which measures all durations: time limits, reservations, the decay of usage. Pure.
//!
//! Times in the journal are in milliseconds on this clock. At boot, the clock is set to the time since 1970, and then
//! advances with CLOCK_BOOTTIME, so setting the system clock does not change it. It never goes back, even across
//! reboots, which are detected by the boot id. Times that users see are converted to the system clock at that moment.

use super::{Entry, Jobs, Phase, Record};

/// The node's clock during one boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeClock {
    boot: String,
    /// Time at which this boot began, in milliseconds.
    offset: u64,
}

impl NodeClock {
    pub(super) fn new(boot: String, offset: u64) -> Self {
        Self { boot, offset }
    }

    /// Returns the current time. `uptime` is the time since the boot; both are in milliseconds.
    pub(crate) fn at(&self, uptime: u64) -> u64 {
        self.offset.saturating_add(uptime)
    }
}

impl Jobs {
    /// Returns the record that starts the clock of this boot, unless it is already running. `uptime` is the time since
    /// the boot, `unix` the time on the system clock, which may be wrong.
    pub(crate) fn start_clock(&self, boot: &str, uptime: u64, unix: u64) -> Option<Record> {
        if self.clock.boot == boot && self.clock.offset > 0 && self.clock.at(uptime) >= self.latest {
            return None;
        }
        let offset = unix.max(self.latest).saturating_sub(uptime);
        Some(Record::Clock { boot: boot.into(), offset, latest: self.latest })
    }

    /// Returns the time at which an active job has ended that reports this time since its boot, when `clock` ran; now
    /// if that is unknown. The agent that reports it runs as the job's user, so it is limited to the job's lifetime.
    pub(crate) fn end_time(&self, job: u64, clock: &NodeClock, uptime: u64, now: u64) -> u64 {
        match self.jobs.get(&job) {
            Some(Entry { phase: Phase::Active { at, boot, .. }, .. })
                if uptime > 0 && *boot == clock.boot =>
            {
                clock.at(uptime).max(*at).min(now)
            }
            _ => now,
        }
    }

    /// Returns the record that reproduces the clock and the latest time.
    pub(super) fn clock_record(&self) -> Option<Record> {
        let NodeClock { boot, offset } = self.clock.clone();
        (self.latest > 0 || offset > 0).then_some(Record::Clock { boot, offset, latest: self.latest })
    }

    /// Updates the latest time from a record.
    pub(super) fn see(&mut self, record: &Record) {
        let at = match record {
            Record::Submitted(submitted) => submitted.at,
            Record::SubmittedArray { first, .. } => first.at,
            Record::Held { at, .. }
            | Record::Released { at, .. }
            | Record::Reprioritised { at, .. }
            | Record::Starting { at, .. }
            | Record::Warned { at, .. }
            | Record::TimeLimitReached { at, .. }
            | Record::Cancelled { at, .. }
            | Record::Ended { at, .. }
            | Record::Requeued { at, .. }
            | Record::Drained { at, .. }
            | Record::Resumed { at, .. }
            | Record::Used { at, .. } => *at,
            Record::Clock { latest, .. } => *latest,
            Record::Accounted { .. }
            | Record::Forgotten { .. }
            | Record::Counted { .. }
            | Record::HalfLife { .. } => 0,
        };
        self.latest = self.latest.max(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::limits::due;
    use crate::state::tests::submitted;
    use crate::state::{End, Submitted};

    const HOUR: u64 = 3_600_000;
    const YEAR: u64 = 365 * 24 * HOUR;
    /// Some time in 2026.
    const TODAY: u64 = 56 * YEAR;

    /// Starts the clock in a boot.
    fn boot(jobs: &mut Jobs, boot: &str, uptime: u64, unix: u64) -> u64 {
        if let Some(record) = jobs.start_clock(boot, uptime, unix) {
            jobs.apply(record);
        }
        jobs.clock.at(uptime)
    }

    #[test]
    fn setting_the_clock_does_not_change_time_limits() {
        let mut jobs = Jobs::default();
        let now = boot(&mut jobs, "a", HOUR, TODAY);
        assert_eq!(now, TODAY, "the time since 1970");
        let mut submitted = Submitted { job: 1, at: now, ..Submitted::default() };
        submitted.scheduling.time_limit_seconds = Some(12 * 3600);
        jobs.apply(Record::Submitted(Box::new(submitted)));
        jobs.apply(Record::Starting { job: 1, start: 1, gpus: vec![], boot: "a".into(), at: now });
        // The system clock is set a day ahead, and the daemon is restarted.
        let now = boot(&mut jobs, "a", HOUR + 60_000, TODAY + 24 * HOUR);
        assert_eq!((now, due(&jobs, now).stops), (TODAY + 60_000, vec![]));
        let now = boot(&mut jobs, "a", 13 * HOUR, TODAY - YEAR);
        assert_eq!(due(&jobs, now).stops, [1]);
    }

    #[test]
    fn job_ends_at_the_time_that_its_agent_reports_within_its_lifetime() {
        let mut jobs = Jobs::default();
        let started = boot(&mut jobs, "a", HOUR, TODAY);
        jobs.apply(submitted(1, 7, 1, 0));
        jobs.apply(Record::Starting { job: 1, start: 1, gpus: vec![], boot: "a".into(), at: started });
        let (clock, now) = (jobs.clock.clone(), started + 9000);
        let at = |uptime| jobs.end_time(1, &clock, uptime, now);
        assert_eq!(at(HOUR + 2000), started + 2000);
        assert_eq!([at(1), at(9 * HOUR), at(0)], [started, now, now]);
        // After a reboot, with the clock of the boot in which the job ran.
        let now = boot(&mut jobs, "b", 5000, TODAY + 2 * HOUR);
        assert_eq!(jobs.end_time(1, &clock, HOUR + 2000, now), started + 2000);
        assert_eq!(jobs.end_time(1, &jobs.clock, 4000, now), now, "of another boot");
    }

    #[test]
    fn usage_decays_after_a_wrong_year_was_corrected() {
        let mut jobs = Jobs::default();
        let now = boot(&mut jobs, "a", 1000, TODAY + 10 * YEAR);
        jobs.apply(submitted(1, 7, 1, 0));
        jobs.apply(Record::Starting { job: 1, start: 1, gpus: vec![], boot: "a".into(), at: now });
        let (reason, report) = (String::new(), String::new());
        let at = now + HOUR;
        jobs.apply(Record::Ended {
            job: 1,
            end: End::Done,
            exit: None,
            reason,
            report,
            at,
            order: 0,
            usage: None,
        });
        let before = jobs.used(at)[&7];
        let now = boot(&mut jobs, "a", 1000 + HOUR + 7 * 24 * HOUR, TODAY);
        assert!((jobs.used(now)[&7] / before - 0.5).abs() < 0.01, "half after the half-life");
        // The same holds across a reboot, where the time continues.
        let mut again = Jobs::default();
        jobs.records().into_iter().for_each(|record| again.apply(record));
        assert_eq!(again, jobs);
        let now = boot(&mut again, "b", 1000, TODAY);
        let later = boot(&mut again, "b", 1000 + 7 * 24 * HOUR, TODAY);
        assert!(now >= at && (again.used(later)[&7] / again.used(now)[&7] - 0.5).abs() < 0.01);
    }

    #[test]
    fn clock_includes_the_time_that_the_node_was_off() {
        let mut jobs = Jobs::default();
        boot(&mut jobs, "a", 1000, TODAY);
        jobs.apply(submitted(1, 7, 1, 0));
        assert_eq!(boot(&mut jobs, "b", 5000, TODAY + HOUR), TODAY + HOUR);
        jobs.apply(Record::Used { uid: 1, gpu_seconds: 1.0, at: TODAY + 2 * HOUR });
        assert_eq!(boot(&mut jobs, "c", 5000, TODAY), TODAY + 2 * HOUR, "never back");
    }
}
