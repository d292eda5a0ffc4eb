//! The classifier: one block per row, which keeps the row in shared memory if it fits.

use xlaunch_pool::DType;

use super::FusedClassifier;
use crate::cuda::{Gpu, KernelFile, Launch, Macro, VEC, args, expect, source};
use crate::error::Result;

/// Threads of a block. With rows of GPT-2's vocabulary in shared memory, a multiprocessor runs two blocks.
const THREADS: u32 = 512;

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
    let bytes = s.padded.next_multiple_of(VEC) * gpu.activations.size();
    let cached = bytes <= gpu.kernels.max_dynamic_shared();
    let variant = if cached { "rows in shared memory" } else { "rows read three times" };
    let instead_of = (!cached).then_some(("rows in shared memory", "they do not fit"));
    gpu.variants.selected("classifier", s, variant, instead_of);
    let shared = if cached { bytes } else { 0 };
    let launch = Launch { shared, ..Launch::blocks(s.rows, THREADS) };
    let with_grad = a.grad_scale.is_some();
    let args = args![a.logits, a.targets, a.losses, s.vocab, s.padded, with_grad, scale, cached];
    // SAFETY: checked above; targets are below V by the operation's contract; a cached row has the shared memory it
    // needs.
    unsafe { gpu.launch("classifier", launch, args) }
}
