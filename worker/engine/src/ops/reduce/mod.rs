//! Sums to one number and sums of columns, in two stages with a fixed order: every run gives the same bits.

pub(crate) mod cpu;
pub(crate) mod cuda;

use xlaunch_pool::DType;

use super::{Accumulate, Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Maximum number of blocks of a kernel in which each block writes one row of partial sums; two per multiprocessor of
/// an H200.
pub(super) const MAX_SUM_ROWS: usize = 264;

/// Returns the bytes of partial sums of `cols` columns.
pub(super) fn column_sum_scratch(cols: usize) -> usize {
    DType::F32.size() * MAX_SUM_ROWS * cols
}

/// A factor. Work that is captured and replayed reads those that change from step to step from memory.
#[derive(Clone, Copy, Debug)]
pub enum Scale<'a> {
    /// The same in every replay.
    Constant(f32),
    /// (1,) F32, read when the operation runs.
    Memory(Slice<'a>),
}

/// `out[0] (+)= scale sum(x)`.
#[derive(Clone, Copy, Debug)]
pub struct Sum<'a> {
    /// (len,) F32.
    pub x: Slice<'a>,
    /// Factor of the sum.
    pub scale: Scale<'a>,
    /// (1,) F32.
    pub out: Slice<'a>,
    /// Selects whether `out` is added to.
    pub acc: Accumulate,
}

impl Op for Sum<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::sum(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::sum(gpu, self)
    }
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
    /// Selects whether `out` is added to.
    pub acc: Accumulate,
}

impl Op for ColumnSum<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::column_sum(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::column_sum(gpu, self)
    }

    fn scratch(&self) -> usize {
        column_sum_scratch(self.cols)
    }
}

/// `out[0] = sum(x^2)`.
#[derive(Clone, Copy, Debug)]
pub struct SquaredNorm<'a> {
    /// (len,) F32 or Bf16.
    pub x: Slice<'a>,
    /// (1,) F32.
    pub out: Slice<'a>,
}

impl Op for SquaredNorm<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::squared_norm(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::squared_norm(gpu, self)
    }
}
