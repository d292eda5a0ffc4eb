//! FP8: tensors with one byte per element and one scale each, and their matrix multiplication.
//!
//! Elements have the formats of Micikevicius et al. (2022): E4M3 for weights and activations; E5M2, which has a larger
//! range and less precision, for gradients. A tensor x is stored as `q = x / scale`, rounded to nearest even, with
//! `scale = max|x| / largest`, so that its largest element becomes the largest number of the format. The scale comes
//! from the tensor itself ("current scaling"), not from an earlier step. If an element of x is not finite, no product
//! with q is finite either. Kernels that write x can find `max|x|` meanwhile, which saves reading it once more.
//!
//! Tensor cores multiply FP8 operands only if the sum runs along the rows of both in memory. If a tensor is needed in
//! both orientations, it is rounded together with its transpose.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod format;

use xlaunch_pool::DType;

use super::{Accumulate, Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Sizes of FP8 operands are multiples of this, in all dimensions.
pub const FP8_MULTIPLE: usize = 16;

/// `max|x|`.
#[derive(Clone, Copy, Debug)]
pub struct Amax<'a> {
    /// N.
    pub rows: usize,
    /// C, a multiple of [`FP8_MULTIPLE`].
    pub cols: usize,
    /// (N, C).
    pub x: Slice<'a>,
    /// (1,) I32: the number of rows that exist; `None` if all do. The others are not read.
    pub end: Option<Slice<'a>>,
    /// (1,) F32: `max|x|`; NaN if an element is NaN.
    pub amax: Slice<'a>,
}

impl Op for Amax<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::amax(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::amax(gpu, self)
    }
}

/// `q = x / scale`, `scale = max|x| / largest`.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeFp8<'a> {
    /// N, a multiple of [`FP8_MULTIPLE`].
    pub rows: usize,
    /// C, likewise.
    pub cols: usize,
    /// The format.
    pub dtype: DType,
    /// (N, C).
    pub x: Slice<'a>,
    /// (1,) F32: the output of [`Amax`].
    pub amax: Slice<'a>,
    /// (N, C) q.
    pub q: Option<Slice<'a>>,
    /// (C, N) the transpose of q.
    pub transposed: Option<Slice<'a>>,
    /// (1,) F32.
    pub scale: Slice<'a>,
    /// (1,) I32: the number of rows that exist; `None` if all do. The others are not read, and at least 128 of them
    /// become 0: GEMMs that sum over rows read whole tiles.
    pub end: Option<Slice<'a>>,
}

impl Op for QuantizeFp8<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::quantize(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::quantize(gpu, self)
    }
}

/// The output of [`QuantizeFp8`].
#[derive(Clone, Copy, Debug)]
pub struct Fp8Operand<'a> {
    /// q or its transpose.
    pub q: Slice<'a>,
    /// (1,) F32.
    pub scale: Slice<'a>,
}

/// `y (N, O) = a (N, K) b (O, K)^T (+ bias)`.
#[derive(Clone, Copy, Debug)]
pub struct GemmFp8<'a> {
    /// N, a multiple of [`FP8_MULTIPLE`].
    pub rows: usize,
    /// O, likewise.
    pub cols: usize,
    /// K, likewise.
    pub depth: usize,
    /// (N, K).
    pub a: Fp8Operand<'a>,
    /// (O, K). At most one of a and b is E5M2.
    pub b: Fp8Operand<'a>,
    /// (O,) in the type of activations; only for a y of that type.
    pub bias: Option<Slice<'a>>,
    /// (N, O) activations, or a gradient.
    pub y: Slice<'a>,
    /// Selects whether the product is added to y; not supported with a bias.
    pub acc: Accumulate,
}

impl Op for GemmFp8<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::gemm(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::gemm(gpu, self)
    }
}
