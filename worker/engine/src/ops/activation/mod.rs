//! Activation functions, fused with the linear layers before and after them. `glu` has their gated forms.
//!
//! - SiLU: `f(x) = x s` with `s = sigmoid(x)`; `f'(x) = s (1 + x (1 - s))`;
//! - GELU: `f(x) = x Phi(x)`; `f'(x) = Phi(x) + x phi(x)`;
//! - GELU, tanh form: `f(x) = x (1 + tanh(u)) / 2` with `u = GELU_SCALE (x + GELU_CUBE x^3)`;
//!   `f'(x) = (1 + tanh(u)) / 2 + x (1 - tanh(u)^2) / 2 du/dx` with `du/dx = GELU_SCALE (1 + 3 GELU_CUBE x^2)`;
//! - squared ReLU: `f(x) = max(x, 0)^2`; `f'(x) = 2 max(x, 0)`;
//! - quick GELU: `f(x) = x s` with `s = sigmoid(1.702 x)`; `f'(x) = s (1 + 1.702 x (1 - s))`.
//!
//! `Phi` and `phi` are the distribution function and the density of the standard normal distribution. GELU and its tanh
//! form are those of Hendrycks and Gimpel (2016), squared ReLU that of So et al. (2021).

pub(crate) mod cpu;
pub(crate) mod cuda;

use super::{Accumulate, Cuda, LinearShape, Op, reduce};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x sigmoid(x)`.
    Silu,
    /// `x Phi(x)`.
    Gelu,
    /// The tanh form of GELU, which differs from it by up to 5e-4.
    GeluTanh,
    /// `max(x, 0)^2`.
    Relu2,
    /// `x sigmoid(1.702 x)`.
    QuickGelu,
}

impl Activation {
    /// All functions, in the order of their numbers in kernels (`functions.cuh`).
    pub(crate) const ALL: [Self; 5] = [Self::Silu, Self::Gelu, Self::GeluTanh, Self::Relu2, Self::QuickGelu];
}

/// `h = x w^T (+ bias)`, `a = f(h)`.
#[derive(Clone, Copy, Debug)]
pub struct LinearActivationForward<'a> {
    /// Sizes.
    pub shape: LinearShape,
    /// f.
    pub activation: Activation,
    /// (N, I).
    pub x: Slice<'a>,
    /// (O, I).
    pub w: Slice<'a>,
    /// (O,).
    pub bias: Option<Slice<'a>>,
    /// (N, O), kept for backward.
    pub h: Slice<'a>,
    /// (N, O).
    pub a: Slice<'a>,
}

impl Op for LinearActivationForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::linear_forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.activation.linear_forward(gpu, self)
    }
}

/// `a = f(h)`.
#[derive(Clone, Copy, Debug)]
pub struct ActivationForward<'a> {
    /// f.
    pub activation: Activation,
    /// (L,).
    pub h: Slice<'a>,
    /// (L,).
    pub a: Slice<'a>,
}

impl Op for ActivationForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.activation.forward(gpu, self)
    }
}

/// Backward of `y = f(h) w^T` to h: `dh = f'(h) (dy w)`, and `dbias = sum of dh's rows`, the gradient of the bias that
/// was added in h.
#[derive(Clone, Copy, Debug)]
pub struct ActivationLinearBackward<'a> {
    /// Sizes of the layer after the activation function.
    pub shape: LinearShape,
    /// f.
    pub activation: Activation,
    /// (N, O).
    pub dy: Slice<'a>,
    /// (O, I).
    pub w: Slice<'a>,
    /// (N, I).
    pub h: Slice<'a>,
    /// (N, I).
    pub dh: Slice<'a>,
    /// (I,) gradient.
    pub dbias: Option<Slice<'a>>,
    /// Applies to `dbias`.
    pub acc: Accumulate,
}

impl Op for ActivationLinearBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::linear_backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.activation.linear_backward(gpu, self)
    }

    fn scratch(&self) -> usize {
        reduce::column_sum_scratch(self.shape.inputs)
    }
}

/// The gradient of h from that of `a = f(h)`: `dh = f'(h) da`, `dbias = sum of dh's rows`.
#[derive(Clone, Copy, Debug)]
pub struct ActivationBackward<'a> {
    /// f.
    pub activation: Activation,
    /// N.
    pub rows: usize,
    /// F.
    pub cols: usize,
    /// (N, F).
    pub h: Slice<'a>,
    /// (N, F): da before, dh afterwards.
    pub dh: Slice<'a>,
    /// (F,) gradient of the bias that was added in h.
    pub dbias: Option<Slice<'a>>,
    /// Applies to `dbias`.
    pub acc: Accumulate,
}

impl Op for ActivationBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.activation.backward(gpu, self)
    }

    fn scratch(&self) -> usize {
        reduce::column_sum_scratch(self.cols)
    }
}
