//! SwiGLU, the gated activation of Llama: `a = silu(g) u` with `silu(g) = g sigmoid(g)`.
//!
//! Backward: `du = da silu(g)`, `dg = da u sigmoid(g) (1 + g (1 - sigmoid(g)))`.

pub(crate) mod cpu;
pub(crate) mod cuda;

use crate::tensor::Slice;

/// `a = silu(g) u`.
#[derive(Clone, Copy, Debug)]
pub struct SwigluForward<'a> {
    /// N.
    pub rows: usize,
    /// F.
    pub ffn: usize,
    /// (N, 2 F): g and u side by side in each row.
    pub h: Slice<'a>,
    /// (N, F).
    pub a: Slice<'a>,
}

/// The gradient of `h` from that of `a`.
#[derive(Clone, Copy, Debug)]
pub struct SwigluBackward<'a> {
    /// N.
    pub rows: usize,
    /// F.
    pub ffn: usize,
    /// (N, 2 F), as in forward.
    pub h: Slice<'a>,
    /// (N, F).
    pub da: Slice<'a>,
    /// (N, 2 F).
    pub dh: Slice<'a>,
}
