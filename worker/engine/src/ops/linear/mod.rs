//! Linear layers: `y = x w^T (+ bias)`.
//!
//! Backward: `dx = dy w`, `dw = dy^T x`. The gradient of the bias is a [`ColumnSum`](super::ColumnSum) of dy.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod transposed;
pub(crate) mod weight_grads;

use super::{Accumulate, Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// `y (N, O) = x (N, I) w (O, I)^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearShape {
    /// N.
    pub rows: usize,
    /// I.
    pub inputs: usize,
    /// O.
    pub outputs: usize,
}

/// `y = x w^T (+ bias)`.
#[derive(Clone, Copy, Debug)]
pub struct LinearForward<'a> {
    /// Sizes.
    pub shape: LinearShape,
    /// (N, I).
    pub x: Slice<'a>,
    /// (O, I).
    pub w: Slice<'a>,
    /// (O,).
    pub bias: Option<Slice<'a>>,
    /// (N, O).
    pub y: Slice<'a>,
}

impl Op for LinearForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::forward(gpu, self)
    }
}

/// `dx = dy w`.
#[derive(Clone, Copy, Debug)]
pub struct LinearBackwardInput<'a> {
    /// Sizes.
    pub shape: LinearShape,
    /// (N, O).
    pub dy: Slice<'a>,
    /// (O, I).
    pub w: Slice<'a>,
    /// (N, I).
    pub dx: Slice<'a>,
}

impl Op for LinearBackwardInput<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward_input(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::backward_input(gpu, self)
    }
}

/// `dw = dy^T x`.
#[derive(Clone, Copy, Debug)]
pub struct LinearBackwardWeight<'a> {
    /// Sizes.
    pub shape: LinearShape,
    /// (N, O).
    pub dy: Slice<'a>,
    /// (N, I).
    pub x: Slice<'a>,
    /// (O, I) gradient.
    pub dw: Slice<'a>,
    /// Selects whether the gradient is added.
    pub acc: Accumulate,
}

impl Op for LinearBackwardWeight<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward_weight(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.weight_grads.one(gpu, self)
    }
}

/// Gradients of the weights of two layers.
impl Op for [LinearBackwardWeight<'_>; 2] {
    fn cpu(self, threads: &Threads) {
        self.into_iter().for_each(|layer| layer.cpu(threads));
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.weight_grads.two(gpu, self)
    }
}
