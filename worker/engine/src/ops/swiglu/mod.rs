//! SwiGLU, the gated activation of Llama: `a = silu(g) u` with `silu(g) = g sigmoid(g)`.
//!
//! Backward: `du = da silu(g)`, `dg = da u sigmoid(g) (1 + g (1 - sigmoid(g)))`.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod hopper;

use super::{Cuda, LinearBackwardInput, LinearForward, LinearShape, Op};
use crate::cpu::Threads;
use crate::error::Result;
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

impl Op for SwigluForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::forward(gpu, self)
    }
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

impl Op for SwigluBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::backward(gpu, self)
    }
}

/// A linear layer and the SwiGLU after it: `h = x w^T`, `a = silu(g) u`.
#[derive(Clone, Copy, Debug)]
pub struct LinearSwigluForward<'a> {
    /// (N, I) to (N, 2 F).
    pub shape: LinearShape,
    /// (N, I).
    pub x: Slice<'a>,
    /// (2 F, I): first the rows of g, then those of u.
    pub w: Slice<'a>,
    /// (N, 2 F): g and u side by side in each row.
    pub h: Slice<'a>,
    /// (N, F).
    pub a: Slice<'a>,
}

impl Op for LinearSwigluForward<'_> {
    fn cpu(self, threads: &Threads) {
        let Self { shape, x, w, h, a } = self;
        LinearForward { shape, x, w, bias: None, y: h }.cpu(threads);
        SwigluForward { rows: shape.rows, ffn: shape.outputs / 2, h, a }.cpu(threads);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.swiglu.linear_forward(gpu, self)
    }
}

/// The gradient of SwiGLU's input `h` from that of the output of the linear layer after it: `da = dy w`.
#[derive(Clone, Copy, Debug)]
pub struct SwigluLinearBackward<'a> {
    /// Sizes of the layer after SwiGLU: (N, F) to (N, O).
    pub shape: LinearShape,
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

impl Op for SwigluLinearBackward<'_> {
    fn cpu(self, threads: &Threads) {
        let Self { shape, dy, w, h, da, dh } = self;
        LinearBackwardInput { shape, dy, w, dx: da }.cpu(threads);
        SwigluBackward { rows: shape.rows, ffn: shape.inputs, h, da, dh }.cpu(threads);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.swiglu.linear_backward(gpu, self)
    }
}
