//! LayerNorm (Ba et al., 2016) and RMSNorm (Zhang and Sennrich, 2019) over rows of C elements, fused with the residual
//! addition before or after them.
//!
//! With `xh = (x - mean) r`, `r = 1 / sqrt(var + eps)` and `w = offset + gamma`: `y = xh w + beta`. Backward, with `g =
//! dy w`: `dx = r (g - mean(g) - xh mean(g xh))`, `dgamma = sum dy xh`, `dbeta = sum dy`. RMSNorm has the mean square
//! in place of var, and neither mean, beta nor `mean(g)`.

pub(crate) mod cpu;
pub(crate) mod cuda;

use xlaunch_pool::DType;

use super::reduce::MAX_SUM_ROWS;
use super::{Accumulate, Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `y = (x - mean) / sqrt(var + eps) * (offset + gamma) + beta`; statistics: N means, then N reciprocal deviations.
    Layer,
    /// `y = x / sqrt(mean(x^2) + eps) * (offset + gamma)`; statistics: N reciprocal root mean squares.
    Rms,
}

/// Normalisation of N rows.
#[derive(Clone, Copy, Debug)]
pub struct NormShape {
    /// N.
    pub rows: usize,
    /// C.
    pub cols: usize,
    /// Kind of normalisation.
    pub kind: NormKind,
    /// Added to the variance or mean square.
    pub eps: f32,
    /// Added to gamma: 1 for models that store gamma minus 1, such as Gemma, otherwise 0.
    pub offset: f32,
}

impl NormShape {
    /// Returns the number of F32 statistics kept for backward.
    pub fn stats(&self) -> usize {
        match self.kind {
            NormKind::Layer => 2 * self.rows,
            NormKind::Rms => self.rows,
        }
    }
}

/// `y = norm(x)`, or the norm with a [`Residual`] addition.
#[derive(Clone, Copy, Debug)]
pub struct NormForward<'a> {
    /// Sizes.
    pub shape: NormShape,
    /// (N, C).
    pub x: Slice<'a>,
    /// The residual addition.
    pub residual: Residual<'a>,
    /// (C,).
    pub gamma: Slice<'a>,
    /// (C,), for [`NormKind::Layer`] only.
    pub beta: Option<Slice<'a>>,
    /// (N, C).
    pub y: Slice<'a>,
    /// ([`NormShape::stats`],) F32.
    pub stats: Slice<'a>,
}

impl Op for NormForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::forward(gpu, self)
    }
}

/// Place of the residual addition.
#[derive(Clone, Copy, Debug)]
pub enum Residual<'a> {
    /// `y = norm(x)`.
    None,
    /// `sum = x + branch`, `y = norm(sum)`.
    Before(ResidualAdd<'a>),
    /// `y = stream + norm(x)`, where x is the output of a branch and this is the residual stream (N, C). In backward,
    /// `dy` is the gradient of the new stream, and `dx` that of the branch.
    After(Slice<'a>),
}

/// `sum = x + branch`.
#[derive(Clone, Copy, Debug)]
pub struct ResidualAdd<'a> {
    /// (N, C).
    pub branch: Slice<'a>,
    /// (N, C).
    pub sum: Slice<'a>,
}

/// Backward of the norm, to its input and parameters.
#[derive(Clone, Copy, Debug)]
pub struct NormBackward<'a> {
    /// Sizes.
    pub shape: NormShape,
    /// (N, C) the normalised input: `sum` after a residual addition.
    pub x: Slice<'a>,
    /// (C,).
    pub gamma: Slice<'a>,
    /// ([`NormShape::stats`],) F32, as written by forward.
    pub stats: Slice<'a>,
    /// (N, C).
    pub dy: Slice<'a>,
    /// (N, C) gradient of x.
    pub dx: Slice<'a>,
    /// True if the gradient is added to the contents of `dx`, which come from the residual path.
    pub add_to_dx: bool,
    /// (C,) gradient.
    pub dgamma: Slice<'a>,
    /// (C,) gradient.
    pub dbeta: Option<Slice<'a>>,
    /// (C,) sum of the rows of the new dx: the gradient of a bias that was added to x. All parameter gradients have the
    /// same element type.
    pub dsum: Option<Slice<'a>>,
    /// Applies to the three parameter gradients.
    pub acc: Accumulate,
}

impl Op for NormBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::backward(gpu, self)
    }

    fn scratch(&self) -> usize {
        let outputs = 1 + usize::from(self.dbeta.is_some()) + usize::from(self.dsum.is_some());
        DType::F32.size() * outputs * MAX_SUM_ROWS.min(self.shape.rows) * self.shape.cols
    }
}
