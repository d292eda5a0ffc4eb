//! Cross entropy with its gradient: `loss = log sum exp(l) - l[target]`, `dl = (softmax(l) - onehot) scale`.

use rayon::prelude::*;

use super::math::{self, simd};
use super::threads::Threads;
use crate::shapes::ClassifierShape;

/// Rows per task.
const ROWS: usize = 32;

pub(super) fn losses(t: &Threads, s: ClassifierShape, logits: &[f32], targets: &[i32], losses: &mut [f32]) {
    t.run(|| {
        let rows = logits.par_chunks(ROWS * s.padded).zip(targets.par_chunks(ROWS));
        losses.par_chunks_mut(ROWS).zip(rows).for_each(|(losses, (logits, targets))| {
            simd!({
                for ((loss, logits), target) in
                    losses.iter_mut().zip(logits.chunks_exact(s.padded)).zip(targets)
                {
                    let logits = &logits[..s.vocab];
                    let largest = math::max(logits);
                    let total = math::sum(s.vocab, |i| math::exp(logits[i] - largest));
                    *loss = total.ln() + largest - logits[index(*target)];
                }
            });
        });
    });
}

pub(super) fn losses_and_gradients(
    t: &Threads,
    s: ClassifierShape,
    logits: &mut [f32],
    targets: &[i32],
    losses: &mut [f32],
    scale: f32,
) {
    t.run(|| {
        let rows = logits.par_chunks_mut(ROWS * s.padded).zip(targets.par_chunks(ROWS));
        losses.par_chunks_mut(ROWS).zip(rows).for_each(|(losses, (logits, targets))| {
            simd!({
                let rows = losses.iter_mut().zip(logits.chunks_exact_mut(s.padded)).zip(targets);
                for ((loss, row), target) in rows {
                    let (logits, padding) = row.split_at_mut(s.vocab);
                    let (largest, target) = (math::max(logits), index(*target));
                    let chosen = logits[target];
                    logits.iter_mut().for_each(|logit| *logit = math::exp(*logit - largest));
                    let total = math::total(logits);
                    *loss = total.ln() + largest - chosen;
                    let factor = scale / total;
                    logits.iter_mut().for_each(|p| *p *= factor);
                    logits[target] -= scale;
                    padding.fill(0.0);
                }
            });
        });
    });
}

/// As in `embed`: targets were checked when they were read.
fn index(target: i32) -> usize {
    usize::try_from(target).unwrap_or(usize::MAX)
}
