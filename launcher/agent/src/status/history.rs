//! How a training job has gone so far: in as many points as a chart shows, and in all.

use xlaunch_proto::v1::{Progress, StepReport, StepTimes, Totals};

/// Points that a history is thinned out to.
pub const POINTS: usize = 400;

/// Seconds that steps are counted by.
const SECONDS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, f64::INFINITY];

/// The progress of a training job, thinned out evenly: when there are too many points, every second one goes, and only so
/// many are taken from then on.
#[derive(Clone, Debug, Default)]
pub struct History {
    points: Vec<Progress>,
    /// Of so many steps, one is taken, as a power of two.
    thinned: u32,
    steps: u64,
}

impl History {
    /// A step was made at this time, in milliseconds since 1970.
    pub fn add(&mut self, unix_ms: u64, step: &StepReport) {
        let done = step.step + 1;
        if self.points.last().is_some_and(|last| last.step >= done) {
            // A new attempt began at an earlier checkpoint: what was lost is not shown twice.
            self.points.retain(|point| point.step < done);
        }
        self.steps += 1;
        if !self.steps.is_multiple_of(1 << self.thinned) {
            return;
        }
        let tokens_per_second = speed(step);
        self.points.push(Progress { unix_ms, step: done, loss: step.loss, tokens_per_second });
        if self.points.len() > POINTS {
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                keep
            });
            self.thinned += 1;
        }
    }

    /// Oldest first, at most [`POINTS`].
    pub fn points(&self) -> &[Progress] {
        &self.points
    }
}

/// Adds a step to what a job has done.
pub fn count(totals: &mut Totals, step: &StepReport) {
    if totals.steps.is_empty() {
        totals.steps = SECONDS.map(|seconds| StepTimes { seconds, steps: 0 }).to_vec();
    }
    totals.tokens = totals.tokens.saturating_add(step.tokens);
    totals.all_reduce_bytes = totals.all_reduce_bytes.saturating_add(step.all_reduce_bytes);
    totals.step_seconds += step.step_seconds;
    if let Some(times) = totals.steps.iter_mut().find(|times| step.step_seconds <= times.seconds) {
        times.steps += 1;
    }
}

/// Whether totals that somebody else has counted are a histogram: for the daemon they are a user's word.
pub fn is_sound(totals: &Totals) -> bool {
    let ascends = totals.steps.windows(2).all(|pair| pair[0].seconds < pair[1].seconds);
    let last = totals.steps.last().is_some_and(|last| last.seconds == f64::INFINITY);
    let sum = totals.steps.iter().try_fold(0_u64, |sum, times| sum.checked_add(times.steps));
    ascends && last && sum.is_some() && totals.steps.len() <= SECONDS.len() && totals.step_seconds.is_finite()
}

/// Tokens per second of a step; 0 where none was made.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub fn speed(step: &StepReport) -> f64 {
    if step.step_seconds > 0.0 { step.tokens as f64 / step.step_seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_by_how_long_they_took() {
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
    fn a_long_history_is_thinned_out_evenly_and_a_new_attempt_takes_back_what_was_lost() {
        let mut history = History::default();
        let step = |step| StepReport { step, ..StepReport::default() };
        for number in 0..10_000 {
            history.add(number, &step(number));
        }
        let steps: Vec<u64> = history.points().iter().map(|point| point.step).collect();
        assert!((POINTS / 2..=POINTS).contains(&steps.len()), "{}", steps.len());
        let gaps: Vec<u64> = steps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (least, most) = (gaps.iter().min().unwrap(), gaps.iter().max().unwrap());
        assert!(most <= &(2 * least) && steps[0] < 100 && steps.last().unwrap() > &9_900, "{least} {most}");
        history.add(10_000, &step(5_000));
        assert!(history.points().iter().all(|point| point.step <= 5_001));
    }
}
