//! Decides which steps are skipped, and when training has diverged. Pure.
//!
//! AdamW skips a step whose loss or gradient norm is not finite, and after `NonFinite::limit` consecutive such steps
//! every later step. The device makes that decision (see `ops/adamw`). [`SkipCount`] makes the same decisions on the
//! host, from the results that are read back. Both see the same numbers on every rank, so all ranks end after the same
//! step, with the state of the last good one.

use std::fmt;

use xlaunch_spec::job::TrainSection;

/// The value that was not finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Divergence {
    /// Results of training steps.
    Step {
        /// Loss of the last skipped step.
        loss: f32,
        /// Gradient norm of the last skipped step.
        grad_norm: f32,
        /// Number of consecutive skipped steps.
        in_a_row: u32,
    },
    /// Loss on held-out data.
    Validation {
        /// NaN or infinite.
        loss: f64,
    },
    /// A weight or an optimizer moment, before it was saved.
    State,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Step { loss, grad_norm, in_a_row } => {
                write!(f, "the loss is {loss} and the gradient norm is {grad_norm}")?;
                if loss.is_finite() && grad_norm.is_infinite() {
                    f.write_str(" (above 1.8e19 its square overflows fp32)")?;
                }
                if in_a_row > 1 {
                    write!(f, ", the last of {in_a_row} skipped steps in a row")?;
                }
                Ok(())
            }
            Self::Validation { loss } => write!(f, "the validation loss is {loss}"),
            Self::State => f.write_str("a weight or an optimizer moment is not finite"),
        }
    }
}

/// Counts the skipped steps of a run.
#[derive(Clone, Copy, Debug)]
pub struct SkipCount {
    limit: u32,
    last_step: u64,
    in_a_row: u32,
    total: u64,
}

impl SkipCount {
    /// Starts with no skipped steps.
    pub fn new(train: &TrainSection) -> Self {
        Self { limit: train.nonfinite.limit(), last_step: train.steps, in_a_row: 0, total: 0 }
    }

    /// Counts the results of step `step`, numbered from 1.
    ///
    /// # Errors
    /// If training has diverged. A job never ends with a skipped step: that would be a success with a loss that is not
    /// finite.
    pub(crate) fn record(&mut self, step: u64, loss: f32, grad_norm: f32) -> Result<(), Divergence> {
        if loss.is_finite() && grad_norm.is_finite() {
            self.in_a_row = 0;
            return Ok(());
        }
        self.in_a_row += 1;
        self.total += 1;
        if self.in_a_row >= self.limit || step >= self.last_step {
            return Err(Divergence::Step { loss, grad_norm, in_a_row: self.in_a_row });
        }
        Ok(())
    }

    /// Returns whether the last step was skipped.
    pub(crate) fn is_skipping(&self) -> bool {
        self.in_a_row > 0
    }

    /// Returns the number of skipped steps of this run.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlaunch_spec::job::NonFinite;

    fn count(nonfinite: NonFinite) -> SkipCount {
        SkipCount::new(&TrainSection { steps: 100, nonfinite, ..TrainSection::default() })
    }

    #[test]
    fn first_step_that_is_not_finite_is_divergence_unless_such_steps_are_skipped() {
        for (loss, norm) in [(f32::NAN, 1.0), (f32::INFINITY, 1.0), (1.0, f32::NAN), (1.0, f32::INFINITY)] {
            assert!(count(NonFinite::Stop).record(1, loss, norm).is_err(), "{loss} {norm}");
            assert!(count(NonFinite::Skip).record(1, loss, norm).is_ok(), "{loss} {norm}");
        }
        assert!(count(NonFinite::Stop).record(1, 3.0, 1e19).is_ok());
    }

    #[test]
    fn ten_skipped_steps_in_a_row_are_divergence_and_a_good_step_starts_the_count_again() {
        let mut skips = count(NonFinite::Skip);
        for step in 1..=9 {
            skips.record(step, f32::NAN, 1.0).unwrap();
        }
        assert!(skips.is_skipping());
        skips.record(10, 3.0, 1.0).unwrap();
        assert!(!skips.is_skipping());
        for step in 11..=19 {
            skips.record(step, f32::NAN, 1.0).unwrap();
        }
        let diverged = skips.record(20, f32::NAN, 2.0).unwrap_err();
        let expected = "the loss is NaN and the gradient norm is 2, the last of 10 skipped steps in a row";
        assert_eq!((diverged.to_string(), skips.total()), (expected.to_owned(), 19));
    }

    #[test]
    fn job_does_not_end_with_a_skipped_step() {
        let mut skips = count(NonFinite::Skip);
        skips.record(99, f32::NAN, 1.0).unwrap();
        assert!(skips.record(100, f32::NAN, 1.0).is_err());
    }

    #[test]
    fn overflow_of_the_squared_norm_is_explained() {
        let text = Divergence::Step { loss: 3.5, grad_norm: f32::INFINITY, in_a_row: 1 }.to_string();
        let expected =
            "the loss is 3.5 and the gradient norm is inf (above 1.8e19 its square overflows fp32)";
        assert_eq!(text, expected);
    }
}
