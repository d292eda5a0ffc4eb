//! Linear layers of experts: `y[i] = x[i] w[e]^T` for the rows i of expert e, which are between two offsets.
//!
//! Backward: `dx[i] = dy[i] w[e]`, `dw[e] = sum_i dy[i]^T x[i]`. The offsets are in device memory, so a launch has
//! blocks for the largest number of tiles that any offsets can lead to; each block looks up its expert.

mod cpu;
pub(crate) mod cuda;
pub(crate) mod hopper;

use crate::cpu::Threads;
use crate::error::Result;
use crate::ops::{Accumulate, Cuda, Op};
use crate::tensor::Slice;

/// `y (M, O) = x (M, I) w (E, O, I)^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedShape {
    /// M.
    pub rows: usize,
    /// E.
    pub experts: usize,
    /// I.
    pub inputs: usize,
    /// O.
    pub outputs: usize,
}

/// `y[i] = x[i] w[e]^T`. In decoding, a row of y has the same bits regardless of the other rows.
#[derive(Clone, Copy, Debug)]
pub struct GroupedForward<'a> {
    /// Sizes.
    pub shape: GroupedShape,
    /// (E + 1,) I32: see [`SortByExpert`](crate::SortByExpert).
    pub offsets: Slice<'a>,
    /// (M, I).
    pub x: Slice<'a>,
    /// (E, O, I).
    pub w: Slice<'a>,
    /// (M, O).
    pub y: Slice<'a>,
}

/// `dx[i] = dy[i] w[e]`.
#[derive(Clone, Copy, Debug)]
pub struct GroupedBackwardInput<'a> {
    /// Sizes.
    pub shape: GroupedShape,
    /// (E + 1,) I32.
    pub offsets: Slice<'a>,
    /// (M, O).
    pub dy: Slice<'a>,
    /// (E, O, I).
    pub w: Slice<'a>,
    /// (M, I).
    pub dx: Slice<'a>,
}

/// `dw[e] = sum_i dy[i]^T x[i]`; 0 for an expert without rows.
#[derive(Clone, Copy, Debug)]
pub struct GroupedBackwardWeight<'a> {
    /// Sizes.
    pub shape: GroupedShape,
    /// (E + 1,) I32.
    pub offsets: Slice<'a>,
    /// (M, O).
    pub dy: Slice<'a>,
    /// (M, I).
    pub x: Slice<'a>,
    /// (E, O, I) gradient.
    pub dw: Slice<'a>,
    /// Selects whether the gradient is added.
    pub acc: Accumulate,
}

impl Op for GroupedForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.grouped.forward(gpu, self)
    }
}

impl Op for GroupedBackwardInput<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward_input(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.grouped.backward_input(gpu, self)
    }
}

impl Op for GroupedBackwardWeight<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward_weight(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.grouped.backward_weight(gpu, self)
    }
}
