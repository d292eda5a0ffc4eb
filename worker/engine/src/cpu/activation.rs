//! GELU (tanh form) and the gated SiLU of llama, element by element.

use rayon::prelude::*;

use super::math::{sigmoid, simd, tanh};
use super::threads::Threads;

/// sqrt(2 / pi).
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;
/// Elements, or rows, per task.
const ELEMENTS: usize = 1 << 13;
const ROWS: usize = 32;

pub(super) fn gelu_fwd(t: &Threads, h: &[f32], a: &mut [f32]) {
    t.run(|| {
        a.par_chunks_mut(ELEMENTS).zip(h.par_chunks(ELEMENTS)).for_each(|(a, h)| {
            simd!({
                for (a, x) in a.iter_mut().zip(h) {
                    let inner = GELU_SCALE * (x + GELU_CUBE * x * x * x);
                    *a = 0.5 * x * (1.0 + tanh(inner));
                }
            });
        });
    });
}

/// In `d`, the gradient of a becomes that of h.
pub(super) fn gelu_bwd(t: &Threads, h: &[f32], d: &mut [f32]) {
    t.run(|| {
        d.par_chunks_mut(ELEMENTS).zip(h.par_chunks(ELEMENTS)).for_each(|(d, h)| {
            simd!({
                for (d, x) in d.iter_mut().zip(h) {
                    let tanh = tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x));
                    let slope = GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
                    *d *= 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope;
                }
            });
        });
    });
}

pub(super) fn swiglu_fwd(t: &Threads, ffn: usize, h: &[f32], a: &mut [f32]) {
    t.run(|| {
        a.par_chunks_mut(ROWS * ffn).zip(h.par_chunks(ROWS * 2 * ffn)).for_each(|(a, h)| {
            simd!({
                for (a, h) in a.chunks_exact_mut(ffn).zip(h.chunks_exact(2 * ffn)) {
                    let (g, u) = h.split_at(ffn);
                    for ((a, g), u) in a.iter_mut().zip(g).zip(u) {
                        *a = g * sigmoid(*g) * u;
                    }
                }
            });
        });
    });
}

pub(super) fn swiglu_bwd(t: &Threads, ffn: usize, h: &[f32], da: &[f32], dh: &mut [f32]) {
    t.run(|| {
        dh.par_chunks_mut(ROWS * 2 * ffn)
            .zip(h.par_chunks(ROWS * 2 * ffn))
            .zip(da.par_chunks(ROWS * ffn))
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
