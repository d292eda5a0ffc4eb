//! Softmax cross entropy fused with its gradient, which replaces the logits.
//!
//! `losses[n] = log sum_v exp(l[n, v]) - l[n, target]` over v < V; with a gradient,
//! `l[n, v] = (softmax(l[n])[v] - [v = target]) grad_scale`, and 0 in the padding.

pub(crate) mod cpu;
pub(crate) mod cuda;

use super::{Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

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
    /// (N,) I32, each below V: the caller has checked them.
    pub targets: Slice<'a>,
    /// (N,) F32.
    pub losses: Slice<'a>,
    /// Factor of the gradients.
    pub grad_scale: Option<f32>,
}

impl Op for FusedClassifier<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::run(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::run(gpu, self)
    }
}
