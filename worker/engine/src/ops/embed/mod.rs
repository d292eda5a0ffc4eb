//! Token and position embedding: `out[b, t] = wte[tokens[b, t]] (+ wpe[t])` or, with positions, `(+ wpe[positions[b,
//! t]])`. Backward adds the rows of `dout` to the rows of the tables that they came from, in a fixed order.

pub(crate) mod cpu;
pub(crate) mod cuda;

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
    /// (B, T, C).
    pub out: Slice<'a>,
}

/// `dwte[tokens[b, t]] += dout[b, t]`, `dwpe[t] += dout[b, t]`.
#[derive(Clone, Copy, Debug)]
pub struct EmbedBackward<'a> {
    /// Sizes.
    pub shape: EmbedShape,
    /// (B, T) I32.
    pub tokens: Slice<'a>,
    /// (B, T, C).
    pub dout: Slice<'a>,
    /// (>= V, C) gradient, always added to.
    pub dwte: Slice<'a>,
    /// (>= T, C) gradient, always added to.
    pub dwpe: Option<Slice<'a>>,
}
