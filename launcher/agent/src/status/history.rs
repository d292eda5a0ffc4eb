//! The progress of a training job: totals, and a bounded number of points for a chart.

use xlaunch_proto::metrics::tokens_per_second;
use xlaunch_proto::v1::{Progress, StepReport, StepTimes, Totals};

/// A history is thinned out to at most this many points.
pub const MAX_POINTS: usize = 400;

/// Upper bounds of the histogram of step times, in seconds.
const STEP_TIME_BUCKETS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, f64::INFINITY];

/// The progress of a training job, thinned out evenly: when there are too many points, every second one is removed, and
/// the interval between new points doubles.
#[derive(Clone, Debug, Default)]
pub struct History {
    points: Vec<Progress>,
    /// One in 2^n steps becomes a point; this is n.
    interval_log2: u32,
    steps: u64,
}

impl History {
    /// Adds a step that was completed at this time.
    pub fn add(&mut self, unix_ms: u64, step: &StepReport) {
        if self.points.last().is_some_and(|last| last.step >= step.step) {
            // A new attempt resumed at an earlier checkpoint: the repeated steps replace the lost ones.
            self.points.retain(|point| point.step < step.step);
        }
        self.steps += 1;
        if !self.steps.is_multiple_of(1 << self.interval_log2) {
            return;
        }
        let tokens_per_second = tokens_per_second(step);
        self.points.push(Progress { unix_ms, step: step.step, loss: step.loss, tokens_per_second });
        if self.points.len() > MAX_POINTS {
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                keep
            });
            self.interval_log2 += 1;
        }
    }

    /// Returns at most [`MAX_POINTS`] points, oldest first.
    pub fn points(&self) -> &[Progress] {
        &self.points
    }
}

/// Adds a step to the totals of a job.
pub fn count(totals: &mut Totals, step: &StepReport) {
    if totals.steps.is_empty() {
        totals.steps = STEP_TIME_BUCKETS.map(|seconds| StepTimes { seconds, steps: 0 }).to_vec();
    }
    totals.tokens = totals.tokens.saturating_add(step.tokens);
    totals.all_reduce_bytes = totals.all_reduce_bytes.saturating_add(step.all_reduce_bytes);
    totals.step_seconds += step.step_seconds;
    if let Some(times) = totals.steps.iter_mut().find(|times| step.step_seconds <= times.seconds) {
        times.steps += 1;
    }
}

/// Returns whether totals from an untrusted source (to the daemon, a job's user is one) form a valid histogram.
pub fn is_sound(totals: &Totals) -> bool {
    let ascends = totals.steps.windows(2).all(|pair| pair[0].seconds < pair[1].seconds);
    let last = totals.steps.last().is_some_and(|last| last.seconds == f64::INFINITY);
    let sum = totals.steps.iter().try_fold(0_u64, |sum, times| sum.checked_add(times.steps));
    ascends
        && last
        && sum.is_some()
        && totals.steps.len() <= STEP_TIME_BUCKETS.len()
        && totals.step_seconds.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_in_buckets_by_their_time() {
        let mut totals = Totals::default();
        for step_seconds in [0.0009, 0.001, 0.007, 0.0071, 100.0] {
            let step = StepReport { step_seconds, tokens: 10, all_reduce_bytes: 3, ..StepReport::default() };
            count(&mut totals, &step);
        }
        let counts: Vec<u64> = totals.steps.iter().map(|times| times.steps).collect();
        assert_eq!(counts, [2, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!((totals.tokens, totals.all_reduce_bytes), (50, 15));
        assert!((totals.step_seconds - 100.016).abs() < 1e-9, "{totals:?}");
        assert!(is_sound(&totals));
        let with = |change: fn(&mut Totals)| {
            let mut totals = totals.clone();
            change(&mut totals);
            is_sound(&totals)
        };
        assert!(!with(|it| it.steps[3].seconds = f64::NAN) && !with(|it| it.steps[3].seconds = 0.001));
        assert!(!with(|it| it.steps[0].steps = u64::MAX) && !with(|it| it.steps.clear()));
        assert!(!with(|it| it.step_seconds = f64::NAN) && !with(|it| it.steps.truncate(14)));
    }

    #[test]
    fn long_history_is_thinned_out_evenly_and_repeated_steps_replace_lost_ones() {
        let mut history = History::default();
        let step = |step| StepReport { step, ..StepReport::default() };
        for number in 1..=10_000 {
            history.add(number, &step(number));
        }
        let steps: Vec<u64> = history.points().iter().map(|point| point.step).collect();
        assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&steps.len()), "{}", steps.len());
        let gaps: Vec<u64> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (least, most) = (gaps.iter().min().unwrap(), gaps.iter().max().unwrap());
        assert!(most <= &(2 * least) && steps[0] < 100 && steps.last().unwrap() > &9_900, "{least} {most}");
        history.add(10_001, &step(5_001));
        assert!(history.points().iter().all(|point| point.step <= 5_001));
    }
}
