//! GELU, tanh form (Hendrycks and Gimpel, 2016), fused with the linear layers before and after it.
//!
//! `gelu(x) = x (1 + tanh(u)) / 2` with `u = GELU_SCALE (x + GELU_CUBE x^3)`;
//! `gelu'(x) = (1 + tanh(u)) / 2 + x (1 - tanh(u)^2) / 2 du/dx` with `du/dx = GELU_SCALE (1 + 3 GELU_CUBE x^2)`.

pub(crate) mod cpu;
pub(crate) mod cuda;

use super::{Accumulate, Cuda, LinearShape, Op, reduce};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// sqrt(2 / pi).
pub(crate) const GELU_SCALE: f32 = 0.797_884_6;
pub(crate) const GELU_CUBE: f32 = 0.044_715;

/// `h = x w^T + bias`, `a = gelu(h)`.
#[derive(Clone, Copy, Debug)]
pub struct LinearGeluForward<'a> {
    /// Sizes.
    pub shape: LinearShape,
    /// (N, I).
    pub x: Slice<'a>,
    /// (O, I).
    pub w: Slice<'a>,
    /// (O,).
    pub bias: Slice<'a>,
    /// (N, O), kept for backward.
    pub h: Slice<'a>,
    /// (N, O).
    pub a: Slice<'a>,
}

impl Op for LinearGeluForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.gelu.forward(gpu, self)
    }
}

/// `a = gelu(h)`, for an `a` that [`LinearGeluForward`] computed and that was not kept.
#[derive(Clone, Copy, Debug)]
pub struct GeluForward<'a> {
    /// (L,) output of [`LinearGeluForward`].
    pub h: Slice<'a>,
    /// (L,).
    pub a: Slice<'a>,
}

impl Op for GeluForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::activation(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::activation(gpu, self)
    }
}

/// Backward of `y = gelu(h) w^T` to h: `dh = gelu'(h) (dy w)`, and `dbias = sum of dh's rows`, the gradient of the bias
/// that was added in h.
#[derive(Clone, Copy, Debug)]
pub struct GeluLinearBackward<'a> {
    /// Sizes of the layer after GELU.
    pub shape: LinearShape,
    /// (N, O).
    pub dy: Slice<'a>,
    /// (O, I).
    pub w: Slice<'a>,
    /// (N, I).
    pub h: Slice<'a>,
    /// (N, I).
    pub dh: Slice<'a>,
    /// (I,) gradient.
    pub dbias: Slice<'a>,
    /// Applies to `dbias`.
    pub acc: Accumulate,
}

impl Op for GeluLinearBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.gelu.backward(gpu, self)
    }

    fn scratch(&self) -> usize {
        reduce::column_sum_scratch(self.shape.inputs)
    }
}

/// The gradient of h from that of `a = gelu(h)`: `dh = gelu'(h) da`, `dbias = sum of dh's rows`.
#[derive(Clone, Copy, Debug)]
pub struct GeluBackward<'a> {
    /// N.
    pub rows: usize,
    /// F.
    pub cols: usize,
    /// (N, F).
    pub h: Slice<'a>,
    /// (N, F): da before, dh afterwards.
    pub dh: Slice<'a>,
    /// (F,) gradient of the bias that was added in h.
    pub dbias: Slice<'a>,
    /// Applies to `dbias`.
    pub acc: Accumulate,
}

impl Op for GeluBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::activation_backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::activation_backward(gpu, self)
    }

    fn scratch(&self) -> usize {
        reduce::column_sum_scratch(self.cols)
    }
}
