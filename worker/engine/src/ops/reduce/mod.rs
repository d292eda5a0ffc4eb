//! Sums to one number and sums of columns, in two stages with a fixed order: every run gives the same bits.

pub(crate) mod cpu;
pub(crate) mod cuda;

use super::Accumulate;
use crate::tensor::Slice;

/// `out[0] (+)= scale sum(x)`.
#[derive(Clone, Copy, Debug)]
pub struct Sum<'a> {
    /// (len,) F32.
    pub x: Slice<'a>,
    /// Factor of the sum.
    pub scale: f32,
    /// (1,) F32.
    pub out: Slice<'a>,
    /// Whether `out` is added to.
    pub acc: Accumulate,
}

/// `out (+)= sum of the rows of x`: the gradient of a bias from that of its layer's output.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSum<'a> {
    /// N.
    pub rows: usize,
    /// C.
    pub cols: usize,
    /// (N, C).
    pub x: Slice<'a>,
    /// (C,) gradient.
    pub out: Slice<'a>,
    /// Whether `out` is added to.
    pub acc: Accumulate,
}

/// `out[0] = sum(x^2)`.
#[derive(Clone, Copy, Debug)]
pub struct SquaredNorm<'a> {
    /// (len,) F32 or Bf16.
    pub x: Slice<'a>,
    /// (1,) F32.
    pub out: Slice<'a>,
}
