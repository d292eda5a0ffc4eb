//! Rotation of query and key heads on threads.

use rayon::prelude::*;

use super::Rotation;
use crate::cpu::Threads;
use crate::cpu::math::simd;
use crate::ops::AttentionShape;

/// Rotates all query and key heads of `qkv` (B, T, (H + 2 Hkv) D) in place; `table` (T, D).
pub(crate) fn rotate(t: &Threads, s: AttentionShape, qkv: &mut [f32], table: &[f32], rotation: Rotation) {
    let (row, half, sign) = (s.qkv_width(), s.width / 2, rotation.sign());
    let rotated = (s.heads + s.kv_heads) * s.width;
    t.run(|| {
        qkv.par_chunks_mut(s.seq * row).for_each(|sequence| {
            simd!({
                for (qkv, table) in sequence.chunks_exact_mut(row).zip(table.chunks_exact(s.width)) {
                    let (cos, sin) = table.split_at(half);
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
