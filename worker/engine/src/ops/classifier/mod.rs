//! Softmax cross entropy fused with its gradient, which replaces the logits.
//!
//! `losses[n] = log sum_v exp(l[n, v]) - l[n, target]` over v < V; with a gradient,
//! `l[n, v] = (softmax(l[n])[v] - [v = target]) grad_scale`, and 0 in the padding. With a cap, `cap t` with `t = tanh(l
//! / cap)` takes the place of l, and the gradient is multiplied by the derivative `1 - t^2`. Rows with the target
//! [`IGNORED`] have the loss 0 and no gradient. With weights, the gradient of a row is multiplied by its weight.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::{Cuda, Op, softcap};
use crate::cpu::math::{self, simd};
use crate::cpu::{Access, Threads};
use crate::cuda::{KernelFile, Launch, Macro, args, expect, source};
use crate::error::Result;
use crate::tensor::Slice;

/// Rows per task on the CPU.
const CLASSIFIER_ROWS: usize = 32;
/// Threads of a block whose row is longer than LONG_ROW bytes: such a block has a multiprocessor to itself, as the rows
/// of all running blocks must fit into the L2 cache. For shorter rows a block has half as many threads, and two blocks
/// share a multiprocessor.
const CLASSIFIER_THREADS: u32 = 1024;
const LONG_ROW: usize = 160 << 10;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("classifier/kernel.cu"),
    kernels: &["classifier", "classifier_capped"],
    macros: &[Macro::int("CLASSIFIER_THREADS", CLASSIFIER_THREADS as usize)],
    dynamic_shared: &[],
};

/// Target of a row that does not take part in the loss.
pub const IGNORED: i32 = -1;

/// Cross entropy over rows of `padded` logits, of which the first `vocab` take part.
#[derive(Clone, Copy, Debug)]
pub struct ClassifierShape {
    /// N.
    pub rows: usize,
    /// V.
    pub vocab: usize,
    /// Vp, the row stride.
    pub padded: usize,
}

/// Losses, and with `grad_scale` also gradients, in place of the logits.
#[derive(Clone, Copy, Debug)]
pub struct FusedClassifier<'a> {
    /// Sizes.
    pub shape: ClassifierShape,
    /// (N, Vp) activations. Unchanged without `grad_scale`.
    pub logits: Slice<'a>,
    /// (N,) I32, each below V or [`IGNORED`]: the caller has checked them.
    pub targets: Slice<'a>,
    /// (N,) F32.
    pub losses: Slice<'a>,
    /// (1,) F32: factor of the gradients, which depends on the number of targets of a step. It is in memory because
    /// steps are captured and replayed.
    pub grad_scale: Option<Slice<'a>>,
    /// (N,) F32: further factors of the gradients, one for each row.
    pub weights: Option<Slice<'a>>,
    /// Bound of the logits' magnitude, applied before the softmax: see [`SoftCap`](crate::SoftCap).
    pub softcap: Option<f32>,
}

impl Op for FusedClassifier<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s) = (Access::new("classifier"), self.shape);
        let len = s.rows * s.padded;
        let (targets, out) = (a.read_i32(self.targets, s.rows), a.write(self.losses, s.rows));
        match self.grad_scale {
            None => losses(threads, s, a.read(self.logits, len), targets, out, self.softcap),
            Some(scale) => {
                let weights = self.weights.map(|weights| a.read(weights, s.rows));
                let factors = Factors { scale: a.read(scale, 1)[0], weights };
                let logits = a.write(self.logits, len);
                losses_and_gradients(threads, s, logits, targets, out, factors, self.softcap);
            }
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let s = self.shape;
        gpu.expect_act(self.logits, s.rows * s.padded);
        expect(self.targets, DType::I32, s.rows);
        expect(self.losses, DType::F32, s.rows);
        let is_long = s.padded * gpu.activations.size() > LONG_ROW;
        let launch =
            Launch::blocks(s.rows, if is_long { CLASSIFIER_THREADS } else { CLASSIFIER_THREADS / 2 });
        if let Some(scale) = self.grad_scale {
            expect(scale, DType::F32, 1);
        }
        if let Some(weights) = self.weights {
            expect(weights, DType::F32, s.rows);
        }
        let (vocab, padded, scale) = (s.vocab, s.padded, self.grad_scale);
        let args = args![self.logits, self.targets, self.losses, vocab, padded, scale, self.weights];
        // SAFETY: checked above; targets are below V or negative by the operation's contract.
        unsafe {
            match self.softcap {
                None => gpu.launch("classifier", launch, args),
                Some(cap) => gpu.launch("classifier_capped", launch, &[&args[..], args![cap]].concat()),
            }
        }
    }
}

fn losses(
    t: &Threads,
    s: ClassifierShape,
    logits: &[f32],
    targets: &[i32],
    losses: &mut [f32],
    softcap: Option<f32>,
) {
    t.run(|| {
        let rows = logits.par_chunks(CLASSIFIER_ROWS * s.padded).zip(targets.par_chunks(CLASSIFIER_ROWS));
        losses.par_chunks_mut(CLASSIFIER_ROWS).zip(rows).for_each(|(losses, (logits, targets))| {
            simd!({
                for ((loss, logits), target) in
                    losses.iter_mut().zip(logits.chunks_exact(s.padded)).zip(targets)
                {
                    if *target == IGNORED {
                        *loss = 0.0;
                        continue;
                    }
                    let (logits, capped) = (&logits[..s.vocab], |logit| capped(logit, softcap));
                    let largest = capped(math::max(logits));
                    let total = math::sum(s.vocab, |i| math::exp(capped(logits[i]) - largest));
                    *loss = total.ln() + largest - capped(logits[index(*target)]);
                }
            });
        });
    });
}

/// Factors of the gradients.
#[derive(Clone, Copy)]
struct Factors<'a> {
    scale: f32,
    weights: Option<&'a [f32]>,
}

impl Factors<'_> {
    fn of_row(self, row: usize) -> f32 {
        self.weights.map_or(self.scale, |weights| self.scale * weights[row])
    }
}

fn losses_and_gradients(
    t: &Threads,
    s: ClassifierShape,
    logits: &mut [f32],
    targets: &[i32],
    losses: &mut [f32],
    factors: Factors<'_>,
    softcap: Option<f32>,
) {
    t.run(|| {
        let rows = logits.par_chunks_mut(CLASSIFIER_ROWS * s.padded).zip(targets.par_chunks(CLASSIFIER_ROWS));
        let blocks = losses.par_chunks_mut(CLASSIFIER_ROWS).zip(rows).enumerate();
        blocks.for_each(|(block, (losses, (logits, targets)))| {
            let mut slopes = Vec::new();
            simd!({
                let rows = losses.iter_mut().zip(logits.chunks_exact_mut(s.padded)).zip(targets);
                for (number, ((loss, row), target)) in (block * CLASSIFIER_ROWS..).zip(rows) {
                    let scale = factors.of_row(number);
                    if *target == IGNORED {
                        *loss = 0.0;
                        row.fill(0.0);
                        continue;
                    }
                    let (logits, padding) = row.split_at_mut(s.vocab);
                    slopes.clear();
                    if let Some(cap) = softcap {
                        for logit in logits.iter_mut() {
                            *logit = softcap::cpu(*logit, cap);
                            slopes.push(1.0 - (*logit / cap) * (*logit / cap));
                        }
                    }
                    let (largest, target) = (math::max(logits), index(*target));
                    let chosen = logits[target];
                    logits.iter_mut().for_each(|logit| *logit = math::exp(*logit - largest));
                    let total = math::total(logits);
                    *loss = total.ln() + largest - chosen;
                    let factor = scale / total;
                    logits.iter_mut().for_each(|p| *p *= factor);
                    logits[target] -= scale;
                    // There are none without a cap.
                    logits.iter_mut().zip(&slopes).for_each(|(gradient, slope)| *gradient *= slope);
                    padding.fill(0.0);
                }
            });
        });
    });
}

/// Applies the cap, if any.
#[inline(always)]
fn capped(logit: f32, softcap: Option<f32>) -> f32 {
    softcap.map_or(logit, |cap| softcap::cpu(logit, cap))
}

/// Converts a target to an index. The caller has checked the targets; a negative one would fail the bounds check.
fn index(target: i32) -> usize {
    usize::try_from(target).unwrap_or(usize::MAX)
}
