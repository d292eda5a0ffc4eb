//! The classifier: blocks keep as much of a row in shared memory as fits.

use xlaunch_pool::DType;

use super::FusedClassifier;
use crate::cuda::{Gpu, KernelFile, Launch, Macro, VEC, args, expect, source};
use crate::error::Result;

/// Threads of a block that has a multiprocessor to itself; half of them where it shares one.
const THREADS: u32 = 1024;

/// Bytes of shared memory that a block uses beyond its dynamic part, at most.
const BLOCK_OVERHEAD: usize = 2048;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("classifier/kernel.cu"),
    kernels: &["classifier"],
    macros: &[Macro::int("CLASSIFIER_THREADS", THREADS as usize)],
    dynamic_shared: &["classifier"],
};

pub(crate) fn run(gpu: &Gpu, a: FusedClassifier<'_>) -> Result<()> {
    let s = a.shape;
    gpu.expect_act(a.logits, s.rows * s.padded);
    expect(a.targets, DType::I32, s.rows);
    expect(a.losses, DType::F32, s.rows);
    let scale = a.grad_scale.unwrap_or(0.0);
    let vector = VEC * gpu.activations.size();
    let vectors = s.padded.div_ceil(VEC);
    let most = gpu.kernels.max_dynamic_shared();
    let kept = vectors.min(most / vector);
    let variant = if kept == vectors { "rows in shared memory" } else { "rows partly in shared memory" };
    gpu.variants.selected("classifier", s, variant, None);
    let per_multiprocessor = if kept * vector <= most / 2 - BLOCK_OVERHEAD { 2 } else { 1 };
    let blocks = s.rows.min(per_multiprocessor * gpu.device.multiprocessors as usize);
    let launch =
        Launch { shared: kept * vector, ..Launch::blocks(blocks, THREADS / per_multiprocessor as u32) };
    let with_grad = a.grad_scale.is_some();
    let args = args![a.logits, a.targets, a.losses, s.rows, s.vocab, s.padded, with_grad, scale, kept * VEC];
    // SAFETY: checked above; targets are below V by the operation's contract; there is shared memory for the logits
    // that are kept.
    unsafe { gpu.launch("classifier", launch, args) }
}
