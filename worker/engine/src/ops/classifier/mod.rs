//! Softmax cross entropy fused with its gradient, which replaces the logits.
//!
//! `losses[n] = log sum_v exp(l[n, v]) - l[n, target]` over v < V; with a gradient,
//! `l[n, v] = (softmax(l[n])[v] - [v = target]) grad_scale`, and 0 in the padding.

pub(crate) mod cpu;

use xlaunch_pool::DType;

use super::{Cuda, Op};
use crate::cpu::Threads;
use crate::cuda::{KernelFile, Launch, Macro, args, expect, source};
use crate::error::Result;
use crate::tensor::Slice;

/// Threads of a block whose row is longer than LONG_ROW bytes: such a block has a multiprocessor to itself, as the rows
/// of all running blocks must fit into the L2 cache. For shorter rows a block has half as many threads, and two blocks
/// share a multiprocessor.
const CLASSIFIER_THREADS: u32 = 1024;
const LONG_ROW: usize = 160 << 10;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("classifier/kernel.cu"),
    kernels: &["classifier"],
    macros: &[Macro::int("CLASSIFIER_THREADS", CLASSIFIER_THREADS as usize)],
    dynamic_shared: &[],
};

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
        let s = self.shape;
        gpu.expect_act(self.logits, s.rows * s.padded);
        expect(self.targets, DType::I32, s.rows);
        expect(self.losses, DType::F32, s.rows);
        let is_long = s.padded * gpu.activations.size() > LONG_ROW;
        let launch =
            Launch::blocks(s.rows, if is_long { CLASSIFIER_THREADS } else { CLASSIFIER_THREADS / 2 });
        let (with_grad, scale) = (self.grad_scale.is_some(), self.grad_scale.unwrap_or(0.0));
        let args = args![self.logits, self.targets, self.losses, s.vocab, s.padded, with_grad, scale];
        // SAFETY: checked above; targets are below V by the operation's contract.
        unsafe { gpu.launch("classifier", launch, args) }
    }
}
