//! Evaluates the reports of the ranks of `bench train`: steps, memory and kernels. Pure.

use std::ops::RangeInclusive;
use std::time::Instant;

use xlaunch_agent::sinks::RankReport;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{StepReport, TrainStarted};

use super::kernels::{self, Kernel};

/// The steps to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Number of steps before the measured ones.
    pub(crate) warmup: u64,
    /// Number of measured steps.
    pub(crate) steps: u64,
    /// True to time the kernels of one more step.
    pub(crate) profile: bool,
}

impl Extent {
    /// Returns the number of the last measured step; steps count from 1.
    pub(super) fn end(self) -> u64 {
        self.warmup + self.steps
    }
}

/// Returns the steps of a rank, with the times at which their reports arrived.
pub(super) fn steps(reports: &[RankReport], rank: u32) -> impl Iterator<Item = (Instant, StepReport)> {
    reports.iter().filter(move |received| received.rank == rank).filter_map(|received| {
        match &received.report {
            Report::Step(step) => Some((received.at, *step)),
            _ => None,
        }
    })
}

/// Returns the durations of a rank's measured steps in seconds, sorted.
pub(super) fn step_seconds(reports: &[RankReport], rank: u32, extent: Extent) -> Vec<f64> {
    let measured = extent.warmup + 1..=extent.end();
    let measured = steps(reports, rank).filter(|(_, step)| measured.contains(&step.step));
    let mut seconds: Vec<f64> = measured.map(|(_, step)| step.step_seconds).collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}

/// Returns the period of the measured steps: from the end of the step before them, or of the first step if there is
/// none, to the end of the last one.
pub(super) fn measured_period(reports: &[RankReport], extent: Extent) -> Option<RangeInclusive<Instant>> {
    let ended = |number| steps(reports, 0).find(|(_, step)| step.step == number).map(|(at, _)| at);
    Some(ended(extent.warmup.max(1))?..=ended(extent.end())?)
}

pub(super) fn started(reports: &[RankReport]) -> Option<&TrainStarted> {
    reports.iter().find_map(|received| match &received.report {
        Report::TrainStarted(started) => Some(started),
        _ => None,
    })
}

/// Returns the largest number of bytes that any rank's pool has mapped.
pub(super) fn pool_peak_bytes(reports: &[RankReport]) -> u64 {
    let bytes = reports.iter().filter_map(|received| match &received.report {
        Report::Step(step) => Some(step.pool_peak_bytes),
        _ => None,
    });
    bytes.max().unwrap_or(0)
}

pub(super) fn profile(reports: &[RankReport]) -> Vec<Kernel> {
    let reported = reports.iter().find_map(|received| match &received.report {
        Report::Profile(profile) => Some(kernels::grouped(&profile.kernels)),
        _ => None,
    });
    reported.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn step_seconds_are_the_measured_steps_of_a_rank_sorted() {
        let start = Instant::now();
        let step = |rank, step: u64, step_seconds| RankReport {
            rank,
            at: start + Duration::from_secs(step),
            report: Report::Step(StepReport { step, step_seconds, ..Default::default() }),
        };
        let reports = [
            step(0, 1, 9.0),
            step(0, 2, 3.0),
            step(1, 2, 8.0),
            step(0, 3, 1.0),
            step(0, 4, 2.0),
            step(0, 5, 7.0),
        ];
        let extent = Extent { warmup: 1, steps: 3, profile: true };
        assert_eq!(step_seconds(&reports, 0, extent), [1.0, 2.0, 3.0]);
        assert_eq!(step_seconds(&reports, 1, extent), [8.0]);
        let second = |second| start + Duration::from_secs(second);
        assert_eq!(measured_period(&reports, extent), Some(second(1)..=second(4)));
        let extent = Extent { warmup: 0, ..extent };
        assert_eq!(measured_period(&reports, extent), Some(second(1)..=second(3)));
        assert_eq!(measured_period(&reports, Extent { steps: 9, ..extent }), None);
    }
}
