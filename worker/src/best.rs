//! The best evaluation of a run, and the decision to stop early (`train.patience`). Pure: every rank has the same
//! losses, so all ranks stop after the same step.

use serde::{Deserialize, Serialize};

/// The lowest validation loss so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The loss, in nats per token.
    pub loss: f64,
    /// The step after which it was measured.
    pub step: u64,
    /// Number of evaluations since then.
    pub evaluations_since: u64,
}

impl Best {
    /// Returns the best evaluation among earlier ones and one after `step`.
    #[must_use]
    pub fn after(earlier: Option<Self>, step: u64, loss: f64) -> Self {
        match earlier {
            Some(best) if loss >= best.loss => Self { evaluations_since: best.evaluations_since + 1, ..best },
            _ => Self { loss, step, evaluations_since: 0 },
        }
    }

    /// Returns whether training stops here, with `train.patience`. 0 never stops it.
    pub fn is_final(&self, patience: u64) -> bool {
        patience != 0 && self.evaluations_since >= patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends_after_evaluations_in_a_row_without_a_strictly_lower_loss() {
        let mut best = None;
        let stops = [3.0, 2.0, 2.0, 2.5, 1.5, 1.5, 1.6, 1.4].map(|loss| {
            let step = best.map_or(0, |best: Best| best.step + best.evaluations_since) + 1;
            best = Some(Best::after(best, step, loss));
            best.is_some_and(|best| best.is_final(2))
        });
        assert_eq!(stops, [false, false, false, true, false, false, true, false]);
        assert_eq!(best, Some(Best { loss: 1.4, step: 8, evaluations_since: 0 }));
        assert!(!Best { loss: 1.0, step: 1, evaluations_since: 1000 }.is_final(0));
    }
}
