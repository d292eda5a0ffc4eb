//! Rotation of query and key heads in a separate pass.

use super::Rotation;
use crate::cuda::{BLOCK_THREADS, Gpu, KernelFile, Launch, VEC, args, source};
use crate::error::Result;
use crate::ops::AttentionShape;
use crate::tensor::Slice;

pub(crate) const KERNELS: KernelFile =
    KernelFile { source: source!("rope/kernel.cu"), kernels: &["rope"], macros: &[], dynamic_shared: &[] };

/// Rotates all query and key heads of `qkv` (B, T, (H + 2 Hkv) D) in place; `table` (T, D). The caller has checked
/// both.
pub(crate) fn rotate(
    gpu: &Gpu,
    s: AttentionShape,
    qkv: Slice<'_>,
    table: Slice<'_>,
    rotation: Rotation,
) -> Result<()> {
    let rows = s.batch * s.seq;
    let rotated = s.heads + s.kv_heads;
    let threads = rows * rotated * (s.width / 2).div_ceil(VEC);
    // The kernel divides in 32 bits.
    assert!(u32::try_from(threads).is_ok(), "{s:?} needs more than 2^32 threads");
    let args = args![qkv, table, rows, s.seq, rotated, s.width, s.qkv_width(), rotation.sign()];
    // SAFETY: the caller has checked the operands; there is a thread for every eight pairs.
    unsafe { gpu.launch("rope", Launch::threads(threads, BLOCK_THREADS), args) }
}
