//! Linear layers by cuBLASLt, with the bias in the epilogue of the GEMM.
//!
//! cuBLASLt is column-major: it sees a row-major (n, k) array as a k x n matrix. So `y = x w^T` becomes `y^T = w x^T`
//! with m = O, n = N, k = I; the two gradients are transformed likewise.

use super::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use crate::cuda::gemm::{Epilogue, GemmCall, plain, transposed};
use crate::cuda::{Gpu, expect_grad};
use crate::error::Result;
use crate::ops::Accumulate;

pub(crate) fn forward(gpu: &Gpu, args: LinearForward<'_>) -> Result<()> {
    let LinearForward { shape: s, x, w, bias, y } = args;
    gpu.expect_act(x, s.rows * s.inputs);
    gpu.expect_act(w, s.outputs * s.inputs);
    gpu.expect_optional_act(bias, s.outputs);
    gpu.expect_act(y, s.rows * s.outputs);
    let call = GemmCall {
        m: s.outputs,
        n: s.rows,
        k: s.inputs,
        a: transposed(w),
        b: plain(x),
        epilogue: bias.map_or(Epilogue::None, Epilogue::Bias),
        c: y,
        accumulate: false,
    };
    // SAFETY: checked above; y overlaps no input by the operation's contract.
    unsafe { gpu.gemm.run(&call) }
}

pub(crate) fn backward_input(gpu: &Gpu, args: LinearBackwardInput<'_>) -> Result<()> {
    let LinearBackwardInput { shape: s, dy, w, dx } = args;
    gpu.expect_act(dy, s.rows * s.outputs);
    gpu.expect_act(w, s.outputs * s.inputs);
    gpu.expect_act(dx, s.rows * s.inputs);
    let call = GemmCall {
        m: s.inputs,
        n: s.rows,
        k: s.outputs,
        a: plain(w),
        b: plain(dy),
        epilogue: Epilogue::None,
        c: dx,
        accumulate: false,
    };
    // SAFETY: checked above; dx overlaps no input by the operation's contract.
    unsafe { gpu.gemm.run(&call) }
}

/// Panics unless the operands have the types and lengths of the operation.
pub(super) fn check_backward_weight(gpu: &Gpu, args: &LinearBackwardWeight<'_>) {
    let LinearBackwardWeight { shape: s, dy, x, dw, .. } = *args;
    gpu.expect_act(dy, s.rows * s.outputs);
    gpu.expect_act(x, s.rows * s.inputs);
    expect_grad(dw, s.outputs * s.inputs);
}

/// Computes `dw`. The caller has checked the operands.
pub(super) fn weight_gradient(gpu: &Gpu, args: LinearBackwardWeight<'_>) -> Result<()> {
    let LinearBackwardWeight { shape: s, dy, x, dw, acc, .. } = args;
    let call = GemmCall {
        m: s.inputs,
        n: s.outputs,
        k: s.rows,
        a: plain(x),
        b: transposed(dy),
        epilogue: Epilogue::None,
        c: dw,
        accumulate: acc == Accumulate::Add,
    };
    // SAFETY: the caller has checked the operands; dw overlaps no input by the operation's contract.
    unsafe { gpu.gemm.run(&call) }
}
