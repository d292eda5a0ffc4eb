//! Muon on threads.

use rayon::prelude::*;

use super::{
    EPS, MARGIN, MuonMomentum, MuonPack, MuonPiece, MuonPieces, MuonRowFactors, MuonRowMoments, MuonUpdate,
    Orthogonalize, ROW_EPS, StepConditions, steps,
};
use crate::cpu::gemm::{Mat, blocked_gemm};
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};
use crate::ops::adamw::scalar;

/// Elements per task.
const BLOCK: usize = 1 << 14;

/// Returns the norm of the gradients if the step is applied.
fn applied_norm(a: &Access, conditions: StepConditions<'_>) -> Option<f32> {
    conditions.are_met(a).then(|| a.read(conditions.grad_norm_sq, 1)[0].sqrt())
}

fn read_pieces(a: &Access, pieces: &MuonPieces) -> Vec<MuonPiece> {
    MuonPieces::parse(a.read_bytes(pieces.entries().all()))
}

/// Nesterov's momentum.
#[derive(Clone, Copy)]
struct Momentum {
    decay: f32,
    clip: f32,
}

impl Momentum {
    /// Updates a moment and returns its update.
    #[inline(always)]
    fn step(self, m: &mut f32, g: f32) -> f32 {
        let (decay, g) = (self.decay, g * self.clip);
        *m = decay * *m + (1.0 - decay) * g;
        (1.0 - decay) * g + decay * *m
    }
}

pub(super) fn momentum(t: &Threads, args: MuonMomentum<'_>) {
    let MuonMomentum { packed_from, clip, .. } = args;
    let (a, len) = (Access::new("muon_momentum"), args.grads.len());
    let pieces = read_pieces(&a, args.pieces);
    let (grads, m) = (a.read(args.grads, len), a.write(args.m, len));
    let update = a.write(args.update, args.update.len());
    let Some(norm) = applied_norm(&a, args.conditions) else { return };
    let clip = if clip > 0.0 && norm > clip { clip / norm } else { 1.0 };
    let step = Momentum { decay: args.momentum, clip };
    for MuonPiece { at, packed, len, .. } in pieces {
        let (m, grads) = (&mut m[at..at + len], &grads[at..at + len]);
        let start = packed_from.map_or(Some(at), |from| packed.checked_sub(from));
        let update = start.and_then(|start| update.get_mut(start..start + len));
        let blocks = m.par_chunks_mut(BLOCK).zip(grads.par_chunks(BLOCK));
        t.run(|| match update {
            Some(update) => blocks.zip(update.par_chunks_mut(BLOCK)).for_each(|((m, grads), update)| {
                simd!({
                    for ((m, g), u) in m.iter_mut().zip(grads).zip(update) {
                        *u = step.step(m, *g);
                    }
                });
            }),
            None => blocks.for_each(|(m, grads)| {
                simd!({
                    for (m, g) in m.iter_mut().zip(grads) {
                        step.step(m, *g);
                    }
                });
            }),
        });
    }
}

pub(super) fn pack(_: &Threads, args: MuonPack<'_>) {
    let a = Access::new("muon_pack");
    let (from, to) = (a.read(args.from, args.from.len()), a.write(args.to, args.to.len()));
    for MuonPiece { at, packed, len, .. } in read_pieces(&a, args.pieces) {
        to[packed..packed + len].copy_from_slice(&from[at..at + len]);
    }
}

pub(super) fn orthogonalize(t: &Threads, args: Orthogonalize<'_>) {
    let Orthogonalize { rows, cols, x } = args;
    let a = Access::new("orthogonalize");
    let x = a.write(x, x.len());
    assert!(x.len().is_multiple_of(rows * cols), "orthogonalize: {} elements", x.len());
    let side = rows.min(cols);
    let mut squares = [(); 3].map(|()| vec![0.0; side * side]);
    let mut product = vec![0.0; rows * cols];
    for x in x.chunks_exact_mut(rows * cols) {
        one(t, (rows, cols), x, squares.each_mut().map(Vec::as_mut_slice), &mut product);
    }
}

/// Makes one matrix orthogonal.
fn one(
    t: &Threads,
    (rows, cols): (usize, usize),
    x: &mut [f32],
    [gram, first, second]: [&mut [f32]; 3],
    product: &mut [f32],
) {
    let norm = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    #[expect(clippy::cast_possible_truncation, reason = "the operations compute in f32")]
    let scale = 1.0 / (MARGIN * norm as f32 + EPS);
    x.iter_mut().for_each(|x| *x *= scale);
    let (side, tall) = (rows.min(cols), rows > cols);
    for group in steps((rows, cols)) {
        let matrix = Mat::new(x, rows, cols);
        let [left, right] = if tall { [matrix.t(), matrix] } else { [matrix, matrix.t()] };
        blocked_gemm(t, gram, left, right, false);
        polynomial(t, side, gram, group[0], first);
        let factor: &[f32] = if let Some(next) = group.get(1) {
            blocked_gemm(t, second, Mat::new(first, side, side), Mat::new(gram, side, side), false);
            blocked_gemm(t, gram, Mat::new(second, side, side), Mat::new(first, side, side), false);
            polynomial(t, side, gram, *next, second);
            blocked_gemm(t, gram, Mat::new(first, side, side), Mat::new(second, side, side), false);
            gram
        } else {
            first
        };
        let [left, right] = if tall {
            [matrix, Mat::new(factor, side, side)]
        } else {
            [Mat::new(factor, side, side), matrix]
        };
        blocked_gemm(t, product, left, right, false);
        x.copy_from_slice(product);
    }
}

/// `out = a I + b A + c A^2`.
fn polynomial(t: &Threads, side: usize, gram: &[f32], [a, b, c]: [f32; 3], out: &mut [f32]) {
    let symmetric = Mat::new(gram, side, side);
    blocked_gemm(t, out, symmetric, symmetric.t(), false);
    for (i, (out, gram)) in out.iter_mut().zip(gram).enumerate() {
        let diagonal = if i / side == i % side { a } else { 0.0 };
        *out = b * gram + c * *out + diagonal;
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "the kernel computes in f32"
)]
pub(super) fn row_moments(_: &Threads, args: MuonRowMoments<'_>) {
    let MuonRowMoments { beta2, .. } = args;
    let a = Access::new("muon_row_moments");
    let (update, v) = (a.read(args.update, args.update.len()), a.write(args.v, args.v.len()));
    let (squares, seconds) = a.write(args.moments, args.moments.len()).split_at_mut(args.moments.len() / 2);
    let is_applied = applied_norm(&a, args.conditions).is_some();
    for MuonPiece { at, packed, len, first, cols, row, .. } in read_pieces(&a, args.pieces) {
        for index in first.div_ceil(cols)..(first + len).div_ceil(cols) {
            let start = packed + index * cols - first;
            let values = update[start..start + cols].iter();
            let square = values.map(|u| f64::from(*u) * f64::from(*u)).sum::<f64>() / cols as f64;
            let moment = &mut v[at + index * cols - first];
            if is_applied {
                *moment = beta2 * *moment + (1.0 - beta2) * square as f32;
            }
            (squares[row + index], seconds[row + index]) = (square as f32, *moment);
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the kernel computes in f32")]
pub(super) fn row_factors(_: &Threads, args: MuonRowFactors<'_>) {
    let a = Access::new("muon_row_factors");
    let (squares, factors) = a.write(args.moments, args.moments.len()).split_at_mut(args.moments.len() / 2);
    for MuonPiece { len, cols, row, .. } in read_pieces(&a, args.matrices) {
        let rows = row..row + len / cols;
        let (squares, factors) = (&squares[rows.clone()], &mut factors[rows]);
        factors.iter_mut().for_each(|moment| *moment = 1.0 / (moment.sqrt() + ROW_EPS));
        let before: f64 = squares.iter().map(|square| f64::from(*square)).sum();
        let scaled = |(square, factor): (&f32, &f32)| f64::from(square * factor * factor);
        let after: f64 = squares.iter().zip(&*factors).map(scaled).sum();
        let kept = if after > 0.0 { (before / after).sqrt() as f32 } else { 0.0 };
        factors.iter_mut().for_each(|factor| *factor *= kept);
    }
}

pub(super) fn update(t: &Threads, args: MuonUpdate<'_>) {
    let MuonUpdate { weight_decay, cautious, .. } = args;
    let (a, len) = (Access::new("muon_update"), args.params.len());
    assert!(args.work.is_none(), "muon: the CPU computes with the master weights");
    let pieces = read_pieces(&a, args.pieces);
    let (params, update) = (a.write(args.params, len), a.read(args.update, args.update.len()));
    let row_factors = args.row_factors.map(|factors| a.read(factors, factors.len()));
    let rate = a.read(args.scalars, scalar::COUNT)[scalar::MUON_LEARNING_RATE];
    if applied_norm(&a, args.conditions).is_none() {
        return;
    }
    for MuonPiece { at, packed, len, first, cols, row, factor } in pieces {
        let (params, update) = (&mut params[at..at + len], &update[packed..packed + len]);
        let blocks = params.par_chunks_mut(BLOCK).zip(update.par_chunks(BLOCK)).enumerate();
        t.run(|| {
            blocks.for_each(|(block, (params, update))| {
                let decay = |u: f32, p: f32| if !cautious || u * p >= 0.0 { weight_decay } else { 0.0 };
                let Some(rows) = row_factors else {
                    simd!({
                        for (p, u) in params.iter_mut().zip(update) {
                            *p -= rate * (factor * u + decay(*u, *p) * *p);
                        }
                    });
                    return;
                };
                for (i, (p, u)) in params.iter_mut().zip(update).enumerate() {
                    let scaled = factor * rows[row + (first + block * BLOCK + i) / cols];
                    *p -= rate * (scaled * u + decay(*u, *p) * *p);
                }
            });
        });
    }
}
