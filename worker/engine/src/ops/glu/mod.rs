//! Gated activations: `a = f(g) u` with an [`Activation`] f, as in SwiGLU and GEGLU (Shazeer, 2020).
//!
//! Backward: `du = da f(g)`, `dg = da u f'(g)`. With [`GluInputs`], the gradient of what is beyond the limit is 0.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod hopper;

use super::{Activation, Cuda, LinearBackwardInput, LinearForward, LinearShape, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Limit and offset of g and u: `f(g) u` uses `min(g, limit)` and `max(-limit, min(u, limit)) + offset` in their place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GluInputs {
    /// Bound of g, and of the magnitude of u; infinite if there is none.
    pub limit: f32,
    /// Number added to u.
    pub offset: f32,
}

impl GluInputs {
    /// g and u themselves.
    pub const PLAIN: Self = Self { limit: f32::INFINITY, offset: 0.0 };
}

/// `a = f(g) u`.
#[derive(Clone, Copy, Debug)]
pub struct GluForward<'a> {
    /// f.
    pub activation: Activation,
    /// Limit and offset of g and u.
    pub inputs: GluInputs,
    /// N.
    pub rows: usize,
    /// F.
    pub ffn: usize,
    /// (N, 2 F): g and u side by side in each row.
    pub h: Slice<'a>,
    /// (N, F).
    pub a: Slice<'a>,
    /// (1,) I32: the number of rows that exist, if only the device knows it: see
    /// [`GatherRows`](super::GatherRows).
    pub end: Option<Slice<'a>>,
    /// (1,) F32: that of `a` as by [`Amax`](super::Amax), if it is wanted.
    pub amax: Option<Slice<'a>>,
}

impl Op for GluForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.glu.forward(gpu, self)
    }
}

/// The gradient of `h` from that of `a`.
#[derive(Clone, Copy, Debug)]
pub struct GluBackward<'a> {
    /// f.
    pub activation: Activation,
    /// Limit and offset of g and u.
    pub inputs: GluInputs,
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
    /// (1,) I32: the number of rows that exist, if only the device knows it: see
    /// [`GatherRows`](super::GatherRows).
    pub end: Option<Slice<'a>>,
    /// (1,) F32: that of `dh` as by [`Amax`](super::Amax), if it is wanted.
    pub amax: Option<Slice<'a>>,
}

impl Op for GluBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.glu.backward(gpu, self)
    }
}

/// A linear layer and the gated activation after it: `h = x w^T (+ bias)`, `a = f(g) u`.
#[derive(Clone, Copy, Debug)]
pub struct LinearGluForward<'a> {
    /// (N, I) to (N, 2 F).
    pub shape: LinearShape,
    /// f.
    pub activation: Activation,
    /// Limit and offset of g and u.
    pub inputs: GluInputs,
    /// (N, I).
    pub x: Slice<'a>,
    /// (2 F, I): first the rows of g, then those of u.
    pub w: Slice<'a>,
    /// (2 F,). The gradient is a [`ColumnSum`](super::ColumnSum) of that of h.
    pub bias: Option<Slice<'a>>,
    /// (N, 2 F): g and u side by side in each row.
    pub h: Slice<'a>,
    /// (N, F).
    pub a: Slice<'a>,
}

impl Op for LinearGluForward<'_> {
    fn cpu(self, threads: &Threads) {
        let Self { shape, activation, inputs, x, w, bias, h, a } = self;
        LinearForward { shape, x, w, bias, y: h }.cpu(threads);
        let (rows, ffn) = (shape.rows, shape.outputs / 2);
        GluForward { activation, inputs, rows, ffn, h, a, end: None, amax: None }.cpu(threads);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.glu.linear_forward(gpu, self)
    }
}

/// The gradient of a gated activation's input `h` from that of the output of the linear layer after it: `da = dy w`.
#[derive(Clone, Copy, Debug)]
pub struct GluLinearBackward<'a> {
    /// Sizes of the layer after the gated activation: (N, F) to (N, O).
    pub shape: LinearShape,
    /// f.
    pub activation: Activation,
    /// Limit and offset of g and u.
    pub inputs: GluInputs,
    /// (N, O).
    pub dy: Slice<'a>,
    /// (O, F).
    pub w: Slice<'a>,
    /// (N, 2 F), as in forward.
    pub h: Slice<'a>,
    /// (N, F): scratch memory with unspecified contents afterwards.
    pub da: Slice<'a>,
    /// (N, 2 F).
    pub dh: Slice<'a>,
}

impl Op for GluLinearBackward<'_> {
    fn cpu(self, threads: &Threads) {
        let Self { shape, activation, inputs, dy, w, h, da, dh } = self;
        LinearBackwardInput { shape, dy, w, dx: da }.cpu(threads);
        let (rows, ffn) = (shape.rows, shape.inputs);
        GluBackward { activation, inputs, rows, ffn, h, da, dh, end: None, amax: None }.cpu(threads);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.glu.linear_backward(gpu, self)
    }
}
