//! The classifier: two kernels, for rows of which two fit into a multiprocessor's shared memory, and for longer ones.

use xlaunch_pool::DType;

use super::FusedClassifier;
use crate::cuda::{Gpu, KernelFile, Launch, Macro, STATIC_SHARED, VEC, args, expect, source};
use crate::error::Result;

/// Threads of a block: of two that a multiprocessor runs at once, or of one.
const CLASSIFIER_THREADS: u32 = 512;
const CLASSIFIER_WIDE_THREADS: usize = 1024;
/// Vectors of a row that a thread of the latter keeps in registers.
const HELD_BF16: usize = 4;
const HELD_F32: usize = 2;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("classifier/kernel.cu"),
    kernels: &["classifier", "classifier_wide"],
    macros: &[
        Macro::int("CLASSIFIER_THREADS", CLASSIFIER_THREADS as usize),
        Macro::int("CLASSIFIER_WIDE_THREADS", CLASSIFIER_WIDE_THREADS),
        Macro::int("CLASSIFIER_HELD_BF16", HELD_BF16),
        Macro::int("CLASSIFIER_HELD_F32", HELD_F32),
    ],
    dynamic_shared: &["classifier", "classifier_wide"],
};

pub(crate) fn run(gpu: &Gpu, a: FusedClassifier<'_>) -> Result<()> {
    let s = a.shape;
    gpu.expect_act(a.logits, s.rows * s.padded);
    expect(a.targets, DType::I32, s.rows);
    expect(a.losses, DType::F32, s.rows);
    let scale = a.grad_scale.unwrap_or(0.0);
    let (vectors, vector) = (s.padded.div_ceil(VEC), VEC * gpu.activations.size());
    let with_grad = a.grad_scale.is_some();
    let most = gpu.kernels.max_dynamic_shared();
    if vectors * vector <= most / 2 - STATIC_SHARED {
        gpu.variants.selected("classifier", s, "two rows in shared memory", None);
        let launch = Launch { shared: vectors * vector, ..Launch::blocks(s.rows, CLASSIFIER_THREADS) };
        let args = args![a.logits, a.targets, a.losses, s.vocab, s.padded, with_grad, scale];
        // SAFETY: checked above; targets are below V by the operation's contract; a row fits into shared memory.
        return unsafe { gpu.launch("classifier", launch, args) };
    }
    let slots = vectors.div_ceil(CLASSIFIER_WIDE_THREADS).min(most / (CLASSIFIER_WIDE_THREADS * vector));
    let instead_of = Some(("two rows in shared memory", "they do not fit"));
    gpu.variants.selected("classifier", s, "rows through shared memory", instead_of);
    let blocks = s.rows.min(gpu.device.multiprocessors as usize);
    let launch = Launch {
        shared: slots * CLASSIFIER_WIDE_THREADS * vector,
        ..Launch::blocks(blocks, CLASSIFIER_WIDE_THREADS as u32)
    };
    let args = args![a.logits, a.targets, a.losses, s.rows, s.vocab, s.padded, with_grad, scale, slots];
    // SAFETY: as above; there is shared memory for the slots.
    unsafe { gpu.launch("classifier_wide", launch, args) }
}
