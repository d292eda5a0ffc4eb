//! Muon on a GPU: products by the GEMMs of linear layers, the rest by small kernels.

use xlaunch_pool::DType;

use super::{EPS, MARGIN, MuonMomentum, MuonUpdate, Orthogonalize, POLAR_EXPRESS, StepConditions};
use crate::cuda::{Arg, Gpu, args, expect, expect_grad, is_bf16};
use crate::error::Result;
use crate::ops::adamw::{DECAY_CHUNK, scalar};
use crate::ops::linear::cuda as linear;
use crate::ops::reduce::cuda::squared_norm;
use crate::ops::{
    Accumulate, Cuda, LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearShape, SquaredNorm,
};
use crate::tensor::Slice;

impl StepConditions<'_> {
    fn check(&self) {
        [self.grad_norm_sq, self.loss, self.skipped].into_iter().for_each(|x| expect(x, DType::F32, 1));
    }
}

pub(super) fn momentum(gpu: &Gpu, a: MuonMomentum<'_>) -> Result<()> {
    let len = a.grads.len();
    expect_grad(a.grads, len);
    expect(a.m, DType::F32, len);
    gpu.expect_act(a.update, len);
    expect(a.flags, DType::U8, len.div_ceil(DECAY_CHUNK));
    a.conditions.check();
    let StepConditions { grad_norm_sq, loss, skipped, skip_limit } = a.conditions;
    let tensors: &[Arg] =
        args![a.grads, is_bf16(a.grads), a.m, a.update, a.flags, grad_norm_sq, loss, skipped];
    let args = [tensors, &args![len, a.momentum, a.clip, skip_limit][..]].concat();
    // SAFETY: checked above.
    unsafe { gpu.launch("muon_momentum", gpu.grid_for(len), &args) }
}

pub(super) fn orthogonalize(gpu: &Cuda, a: Orthogonalize<'_>) -> Result<()> {
    let Orthogonalize { rows, cols, x } = a;
    gpu.expect_act(x, rows * cols);
    let side = rows.min(cols);
    let norm_sq = gpu.alloc(DType::F32, 1)?;
    let [scaled, gram, squared] =
        [rows * cols, side * side, side * side].map(|len| gpu.alloc(gpu.activations, len));
    let (scaled, gram, squared) = (scaled?, gram?, squared?);
    squared_norm(gpu, SquaredNorm { x, out: norm_sq.all() })?;
    let scale = args![x, scaled.all(), norm_sq.all(), x.len(), MARGIN, EPS];
    // SAFETY: x was checked; the others were allocated with these lengths.
    unsafe { gpu.launch("muon_scale", gpu.grid_for(x.len()), scale) }?;
    // Five steps, an odd number, end in x.
    let (mut from, mut to) = (scaled.all(), x);
    for [a, b, c] in POLAR_EXPRESS {
        let polynomial =
            Polynomial { side, gram: gram.all(), squared: squared.all(), coefficients: [a, b, c] };
        polynomial.of(gpu, (rows, cols), from)?;
        polynomial.times(gpu, (rows, cols), from, to)?;
        (from, to) = (to, from);
    }
    Ok(())
}

/// The symmetric matrix `a I + b A + c A^2`, which is written over `squared`.
struct Polynomial<'a> {
    side: usize,
    gram: Slice<'a>,
    squared: Slice<'a>,
    coefficients: [f32; 3],
}

impl Polynomial<'_> {
    /// Computes it for the smaller of `A = x x^T` and `A = x^T x`.
    fn of(&self, gpu: &Cuda, (rows, cols): (usize, usize), x: Slice<'_>) -> Result<()> {
        let Self { side, gram, squared, coefficients: [a, b, c] } = *self;
        if rows > cols {
            let shape = LinearShape { rows, inputs: cols, outputs: cols };
            let acc = Accumulate::Overwrite;
            gpu.weight_grads.one(gpu, LinearBackwardWeight { shape, dy: x, x, dw: gram, acc })?;
        } else {
            let shape = LinearShape { rows, inputs: cols, outputs: rows };
            linear::forward(gpu, LinearForward { shape, x, w: x, bias: None, y: gram })?;
        }
        let square = LinearShape { rows: side, inputs: side, outputs: side };
        linear::forward(gpu, LinearForward { shape: square, x: gram, w: gram, bias: None, y: squared })?;
        let args = args![gram, squared, side, a, b, c];
        // SAFETY: the GEMMs have checked that both hold side * side activations.
        unsafe { gpu.launch("muon_polynomial", gpu.grid_for(side * side), args) }
    }

    /// Multiplies x by it.
    fn times(&self, gpu: &Cuda, (rows, cols): (usize, usize), x: Slice<'_>, out: Slice<'_>) -> Result<()> {
        let Self { side, squared, .. } = *self;
        if rows > cols {
            let shape = LinearShape { rows, inputs: side, outputs: side };
            linear::forward(gpu, LinearForward { shape, x, w: squared, bias: None, y: out })
        } else {
            let shape = LinearShape { rows, inputs: cols, outputs: side };
            linear::backward_input(gpu, LinearBackwardInput { shape, dy: squared, w: x, dx: out })
        }
    }
}

pub(super) fn update(gpu: &Gpu, a: MuonUpdate<'_>) -> Result<()> {
    let len = a.params.len();
    gpu.expect_act(a.update, len);
    expect(a.params, DType::F32, len);
    if let Some(work) = a.work {
        expect(work, DType::Bf16, len);
    }
    expect(a.scalars, DType::F32, scalar::COUNT);
    a.conditions.check();
    let StepConditions { grad_norm_sq, loss, skipped, skip_limit } = a.conditions;
    let tensors: &[Arg] = args![a.update, a.params, a.work, a.scalars, grad_norm_sq, loss, skipped];
    let args = [tensors, &args![len, a.factor, a.weight_decay, a.cautious, skip_limit][..]].concat();
    // SAFETY: checked above.
    unsafe { gpu.launch("muon_update", gpu.grid_for(len), &args) }
}
