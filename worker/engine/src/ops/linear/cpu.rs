//! Linear layers by the CPU's GEMM.

use super::{LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearShape};
use crate::cpu::gemm::{Mat, parallel_gemm};
use crate::cpu::{Access, Threads};
use crate::ops::Accumulate;

pub(crate) fn forward(t: &Threads, args: LinearForward<'_>) {
    let (a, s) = (Access::new("linear_forward"), args.shape);
    let (x, w) = (a.read(args.x, s.rows * s.inputs), a.read(args.w, s.outputs * s.inputs));
    let bias = args.bias.map(|bias| a.read(bias, s.outputs));
    x_w_transposed(t, s, x, w, bias, a.write(args.y, s.rows * s.outputs));
}

/// `y = x w^T (+ bias)`.
pub(crate) fn x_w_transposed(
    t: &Threads,
    s: LinearShape,
    x: &[f32],
    w: &[f32],
    bias: Option<&[f32]>,
    y: &mut [f32],
) {
    let add = begin_sum(y, s.outputs, bias);
    let (x, w) = (Mat::new(x, s.rows, s.inputs), Mat::new(w, s.outputs, s.inputs));
    parallel_gemm(t, y, x, w.t(), add);
}

/// Sets every row of y to the bias, to which a product is to be added. Returns whether there is a bias.
pub(crate) fn begin_sum(y: &mut [f32], cols: usize, bias: Option<&[f32]>) -> bool {
    if let Some(bias) = bias {
        y.chunks_exact_mut(cols).for_each(|row| row.copy_from_slice(bias));
    }
    bias.is_some()
}

pub(crate) fn backward_input(t: &Threads, args: LinearBackwardInput<'_>) {
    let (a, s) = (Access::new("linear_backward_input"), args.shape);
    let (dy, w) = (a.read(args.dy, s.rows * s.outputs), a.read(args.w, s.outputs * s.inputs));
    dy_w(t, s, dy, w, a.write(args.dx, s.rows * s.inputs));
}

/// `dx = dy w`.
pub(crate) fn dy_w(t: &Threads, s: LinearShape, dy: &[f32], w: &[f32], dx: &mut [f32]) {
    let (dy, w) = (Mat::new(dy, s.rows, s.outputs), Mat::new(w, s.outputs, s.inputs));
    parallel_gemm(t, dx, dy, w, false);
}

pub(crate) fn backward_weight(t: &Threads, args: LinearBackwardWeight<'_>) {
    let (a, s, add) = (Access::new("linear_backward_weight"), args.shape, args.acc == Accumulate::Add);
    let (dy, x) = (a.read(args.dy, s.rows * s.outputs), a.read(args.x, s.rows * s.inputs));
    let dw = a.write(args.dw, s.outputs * s.inputs);
    // dw = dy^T x
    parallel_gemm(t, dw, Mat::new(dy, s.rows, s.outputs).t(), Mat::new(x, s.rows, s.inputs), add);
}
