//! Muon on a GPU, except for products of matrices.

use xlaunch_pool::DType;

use super::{
    MuonMomentum, MuonPack, MuonPieces, MuonRowFactors, MuonRowMoments, MuonUpdate, ROW_EPS, StepConditions,
};
use crate::cuda::{Arg, BLOCK_THREADS, Gpu, Launch, VEC, args, expect, expect_grad, is_bf16};
use crate::error::Result;
use crate::ops::adamw::scalar;
use crate::tensor::Slice;

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
