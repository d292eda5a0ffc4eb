//! Softmax cross entropy on threads.

use rayon::prelude::*;

use super::{ClassifierShape, FusedClassifier};
use crate::cpu::math::{self, simd};
use crate::cpu::{Access, Threads};

/// Rows per task.
const CLASSIFIER_ROWS: usize = 32;

pub(crate) fn run(t: &Threads, args: FusedClassifier<'_>) {
    let (a, s) = (Access::new("classifier"), args.shape);
    let len = s.rows * s.padded;
    let (targets, out) = (a.read_i32(args.targets, s.rows), a.write(args.losses, s.rows));
    match args.grad_scale {
        None => losses(t, s, a.read(args.logits, len), targets, out),
        Some(scale) => losses_and_gradients(t, s, a.write(args.logits, len), targets, out, scale),
    }
}

fn losses(t: &Threads, s: ClassifierShape, logits: &[f32], targets: &[i32], losses: &mut [f32]) {
    t.run(|| {
        let rows = logits.par_chunks(CLASSIFIER_ROWS * s.padded).zip(targets.par_chunks(CLASSIFIER_ROWS));
        losses.par_chunks_mut(CLASSIFIER_ROWS).zip(rows).for_each(|(losses, (logits, targets))| {
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

fn losses_and_gradients(
    t: &Threads,
    s: ClassifierShape,
    logits: &mut [f32],
    targets: &[i32],
    losses: &mut [f32],
    scale: f32,
) {
    t.run(|| {
        let rows = logits.par_chunks_mut(CLASSIFIER_ROWS * s.padded).zip(targets.par_chunks(CLASSIFIER_ROWS));
        losses.par_chunks_mut(CLASSIFIER_ROWS).zip(rows).for_each(|(losses, (logits, targets))| {
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

/// Converts a target to an index. The caller has checked the targets; a negative one would fail the bounds check.
fn index(target: i32) -> usize {
    usize::try_from(target).unwrap_or(usize::MAX)
}
