//! Rotary position embedding (Su et al., 2021): the pair (i, i + D/2) of each query and key head is rotated by an angle
//! that grows with the position: `x' = x cos - y sin`, `y' = y cos + x sin`. Backward is the rotation in the opposite
//! direction.
//!
//! The table F32 (T, D) holds, per position, the cosines of the D/2 angles, then their sines. The rotation is part of
//! attention, not an operation of its own.

use rayon::prelude::*;

use super::documents::Bounds;
use super::{AttentionShape, Documents};
use crate::cpu::Threads;
use crate::cpu::math::simd;
use crate::cuda::{BLOCK_THREADS, Gpu, KernelFile, Launch, VEC, args, source};
use crate::error::Result;
use crate::tensor::Slice;

pub(crate) const KERNELS: KernelFile =
    KernelFile { source: source!("rope/kernel.cu"), kernels: &["rope"], macros: &[], dynamic_shared: &[] };

/// Direction of the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rotation {
    Forward,
    Back,
}

impl Rotation {
    /// Returns the factor of the sines.
    pub(crate) fn sign(self) -> f32 {
        match self {
            Self::Forward => 1.0,
            Self::Back => -1.0,
        }
    }
}

/// Rotates all query and key heads of `qkv` (B, T, (H + 2 Hkv) D) in place; `table` (T, D). Positions count from the
/// first token of each document.
pub(crate) fn cpu(
    t: &Threads,
    s: AttentionShape,
    qkv: &mut [f32],
    table: &[f32],
    bounds: Bounds<'_>,
    rotation: Rotation,
) {
    let (row, half, sign) = (s.qkv_width(), s.width / 2, rotation.sign());
    let rotated = (s.heads + s.kv_heads) * s.width;
    t.run(|| {
        qkv.par_chunks_mut(s.seq * row).enumerate().for_each(|(number, sequence)| {
            simd!({
                for (at, qkv) in sequence.chunks_exact_mut(row).enumerate() {
                    let position = at - bounds.first(number, at);
                    let (cos, sin) = table[position * s.width..][..s.width].split_at(half);
                    for head in qkv[..rotated].chunks_exact_mut(s.width) {
                        let (a, b) = head.split_at_mut(half);
                        for i in 0..half {
                            let (x, y, sin) = (a[i], b[i], sign * sin[i]);
                            a[i] = x * cos[i] - y * sin;
                            b[i] = y * cos[i] + x * sin;
                        }
                    }
                }
            });
        });
    });
}

/// Same as [`cpu`], on a GPU. The caller has checked both operands.
pub(crate) fn cuda(
    gpu: &Gpu,
    s: AttentionShape,
    qkv: Slice<'_>,
    table: Slice<'_>,
    documents: Option<Documents<'_>>,
    rotation: Rotation,
) -> Result<()> {
    let rows = s.batch * s.seq;
    let rotated = s.heads + s.kv_heads;
    let threads = rows * rotated * (s.width / 2).div_ceil(VEC);
    // The kernel divides in 32 bits.
    assert!(u32::try_from(threads).is_ok(), "{s:?} needs more than 2^32 threads");
    let first = documents.map(|documents| documents.first);
    let args = args![qkv, table, first, rows, s.seq, rotated, s.width, s.qkv_width(), rotation.sign()];
    // SAFETY: the caller has checked the operands; there is a thread for every eight pairs.
    unsafe { gpu.launch("rope", Launch::threads(threads, BLOCK_THREADS), args) }
}
