//! The classifier: one block per row.

use xlaunch_pool::DType;

use super::FusedClassifier;
use crate::cuda::{Gpu, KernelFile, Launch, Macro, args, expect, source};
use crate::error::Result;

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

pub(crate) fn run(gpu: &Gpu, a: FusedClassifier<'_>) -> Result<()> {
    let s = a.shape;
    gpu.expect_act(a.logits, s.rows * s.padded);
    expect(a.targets, DType::I32, s.rows);
    expect(a.losses, DType::F32, s.rows);
    let is_long = s.padded * gpu.activations.size() > LONG_ROW;
    let launch = Launch::blocks(s.rows, if is_long { CLASSIFIER_THREADS } else { CLASSIFIER_THREADS / 2 });
    let (with_grad, scale) = (a.grad_scale.is_some(), a.grad_scale.unwrap_or(0.0));
    let args = args![a.logits, a.targets, a.losses, s.vocab, s.padded, with_grad, scale];
    // SAFETY: checked above; targets are below V by the operation's contract.
    unsafe { gpu.launch("classifier", launch, args) }
}
