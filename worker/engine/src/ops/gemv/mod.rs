//! Linear layers with a few rows, as in decoding: `y = f(x w^T + bias)`, where f is the identity or an
//! activation function.
//!
//! Reading the weights takes nearly all of the time, so each kernel reads them once. A row of y has the same bits
//! regardless of the number and values of other rows: a sequence gets the same logits alone and in a batch.

pub(crate) mod cpu;
pub(crate) mod cuda;

use super::{Activation, Cuda, LinearShape, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Maximum number of rows of a [`Gemv`].
pub const GEMV_ROWS: usize = 32;

/// `y = f(x w^T + bias)` of at most [`GEMV_ROWS`] rows.
#[derive(Clone, Copy, Debug)]
pub struct Gemv<'a> {
    /// Sizes.
    pub shape: LinearShape,
    /// (N, I).
    pub x: Slice<'a>,
    /// (O, I).
    pub w: Slice<'a>,
    /// (O,).
    pub bias: Option<Slice<'a>>,
    /// f; `None` for the identity.
    pub activation: Option<Activation>,
    /// (N, O), in F32 or the element type of activations.
    pub y: Slice<'a>,
}

impl Op for Gemv<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::run(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::run(gpu, self)
    }
}
