//! Selects the checkpoints of a run to delete. Pure.

use std::cmp::Ordering;

use xlaunch_spec::job::JobSpec;

/// Rules for keeping checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Number of newest checkpoints; 0 keeps all.
    pub newest: usize,
    /// Keep steps that are multiples of this number; 0 disables this rule.
    pub every: u64,
    /// Number of checkpoints with the lowest validation loss.
    pub best: usize,
}

/// A checkpoint that is a candidate for deletion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) step: u64,
    pub(super) val_loss: Option<f64>,
    /// True if the run was resumed from this checkpoint.
    pub(super) is_source: bool,
}

impl Retention {
    /// Reads the rules from the configuration.
    pub fn of(spec: &JobSpec) -> Self {
        let section = &spec.checkpoint;
        // Early stopping is for the sake of the best checkpoint.
        let best = section.keep_best.max(usize::from(spec.train.patience != 0));
        Self { newest: section.keep, every: section.keep_every, best }
    }

    /// Returns the steps of the candidates to delete. The newest candidate is always kept.
    pub(super) fn to_delete(self, mut candidates: Vec<Candidate>) -> Vec<u64> {
        if self.newest == 0 {
            return Vec::new();
        }
        let by_loss = |a: &f64, b: &f64| a.partial_cmp(b).unwrap_or(Ordering::Equal);
        let mut losses: Vec<f64> = candidates.iter().filter_map(|candidate| candidate.val_loss).collect();
        losses.retain(|loss| loss.is_finite());
        losses.sort_by(by_loss);
        let limit = self.best.checked_sub(1).and_then(|last| losses.get(last).or(losses.last())).copied();
        candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.step));
        let keeps = |candidate: &Candidate| {
            candidate.is_source
                || (self.every != 0 && candidate.step.is_multiple_of(self.every))
                || limit.is_some_and(|limit| candidate.val_loss.is_some_and(|loss| loss <= limit))
        };
        let old = candidates.iter().skip(self.newest);
        old.filter(|candidate| !keeps(candidate)).map(|candidate| candidate.step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(losses: &[Option<f64>]) -> Vec<Candidate> {
        let steps = (1..).map(|index| 10 * index);
        let candidate = |(step, val_loss): (u64, &Option<f64>)| Candidate {
            step,
            val_loss: *val_loss,
            is_source: step == 10,
        };
        steps.zip(losses).map(candidate).collect()
    }

    #[test]
    fn newest_regular_best_and_the_source_are_kept() {
        let losses = [None, Some(1.0), Some(f64::NAN), Some(3.0), Some(2.0), None, Some(4.0)];
        let deleted = |newest, every, best| {
            let mut deleted = Retention { newest, every, best }.to_delete(candidates(&losses));
            deleted.sort_unstable();
            deleted
        };
        assert!(deleted(0, 0, 0).is_empty());
        assert_eq!(deleted(1, 0, 0), [20, 30, 40, 50, 60]);
        assert_eq!(deleted(2, 0, 0), [20, 30, 40, 50]);
        assert_eq!(deleted(2, 20, 0), [30, 50]);
        assert_eq!(deleted(2, 0, 2), [30, 40]);
        assert_eq!(deleted(1, 0, 100), [30, 60], "all with a loss are among the best");
        assert!(deleted(100, 0, 0).is_empty());
    }
}
