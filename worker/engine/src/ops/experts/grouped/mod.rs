//! Linear layers of experts: `y[i] = x[i] w[e]^T` for the rows i of expert e, which are between two offsets.
//!
//! Backward: `dx[i] = dy[i] w[e]`, `dw[e] = sum_i dy[i]^T x[i]`. The offsets are in device memory, so a launch has
//! blocks for the largest number of tiles that any offsets can lead to; each block looks up its expert.
//!
//! In FP8 (see [`QuantizeFp8`](crate::QuantizeFp8)), sums run along the rows of both operands in memory. Tensors have
//! one scale each, w one for all experts:
//! ```text
//!            a                          b                            out
//! Forward    x (M, I)                   w (E, O, I)                  y (M, O)
//! Input      dy (M, O)                  w's transpose (I, E O)       dx (M, I)
//! Weight     dy's transpose (O, M)      x's transpose (I, M)         dw (E, O, I)
//! ```

mod cpu;
pub(crate) mod cuda;
pub(crate) mod hopper;

use xlaunch_pool::DType;

use crate::cpu::Threads;
use crate::error::Result;
use crate::ops::{Accumulate, Cuda, FP8_MULTIPLE, Fp8Operand, Op};
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

/// The products of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupedProduct {
    /// `y[i] = x[i] w[e]^T`.
    Forward,
    /// `dx[i] = dy[i] w[e]`.
    Input,
    /// `dw[e] = sum_i dy[i]^T x[i]`; 0 for an expert without rows.
    Weight,
}

/// A product whose operands and output are those of the table above. Gradients of outputs are E5M2, the rest E4M3. On
/// GPUs, needs compute capability 9.0.
#[derive(Clone, Copy, Debug)]
pub struct GroupedFp8<'a> {
    /// Sizes: M, I and O are multiples of [`FP8_MULTIPLE`].
    pub shape: GroupedShape,
    /// Selects the product.
    pub product: GroupedProduct,
    /// (E + 1,) I32: see [`SortByExpert`](crate::SortByExpert).
    pub offsets: Slice<'a>,
    /// The left operand.
    pub a: Fp8Operand<'a>,
    /// The right operand.
    pub b: Fp8Operand<'a>,
    /// Activations, or a gradient.
    pub out: Slice<'a>,
    /// Selects whether the product is added to `out`; only for `Weight`.
    pub acc: Accumulate,
}

impl GroupedFp8<'_> {
    /// Returns the lengths of a, b and out.
    fn lens(&self) -> [usize; 3] {
        let GroupedShape { rows, experts, inputs, outputs } = self.shape;
        let [x, y, w] = [rows * inputs, rows * outputs, experts * outputs * inputs];
        match self.product {
            GroupedProduct::Forward => [x, w, y],
            GroupedProduct::Input => [y, w, x],
            GroupedProduct::Weight => [y, x, w],
        }
    }

    fn check(&self) {
        let GroupedShape { rows, inputs, outputs, .. } = self.shape;
        let [a, b, out] = [self.a.q, self.b.q, self.out];
        assert!([rows, inputs, outputs].iter().all(|size| size.is_multiple_of(FP8_MULTIPLE)), "{self:?}");
        assert!([a.len(), b.len(), out.len()] == self.lens(), "{self:?}");
        let left = if self.product == GroupedProduct::Forward { DType::Fp8E4m3 } else { DType::Fp8E5m2 };
        assert!(a.dtype() == left && b.dtype() == DType::Fp8E4m3, "{self:?}");
        assert!(self.product == GroupedProduct::Weight || self.acc == Accumulate::Overwrite, "{self:?}");
    }
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

impl Op for GroupedFp8<'_> {
    fn cpu(self, threads: &Threads) {
        self.check();
        cpu::fp8(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        self.check();
        hopper::fp8(gpu, self)
    }
}
