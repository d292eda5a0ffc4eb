//! Gated activations on threads.

use rayon::prelude::*;

use super::{GluBackward, GluForward, GluInputs};
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};
use crate::ops::activation::cpu::{Function, with_function};
use crate::ops::experts::rows::{PADDING_ROWS, rows_end};
use crate::ops::fp8::cpu::write_amax;

/// Rows per task.
const GLU_TASK_ROWS: usize = 32;

pub(crate) fn forward(t: &Threads, args: GluForward<'_>) {
    let (access, rows, ffn) = (Access::new("glu_forward"), args.rows, args.ffn);
    let (h, a) = (access.read(args.h, 2 * rows * ffn), access.write(args.a, rows * ffn));
    let end = rows_end(&access, args.end, rows);
    let (a, past) = a.split_at_mut(end * ffn);
    past.iter_mut().take(PADDING_ROWS * ffn).for_each(|x| *x = 0.0);
    let h = &h[..2 * end * ffn];
    with_function!(args.activation, F => activate::<F>(t, (ffn, args.inputs), h, a));
    args.amax.into_iter().for_each(|amax| write_amax(t, &access, amax, a));
}

/// Applies limit and offset to g and u. Also returns whether each is beyond the limit. NaN stays.
#[inline(always)]
fn bounded(GluInputs { limit, offset }: GluInputs, g: f32, u: f32) -> ([f32; 2], [bool; 2]) {
    let beyond = [g > limit, u.abs() > limit];
    let g = if beyond[0] { limit } else { g };
    let u = if beyond[1] { limit.copysign(u) } else { u };
    ([g, u + offset], beyond)
}

fn activate<F: Function>(t: &Threads, (ffn, inputs): (usize, GluInputs), h: &[f32], a: &mut [f32]) {
    t.run(|| {
        a.par_chunks_mut(GLU_TASK_ROWS * ffn).zip(h.par_chunks(GLU_TASK_ROWS * 2 * ffn)).for_each(
            |(a, h)| {
                simd!({
                    for (a, h) in a.chunks_exact_mut(ffn).zip(h.chunks_exact(2 * ffn)) {
                        let (g, u) = h.split_at(ffn);
                        for ((a, g), u) in a.iter_mut().zip(g).zip(u) {
                            let ([g, u], _) = bounded(inputs, *g, *u);
                            *a = g * F::gate(g) * u;
                        }
                    }
                });
            },
        );
    });
}

pub(crate) fn backward(t: &Threads, args: GluBackward<'_>) {
    let (access, len, ffn) = (Access::new("glu_backward"), args.rows * args.ffn, args.ffn);
    let (h, da) = (access.read(args.h, 2 * len), access.read(args.da, len));
    let dh = access.write(args.dh, 2 * len);
    let end = rows_end(&access, args.end, args.rows);
    let (dh, past) = dh.split_at_mut(2 * end * ffn);
    past.iter_mut().take(2 * PADDING_ROWS * ffn).for_each(|x| *x = 0.0);
    let (h, da) = (&h[..2 * end * ffn], &da[..end * ffn]);
    with_function!(args.activation, F => derive::<F>(t, (ffn, args.inputs), h, da, dh));
    args.amax.into_iter().for_each(|amax| write_amax(t, &access, amax, dh));
}

fn derive<F: Function>(
    t: &Threads,
    (ffn, inputs): (usize, GluInputs),
    h: &[f32],
    da: &[f32],
    dh: &mut [f32],
) {
    t.run(|| {
        dh.par_chunks_mut(GLU_TASK_ROWS * 2 * ffn)
            .zip(h.par_chunks(GLU_TASK_ROWS * 2 * ffn))
            .zip(da.par_chunks(GLU_TASK_ROWS * ffn))
            .for_each(|((dh, h), da)| {
                simd!({
                    let rows =
                        dh.chunks_exact_mut(2 * ffn).zip(h.chunks_exact(2 * ffn)).zip(da.chunks_exact(ffn));
                    for ((dh, h), da) in rows {
                        let (g, u) = h.split_at(ffn);
                        let (dg, du) = dh.split_at_mut(ffn);
                        for i in 0..ffn {
                            let ([g, u], [g_beyond, u_beyond]) = bounded(inputs, g[i], u[i]);
                            du[i] = if u_beyond { 0.0 } else { da[i] * g * F::gate(g) };
                            dg[i] = if g_beyond { 0.0 } else { F::times_derivative(da[i] * u, g) };
                        }
                    }
                });
            });
    });
}
