//! Launches of the norm of queries and keys.

use xlaunch_pool::DType;

use super::{QkNorm, QkNormBackward, QkNormForward, QkNorms};
use crate::cuda::{BLOCK_THREADS, Gpu, KernelFile, Launch, Macro, VEC, args, expect, expect_grad, source};
use crate::error::{EngineError, Result};
use crate::ops::{AttentionShape, reduce};
use crate::tensor::{Slice, Tensor};

/// Blocks of the kernels for heads that a multiprocessor runs at once, which limits the registers per thread.
const HEAD_BLOCKS: usize = 2;
/// Maximum number of threads per block of the kernels for whole rows, and of all blocks that a multiprocessor runs at
/// once, in bf16; half of it in fp32, in which copied items take twice the registers.
const FULL_THREADS: usize = 768;
const FULL_BWD_THREADS: usize = 512;
/// Shared memory for the next items of a thread in an array, two of 16 elements in bf16 and one in fp32 (`Ahead`).
const AHEAD_BYTES: usize = 2 * VEC * 4;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("qk_norm/kernel.cu"),
    kernels: &["qk_norm_head_fwd", "qk_norm_head_bwd", "qk_norm_full_fwd", "qk_norm_full_bwd"],
    macros: &[
        Macro::int("QK_NORM_HEAD_BLOCKS", HEAD_BLOCKS),
        Macro::int("QK_NORM_FULL_THREADS", FULL_THREADS),
        Macro::int("QK_NORM_FULL_BWD_THREADS", FULL_BWD_THREADS),
    ],
    dynamic_shared: &["qk_norm_full_fwd", "qk_norm_full_bwd"],
};

pub(crate) fn forward(gpu: &Gpu, a: QkNormForward<'_>) -> Result<()> {
    let QkNorms { shape: s, kind, eps, offset, q_gamma, k_gamma, rope, documents } = a.norms;
    let first = documents.map(|documents| documents.first);
    check(gpu, a.norms, [a.qkv, a.out]);
    let rows = s.batch * s.seq;
    let (name, launch) = match kind {
        QkNorm::Head => ("qk_norm_head_fwd", head_launch(gpu, s, s.heads + 2 * s.kv_heads, 1)?),
        QkNorm::Full => ("qk_norm_full_fwd", full_launch(gpu, s, s.heads + 2 * s.kv_heads, FULL_THREADS, 1)),
    };
    let (heads, kv_heads, width) = (s.heads, s.kv_heads, s.width);
    let args =
        args![a.qkv, q_gamma, k_gamma, rope, first, a.out, rows, s.seq, heads, kv_heads, width, eps, offset];
    // SAFETY: checked above.
    unsafe { gpu.launch(name, launch, args) }
}

pub(crate) fn backward(gpu: &Gpu, a: QkNormBackward<'_>) -> Result<()> {
    let QkNorms { shape: s, kind, eps, offset, q_gamma, k_gamma, rope, documents } = a.norms;
    let first = documents.map(|documents| documents.first);
    check(gpu, a.norms, [a.qkv, a.dqkv]);
    let widths = kind.gammas(s);
    let outputs = [a.dq_gamma, a.dk_gamma];
    outputs.iter().zip(widths).for_each(|(grad, len)| expect_grad(*grad, len));
    let rows = s.batch * s.seq;
    let (name, launch) = match kind {
        QkNorm::Head => ("qk_norm_head_bwd", head_launch(gpu, s, s.heads, 2)?),
        QkNorm::Full => ("qk_norm_full_bwd", full_launch(gpu, s, s.heads + s.kv_heads, FULL_BWD_THREADS, 2)),
    };
    let blocks = launch.grid.0;
    let [q_partials, k_partials] = widths.map(|cols| gpu.alloc(DType::F32, blocks * cols));
    let partials = [q_partials?, k_partials?];
    let [dq_gammas, dk_gammas] = partials.each_ref().map(Tensor::all);
    let (heads, kv_heads, width) = (s.heads, s.kv_heads, s.width);
    let args = args![
        a.qkv, q_gamma, k_gamma, rope, first, a.dqkv, dq_gammas, dk_gammas, rows, s.seq, heads, kv_heads,
        width, eps, offset
    ];
    // SAFETY: checked above; there is one row of partial sums of each gamma per block.
    unsafe { gpu.launch(name, launch, args) }?;
    for (sums, out) in partials.iter().zip(outputs) {
        reduce::cuda::column_sum_final(gpu, sums, out.len(), &[out], a.acc)?;
    }
    Ok(())
}

/// Checks the operands that forward and backward have in common.
fn check(gpu: &Gpu, norms: QkNorms<'_>, arrays: [Slice<'_>; 2]) {
    let QkNorms { shape: s, kind, q_gamma, k_gamma, rope, documents, .. } = norms;
    let rows = s.batch * s.seq;
    arrays.into_iter().for_each(|x| gpu.expect_act(x, rows * s.qkv_width()));
    [q_gamma, k_gamma].into_iter().zip(kind.gammas(s)).for_each(|(gamma, len)| gpu.expect_act(gamma, len));
    if let Some(table) = rope {
        expect(table, DType::F32, s.seq * s.width);
    }
    if let Some(documents) = documents {
        documents.check(rows);
    }
}

/// Number of threads that work on a head with 16 elements each.
fn head_items(s: AttentionShape) -> usize {
    (s.width / 2).div_ceil(VEC)
}

/// Launches blocks of groups of lanes for rows of this number of heads, as many as run at once. Each thread copies its
/// next items of `arrays` arrays to shared memory.
fn head_launch(gpu: &Gpu, s: AttentionShape, heads: usize, arrays: usize) -> Result<Launch> {
    let lanes = head_items(s).next_power_of_two();
    let (warp, groups) = (gpu.device.warp as usize, BLOCK_THREADS as usize / lanes.max(1));
    if lanes > warp {
        let reason = format!("heads of {} elements are wider than {}", s.width, 2 * VEC * warp);
        return Err(EngineError::Cuda {
            what: "failed to launch the norm of queries and keys".into(),
            reason,
        });
    }
    // The kernels count heads in 32 bits.
    let all = s.batch * s.seq * (s.heads + 2 * s.kv_heads);
    assert!(i32::try_from(all).is_ok(), "{s:?} has more than 2^31 heads");
    let blocks =
        (s.batch * s.seq * heads).div_ceil(groups).min(HEAD_BLOCKS * gpu.device.multiprocessors as usize);
    let shared = arrays * lanes * groups * AHEAD_BYTES;
    Ok(Launch { shared, ..Launch::rows(blocks, (lanes as u32, groups as u32)) })
}

/// Launches blocks of at most `most` threads for rows of this number of heads, as many as run at once. Each thread
/// copies its next items of `arrays` arrays to shared memory.
fn full_launch(gpu: &Gpu, s: AttentionShape, heads: usize, most: usize, arrays: usize) -> Launch {
    let most = most * 2 / gpu.activations.size();
    let threads = (heads * head_items(s)).next_multiple_of(gpu.device.warp as usize).min(most);
    let blocks = (s.batch * s.seq).min(most / threads * gpu.device.multiprocessors as usize);
    Launch { shared: arrays * threads * AHEAD_BYTES, ..Launch::blocks(blocks, threads as u32) }
}
