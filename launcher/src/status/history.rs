//! How a training job has gone so far, in as many points as a chart shows.

use xlaunch_proto::v1::{Progress, StepReport};

/// Points that a history is thinned out to.
pub const POINTS: usize = 400;

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

/// Tokens per second of a step; 0 where none was made.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub fn speed(step: &StepReport) -> f64 {
    if step.step_seconds > 0.0 { step.tokens as f64 / step.step_seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

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
