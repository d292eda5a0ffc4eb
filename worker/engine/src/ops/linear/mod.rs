//! Linear layers: `y = x w^T (+ bias)`.
//!
//! Backward: `dx = dy w`, `dw = dy^T x`. The gradient of the bias is a [`ColumnSum`](super::ColumnSum) of dy.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod transposed;
pub(crate) mod weight_grads;

use super::Accumulate;
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
    /// Whether the gradient is added.
    pub acc: Accumulate,
}
