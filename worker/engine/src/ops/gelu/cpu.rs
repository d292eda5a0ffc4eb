//! GELU on threads, in a pass after the GEMM.

use rayon::prelude::*;

use super::{GELU_CUBE, GELU_SCALE, GeluBackward, GeluForward, GeluLinearBackward, LinearGeluForward};
use crate::cpu::math::{simd, tanh};
use crate::cpu::{Access, Threads};
use crate::ops::{Accumulate, linear, reduce};

/// Elements per task.
const ELEMENTS: usize = 1 << 13;

pub(crate) fn forward(t: &Threads, args: LinearGeluForward<'_>) {
    let (access, s) = (Access::new("linear_gelu_forward"), args.shape);
    let (x, w) = (access.read(args.x, s.rows * s.inputs), access.read(args.w, s.outputs * s.inputs));
    let (h, a) = (access.write(args.h, s.rows * s.outputs), access.write(args.a, s.rows * s.outputs));
    linear::cpu::x_w_transposed(t, s, x, w, Some(access.read(args.bias, s.outputs)), h);
    gelu_of(t, h, a);
}

pub(crate) fn activation(t: &Threads, args: GeluForward<'_>) {
    let access = Access::new("gelu_forward");
    gelu_of(t, access.read(args.h, args.a.len()), access.write(args.a, args.h.len()));
}

fn gelu_of(t: &Threads, h: &[f32], a: &mut [f32]) {
    t.run(|| {
        a.par_chunks_mut(ELEMENTS).zip(h.par_chunks(ELEMENTS)).for_each(|(a, h)| {
            simd!({
                for (a, x) in a.iter_mut().zip(h) {
                    *a = gelu(*x);
                }
            });
        });
    });
}

/// `x (1 + tanh(u)) / 2`.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    let inner = GELU_SCALE * (x + GELU_CUBE * x * x * x);
    0.5 * x * (1.0 + tanh(inner))
}

pub(crate) fn backward(t: &Threads, args: GeluLinearBackward<'_>) {
    let (access, s) = (Access::new("gelu_linear_backward"), args.shape);
    let len = s.rows * s.inputs;
    let (dy, w) = (access.read(args.dy, s.rows * s.outputs), access.read(args.w, s.outputs * s.inputs));
    let (h, dh) = (access.read(args.h, len), access.write(args.dh, len));
    let dbias = access.write(args.dbias, s.inputs);
    linear::cpu::dy_w(t, s, dy, w, dh);
    gradient(t, h, dh, s.inputs, dbias, args.acc);
}

pub(crate) fn activation_backward(t: &Threads, args: GeluBackward<'_>) {
    let (access, len) = (Access::new("gelu_backward"), args.rows * args.cols);
    let (h, dh) = (access.read(args.h, len), access.write(args.dh, len));
    gradient(t, h, dh, args.cols, access.write(args.dbias, args.cols), args.acc);
}

/// Computes the gradient of h from that of gelu(h), in place, and its sum over rows.
fn gradient(t: &Threads, h: &[f32], dh: &mut [f32], cols: usize, dbias: &mut [f32], acc: Accumulate) {
    t.run(|| {
        dh.par_chunks_mut(ELEMENTS).zip(h.par_chunks(ELEMENTS)).for_each(|(d, h)| {
            simd!({
                for (d, x) in d.iter_mut().zip(h) {
                    let tanh = tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x));
                    let slope = GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
                    *d *= 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope;
                }
            });
        });
    });
    reduce::cpu::column_sums(t, dh, cols, dbias, acc == Accumulate::Add);
}
