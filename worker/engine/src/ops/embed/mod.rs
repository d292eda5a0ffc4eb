//! Token and position embedding: `out[b, t] = wte[tokens[b, t]] (+ wpe[t])` or, with positions, `(+ wpe[positions[b,
//! t]])`, or with documents, positions within them. Backward adds the rows of `dout` to the rows of the tables that
//! they came from, in a fixed order.

pub(crate) mod cpu;
pub(crate) mod cuda;

use xlaunch_pool::DType;

use super::{Cuda, Documents, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Embedding of B sequences of T tokens.
#[derive(Clone, Copy, Debug)]
pub struct EmbedShape {
    /// B.
    pub batch: usize,
    /// T.
    pub seq: usize,
    /// C.
    pub cols: usize,
    /// V: token ids are below it.
    pub vocab: usize,
}

/// `out[b, t] = wte[tokens[b, t]] (+ wpe[t])`.
#[derive(Clone, Copy, Debug)]
pub struct EmbedForward<'a> {
    /// Sizes.
    pub shape: EmbedShape,
    /// (B, T) I32, each below V: the caller has checked them.
    pub tokens: Slice<'a>,
    /// (>= V, C).
    pub wte: Slice<'a>,
    /// (>= T, C).
    pub wpe: Option<Slice<'a>>,
    /// (B, T) I32: rows of wpe in place of t. The caller has checked them.
    pub positions: Option<Slice<'a>>,
    /// Documents, each of which begins with row 0 of wpe; not together with positions.
    pub documents: Option<Documents<'a>>,
    /// (B, T, C).
    pub out: Slice<'a>,
}

impl Op for EmbedForward<'_> {
    fn cpu(self, _: &Threads) {
        cpu::forward(self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::forward(gpu, self)
    }
}

/// `dwte[tokens[b, t]] += dout[b, t]`, `dwpe[t] += dout[b, t]`; with documents, t is the position within one.
#[derive(Clone, Copy, Debug)]
pub struct EmbedBackward<'a> {
    /// Sizes.
    pub shape: EmbedShape,
    /// (B, T) I32.
    pub tokens: Slice<'a>,
    /// Same as in forward.
    pub documents: Option<Documents<'a>>,
    /// (B, T, C).
    pub dout: Slice<'a>,
    /// (>= V, C) gradient, always added to.
    pub dwte: Slice<'a>,
    /// (>= T, C) gradient, always added to.
    pub dwpe: Option<Slice<'a>>,
}

impl Op for EmbedBackward<'_> {
    fn cpu(self, _: &Threads) {
        cpu::backward(self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::backward(gpu, self)
    }

    fn scratch(&self) -> usize {
        let (s, rows) = (self.shape, self.shape.batch * self.shape.seq);
        DType::F32.size() * (3 * s.vocab + 2 * rows + 2 * rows.div_ceil(cuda::PART) * s.cols)
    }
}
