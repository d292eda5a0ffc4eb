//! Rotary positions: pairs (i, i + D/2) of each query and key head turn by an angle that grows with the position.

use rayon::prelude::*;

use super::math::simd;
use super::threads::Threads;
use crate::shapes::AttentionShape;

/// Turns all query and key heads of `qkv`, forward (`sign` 1) or back (-1).
pub(super) fn rotate(t: &Threads, s: AttentionShape, qkv: &mut [f32], table: &[f32], sign: f32) {
    let (row, half) = (s.qkv_width(), s.width / 2);
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
