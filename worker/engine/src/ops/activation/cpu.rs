//! Activation functions on threads, in a pass after the GEMM.

use rayon::prelude::*;

use super::{
    Activation, ActivationBackward, ActivationForward, ActivationLinearBackward, LinearActivationForward,
};
use crate::cpu::math::{self, exp, sigmoid, simd};
use crate::cpu::{Access, Threads};
use crate::ops::{Accumulate, linear, reduce};

/// sqrt(2 / pi).
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;
/// Factor in the sigmoid of quick GELU.
const QUICK_SCALE: f32 = 1.702;
/// Elements per task.
const ACTIVATION_TASK_ELEMENTS: usize = 1 << 13;

/// An activation function `f(x) = x gate(x)`.
pub(crate) trait Function {
    fn gate(x: f32) -> f32;

    /// Returns `factor f'(x)`.
    fn times_derivative(factor: f32, x: f32) -> f32;
}

pub(crate) struct Silu;
pub(crate) struct Gelu;
pub(crate) struct GeluTanh;
pub(crate) struct Relu2;
pub(crate) struct QuickGelu;

impl Function for Silu {
    #[inline(always)]
    fn gate(x: f32) -> f32 {
        sigmoid(x)
    }

    #[inline(always)]
    fn times_derivative(factor: f32, x: f32) -> f32 {
        let gate = sigmoid(x);
        factor * gate * (1.0 + x * (1.0 - gate))
    }
}

impl Function for Gelu {
    #[inline(always)]
    fn gate(x: f32) -> f32 {
        let tail = normal_tail(x.abs());
        if x < 0.0 { tail } else { 1.0 - tail }
    }

    #[inline(always)]
    fn times_derivative(factor: f32, x: f32) -> f32 {
        /// 1 / sqrt(2 pi).
        const DENSITY: f32 = 0.398_942_3;
        factor * (Self::gate(x) + x * (DENSITY * exp(-0.5 * x * x)))
    }
}

/// `Phi(-x) = exp(-x^2 / 2) P(t)` with `t = 1 / (1 + STEP x)` for `x >= 0`: the tail of the standard normal
/// distribution, with a relative error below 1e-6 up to x = 5. P was fitted for the least relative error.
#[inline(always)]
fn normal_tail(x: f32) -> f32 {
    const STEP: f32 = 0.3;
    const COEFFICIENTS: [f32; 9] = [
        0.038_378_29,
        -0.169_166_12,
        0.228_660_08,
        -0.076_506_47,
        0.142_535_52,
        0.094_683_52,
        0.121_920_34,
        0.119_487_69,
        7.168_876e-6,
    ];
    let t = 1.0 / (1.0 + STEP * x);
    exp(-0.5 * x * x) * COEFFICIENTS.iter().fold(0.0_f32, |p, coefficient| p.mul_add(t, *coefficient))
}

impl Function for GeluTanh {
    #[inline(always)]
    fn gate(x: f32) -> f32 {
        0.5 * (1.0 + math::tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x)))
    }

    #[inline(always)]
    fn times_derivative(factor: f32, x: f32) -> f32 {
        let tanh = math::tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x));
        let slope = GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
        factor * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope)
    }
}

impl Function for Relu2 {
    #[inline(always)]
    fn gate(x: f32) -> f32 {
        x.max(0.0)
    }

    #[inline(always)]
    fn times_derivative(factor: f32, x: f32) -> f32 {
        factor * (2.0 * x.max(0.0))
    }
}

impl Function for QuickGelu {
    #[inline(always)]
    fn gate(x: f32) -> f32 {
        sigmoid(QUICK_SCALE * x)
    }

    #[inline(always)]
    fn times_derivative(factor: f32, x: f32) -> f32 {
        let gate = Self::gate(x);
        factor * gate * (1.0 + QUICK_SCALE * x * (1.0 - gate))
    }
}

/// Evaluates an expression in which `$function` is the [`Function`] of an [`Activation`].
macro_rules! with_function {
    ($activation:expr, $function:ident => $body:expr) => {
        match $activation {
            $crate::ops::Activation::Silu => {
                type $function = $crate::ops::activation::cpu::Silu;
                $body
            }
            $crate::ops::Activation::Gelu => {
                type $function = $crate::ops::activation::cpu::Gelu;
                $body
            }
            $crate::ops::Activation::GeluTanh => {
                type $function = $crate::ops::activation::cpu::GeluTanh;
                $body
            }
            $crate::ops::Activation::Relu2 => {
                type $function = $crate::ops::activation::cpu::Relu2;
                $body
            }
            $crate::ops::Activation::QuickGelu => {
                type $function = $crate::ops::activation::cpu::QuickGelu;
                $body
            }
        }
    };
}
pub(crate) use with_function;

pub(crate) fn linear_forward(t: &Threads, args: LinearActivationForward<'_>) {
    let (access, s) = (Access::new("linear_activation_forward"), args.shape);
    let (x, w) = (access.read(args.x, s.rows * s.inputs), access.read(args.w, s.outputs * s.inputs));
    let bias = args.bias.map(|bias| access.read(bias, s.outputs));
    let (h, a) = (access.write(args.h, s.rows * s.outputs), access.write(args.a, s.rows * s.outputs));
    linear::cpu::x_w_transposed(t, s, x, w, bias, h);
    with_function!(args.activation, F => activate::<F>(t, h, a));
}

pub(crate) fn forward(t: &Threads, args: ActivationForward<'_>) {
    let access = Access::new("activation_forward");
    let (h, a) = (access.read(args.h, args.a.len()), access.write(args.a, args.h.len()));
    with_function!(args.activation, F => activate::<F>(t, h, a));
}

fn activate<F: Function>(t: &Threads, h: &[f32], a: &mut [f32]) {
    t.run(|| {
        a.par_chunks_mut(ACTIVATION_TASK_ELEMENTS).zip(h.par_chunks(ACTIVATION_TASK_ELEMENTS)).for_each(
            |(a, h)| {
                simd!({
                    for (a, x) in a.iter_mut().zip(h) {
                        *a = x * F::gate(*x);
                    }
                });
            },
        );
    });
}

pub(crate) fn linear_backward(t: &Threads, args: ActivationLinearBackward<'_>) {
    let (access, s) = (Access::new("activation_linear_backward"), args.shape);
    let len = s.rows * s.inputs;
    let (dy, w) = (access.read(args.dy, s.rows * s.outputs), access.read(args.w, s.outputs * s.inputs));
    let (h, dh) = (access.read(args.h, len), access.write(args.dh, len));
    let dbias = args.dbias.map(|dbias| access.write(dbias, s.inputs));
    linear::cpu::dy_w(t, s, dy, w, dh);
    gradient(t, args.activation, h, dh, dbias, args.acc);
}

pub(crate) fn backward(t: &Threads, args: ActivationBackward<'_>) {
    let (access, len) = (Access::new("activation_backward"), args.rows * args.cols);
    let (h, dh) = (access.read(args.h, len), access.write(args.dh, len));
    let dbias = args.dbias.map(|dbias| access.write(dbias, args.cols));
    gradient(t, args.activation, h, dh, dbias, args.acc);
}

/// Computes the gradient of h from that of f(h), in place, and its sum over rows.
fn gradient(
    t: &Threads,
    activation: Activation,
    h: &[f32],
    dh: &mut [f32],
    dbias: Option<&mut [f32]>,
    acc: Accumulate,
) {
    with_function!(activation, F => derive::<F>(t, h, dh));
    if let Some(dbias) = dbias {
        reduce::cpu::column_sums(t, dh, dbias.len(), dbias, acc == Accumulate::Add);
    }
}

fn derive<F: Function>(t: &Threads, h: &[f32], dh: &mut [f32]) {
    t.run(|| {
        dh.par_chunks_mut(ACTIVATION_TASK_ELEMENTS).zip(h.par_chunks(ACTIVATION_TASK_ELEMENTS)).for_each(
            |(d, h)| {
                simd!({
                    for (d, x) in d.iter_mut().zip(h) {
                        *d = F::times_derivative(*d, *x);
                    }
                });
            },
        );
    });
}
