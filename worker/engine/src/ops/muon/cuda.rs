//! Muon on a GPU: products of matrices by batched GEMMs, the rest by small kernels.

use xlaunch_pool::DType;

use super::symmetric::{self, Sizes};
use super::{
    EPS, MARGIN, MuonMomentum, MuonPack, MuonPieces, MuonRowFactors, MuonRowMoments, MuonUpdate,
    Orthogonalize, POLAR_EXPRESS, ROW_EPS, StepConditions,
};
use crate::cuda::gemm::{Batch, Epilogue, GemmCall, Operand, plain, transposed};
use crate::cuda::{Arg, BLOCK_THREADS, Gpu, Launch, VEC, args, expect, expect_grad, is_bf16};
use crate::error::Result;
use crate::ops::Cuda;
use crate::ops::adamw::scalar;
use crate::tensor::Slice;

/// Partial sums of a matrix's squared norm; at most a block has threads.
const NORM_PARTIALS: usize = 64;
/// Blocks per piece are limited so that there are this many times as many as run at once: pieces differ in length.
const WAVES: usize = 4;

/// Panics unless arrays of these lengths contain all pieces.
fn expect_pieces(pieces: &MuonPieces, lens: [Option<usize>; 3]) {
    let fits = pieces.ends.iter().zip(lens).all(|(end, len)| len.is_none_or(|len| *end <= len));
    assert!(fits, "pieces end at {:?}, but arrays at {lens:?}", pieces.ends);
}

/// Returns a launch with the pieces in x, and blocks that divide each of them in y.
fn launch(gpu: &Gpu, pieces: &MuonPieces) -> Launch {
    let most = WAVES * gpu.grid_for(usize::MAX).grid.0;
    let needed = pieces.longest.div_ceil(BLOCK_THREADS as usize * VEC);
    let blocks = needed.clamp(1, (most / pieces.count.max(1)).max(1));
    Launch { grid: (pieces.count, blocks, 1), block: (BLOCK_THREADS, 1), shared: 0 }
}

pub(super) fn momentum(gpu: &Gpu, a: MuonMomentum<'_>) -> Result<()> {
    let len = a.grads.len();
    expect_grad(a.grads, len);
    expect(a.m, DType::F32, len);
    gpu.expect_act(a.update, if a.packed_from.is_some() { a.update.len() } else { len });
    expect_pieces(a.pieces, [Some(len), None, None]);
    a.conditions.check();
    let StepConditions { grad_norm_sq, loss, skipped, skip_limit } = a.conditions;
    let (is_packed, from) = (a.packed_from.is_some(), a.packed_from.unwrap_or(0));
    let tensors: &[Arg] = args![a.pieces.entries().all(), a.grads, is_bf16(a.grads), a.m, a.update];
    let place: &[Arg] = args![is_packed, from, a.update.len()];
    let conditions: &[Arg] = args![grad_norm_sq, loss, skipped, a.momentum, a.clip, skip_limit];
    // SAFETY: checked above; the kernel writes only updates that lie in `update`.
    unsafe { gpu.launch("muon_momentum", launch(gpu, a.pieces), &[tensors, place, conditions].concat()) }
}

pub(super) fn pack(gpu: &Gpu, a: MuonPack<'_>) -> Result<()> {
    gpu.expect_act(a.from, a.from.len());
    gpu.expect_act(a.to, a.to.len());
    expect_pieces(a.pieces, [Some(a.from.len()), Some(a.to.len()), None]);
    let args = args![a.pieces.entries().all(), a.from, a.to];
    // SAFETY: checked above.
    unsafe { gpu.launch("muon_pack", launch(gpu, a.pieces), args) }
}

/// Returns the number of partial sums for a batch of matrices.
pub(super) fn norm_partials(count: usize) -> usize {
    count * NORM_PARTIALS
}

pub(super) fn orthogonalize(gpu: &Cuda, a: Orthogonalize<'_>) -> Result<()> {
    let Orthogonalize { rows, cols, x } = a;
    let (len, full) = (rows * cols, a.batch());
    gpu.expect_act(x, x.len() / len * len);
    let side = rows.min(cols);
    let most = full.min(x.len() / len);
    let partials = gpu.alloc(DType::F32, norm_partials(most))?;
    let [scaled, gram, squared] =
        [len, side * side, side * side].map(|elements| gpu.alloc(gpu.activations, most * elements));
    let (scaled, gram, squared) = (scaled?, gram?, squared?);
    for first in (0..x.len()).step_by(full * len) {
        let x = x.slice(first..x.len().min(first + full * len));
        let count = x.len() / len;
        let scaled = scaled.slice(0..count * len);
        let [gram, squared] = [&gram, &squared].map(|matrix| matrix.slice(0..count * side * side));
        let blocks = |parts| Launch { grid: (parts, count, 1), block: (BLOCK_THREADS, 1), shared: 0 };
        // SAFETY: x was checked; the others were allocated with room for as many matrices.
        unsafe {
            gpu.launch("muon_norm_partials", blocks(NORM_PARTIALS), args![x, partials.all(), len])?;
            let parts = blocks(len.div_ceil(BLOCK_THREADS as usize * VEC));
            let args = args![x, scaled, partials.all(), NORM_PARTIALS, len, MARGIN, EPS];
            gpu.launch("muon_scale", parts, args)?;
        }
        // Five steps, an odd number, end in x.
        let (mut from, mut to) = (scaled, x);
        for [a, b, c] in POLAR_EXPRESS {
            let step = Polynomial { rows, cols, batch: Batch { count, full }, gram, squared, a, b, c };
            step.of(gpu, from)?;
            step.times(gpu, from, to)?;
            (from, to) = (to, from);
        }
    }
    Ok(())
}

/// The symmetric matrix `a I + b A + c A^2` of each matrix of a batch, which is written over `squared`.
struct Polynomial<'a> {
    rows: usize,
    cols: usize,
    batch: Batch,
    gram: Slice<'a>,
    squared: Slice<'a>,
    a: f32,
    b: f32,
    c: f32,
}

impl Polynomial<'_> {
    fn is_tall(&self) -> bool {
        self.rows > self.cols
    }

    /// Computes it for the smaller of `A = x x^T` and `A = x^T x`.
    fn of(&self, gpu: &Cuda, x: Slice<'_>) -> Result<()> {
        let Self { rows, cols, batch, gram, squared, a, b, c } = *self;
        let (side, depth) = (rows.min(cols), rows.max(cols));
        let sizes = Sizes { side, depth, matrices: batch.count };
        if symmetric::supports(gpu, sizes, &[x, gram, squared]) {
            let operand = if self.is_tall() { symmetric::Operand::Across } else { symmetric::Operand::Along };
            // SAFETY: checked above; each slice has `count` matrices of its size.
            return unsafe {
                symmetric::product(gpu, sizes, operand, x, None, gram)?;
                let sum = symmetric::Sum { alpha: a, added: gram, beta: b, gamma: c };
                let sizes = Sizes { depth: side, ..sizes };
                symmetric::product(gpu, sizes, symmetric::Operand::Along, gram, Some(sum), squared)
            };
        }
        let operands = if self.is_tall() { [plain(x), transposed(x)] } else { [transposed(x), plain(x)] };
        self.multiply(gpu, [side, side, depth], operands, gram)?;
        self.multiply(gpu, [side; 3], [transposed(gram), plain(gram)], squared)?;
        let blocks = (side * side).div_ceil(BLOCK_THREADS as usize * VEC);
        let launch = Launch { grid: (blocks, batch.count, 1), block: (BLOCK_THREADS, 1), shared: 0 };
        let args = args![gram, squared, side, a, b, c];
        // SAFETY: both hold `count` matrices of side * side activations.
        unsafe { gpu.launch("muon_polynomial", launch, args) }
    }

    /// Multiplies x by it.
    fn times(&self, gpu: &Cuda, x: Slice<'_>, out: Slice<'_>) -> Result<()> {
        let Self { rows, cols, squared, .. } = *self;
        let side = rows.min(cols);
        let operands =
            if self.is_tall() { [transposed(squared), plain(x)] } else { [plain(x), plain(squared)] };
        self.multiply(gpu, [cols, rows, side], operands, out)
    }

    /// Multiplies all matrices of the batch, which are column-major to the library.
    fn multiply(
        &self,
        gpu: &Cuda,
        [m, n, k]: [usize; 3],
        [a, b]: [Operand<'_>; 2],
        c: Slice<'_>,
    ) -> Result<()> {
        let call = GemmCall { m, n, k, a, b, epilogue: Epilogue::None, c, accumulate: false };
        // SAFETY: every operand has `count` matrices of these sizes, and c is none of the inputs.
        unsafe { gpu.gemm.run_batch(&call, self.batch) }
    }
}

pub(super) fn row_moments(gpu: &Gpu, a: MuonRowMoments<'_>) -> Result<()> {
    gpu.expect_act(a.update, a.update.len());
    expect(a.v, DType::F32, a.v.len());
    expect(a.moments, DType::F32, a.moments.len());
    let rows = a.moments.len() / 2;
    expect_pieces(a.pieces, [Some(a.v.len()), Some(a.update.len()), Some(rows)]);
    a.conditions.check();
    let StepConditions { grad_norm_sq, loss, skipped, skip_limit } = a.conditions;
    let tensors: &[Arg] = args![a.pieces.entries().all(), a.update, a.v, a.moments, rows];
    let conditions: &[Arg] = args![grad_norm_sq, loss, skipped, a.beta2, skip_limit];
    // SAFETY: checked above; rows that begin in a piece are whole among the packed updates.
    unsafe { gpu.launch("muon_row_moments", launch(gpu, a.pieces), &[tensors, conditions].concat()) }
}

pub(super) fn row_factors(gpu: &Gpu, a: MuonRowFactors<'_>) -> Result<()> {
    expect(a.moments, DType::F32, a.moments.len());
    let rows = a.moments.len() / 2;
    expect_pieces(a.matrices, [None, None, Some(rows)]);
    let args = args![a.matrices.entries().all(), a.moments, rows, ROW_EPS];
    // SAFETY: checked above.
    unsafe { gpu.launch("muon_row_factors", Launch::blocks(a.matrices.count, BLOCK_THREADS), args) }
}

pub(super) fn update(gpu: &Gpu, a: MuonUpdate<'_>) -> Result<()> {
    let len = a.params.len();
    gpu.expect_act(a.update, a.update.len());
    expect(a.params, DType::F32, len);
    if let Some(work) = a.work {
        expect(work, DType::Bf16, len);
    }
    if let Some(factors) = a.row_factors {
        expect(factors, DType::F32, factors.len());
    }
    expect_pieces(a.pieces, [Some(len), Some(a.update.len()), a.row_factors.map(Slice::len)]);
    expect(a.scalars, DType::F32, scalar::COUNT);
    a.conditions.check();
    let StepConditions { grad_norm_sq, loss, skipped, skip_limit } = a.conditions;
    let tensors: &[Arg] =
        args![a.pieces.entries().all(), a.update, a.params, a.work, a.row_factors, a.scalars];
    let rest: &[Arg] = args![grad_norm_sq, loss, skipped, a.weight_decay, a.cautious, skip_limit];
    // SAFETY: checked above.
    unsafe { gpu.launch("muon_update", launch(gpu, a.pieces), &[tensors, rest].concat()) }
}
