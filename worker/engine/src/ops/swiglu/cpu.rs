//! SwiGLU on threads.

use rayon::prelude::*;

use super::{SwigluBackward, SwigluForward};
use crate::cpu::math::{sigmoid, simd};
use crate::cpu::{Access, Threads};

/// Rows per task.
const SWIGLU_TASK_ROWS: usize = 32;

pub(crate) fn forward(t: &Threads, args: SwigluForward<'_>) {
    let (access, rows, ffn) = (Access::new("swiglu_forward"), args.rows, args.ffn);
    let (h, a) = (access.read(args.h, 2 * rows * ffn), access.write(args.a, rows * ffn));
    t.run(|| {
        a.par_chunks_mut(SWIGLU_TASK_ROWS * ffn).zip(h.par_chunks(SWIGLU_TASK_ROWS * 2 * ffn)).for_each(
            |(a, h)| {
                simd!({
                    for (a, h) in a.chunks_exact_mut(ffn).zip(h.chunks_exact(2 * ffn)) {
                        let (g, u) = h.split_at(ffn);
                        for ((a, g), u) in a.iter_mut().zip(g).zip(u) {
                            *a = g * sigmoid(*g) * u;
                        }
                    }
                });
            },
        );
    });
}

pub(crate) fn backward(t: &Threads, args: SwigluBackward<'_>) {
    let (access, len, ffn) = (Access::new("swiglu_backward"), args.rows * args.ffn, args.ffn);
    let (h, da) = (access.read(args.h, 2 * len), access.read(args.da, len));
    let dh = access.write(args.dh, 2 * len);
    t.run(|| {
        dh.par_chunks_mut(SWIGLU_TASK_ROWS * 2 * ffn)
            .zip(h.par_chunks(SWIGLU_TASK_ROWS * 2 * ffn))
            .zip(da.par_chunks(SWIGLU_TASK_ROWS * ffn))
            .for_each(|((dh, h), da)| {
                simd!({
                    let rows =
                        dh.chunks_exact_mut(2 * ffn).zip(h.chunks_exact(2 * ffn)).zip(da.chunks_exact(ffn));
                    for ((dh, h), da) in rows {
                        let (g, u) = h.split_at(ffn);
                        let (dg, du) = dh.split_at_mut(ffn);
                        for i in 0..ffn {
                            let gate = sigmoid(g[i]);
                            du[i] = da[i] * g[i] * gate;
                            dg[i] = da[i] * u[i] * gate * (1.0 + g[i] * (1.0 - gate));
                        }
                    }
                });
            });
    });
}
