//! Muon on threads.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::{EPS, MARGIN, MuonMomentum, MuonUpdate, Orthogonalize, POLAR_EXPRESS, StepConditions};
use crate::cpu::gemm::{Mat, blocked_gemm};
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};
use crate::ops::adamw::{DECAY_CHUNK, MUON_FLAG, scalar};

/// Elements per task: a multiple of [`DECAY_CHUNK`].
const BLOCK: usize = 256 * DECAY_CHUNK;

/// Returns the norm of the gradients if the step is applied.
fn applied_norm(a: &Access, conditions: StepConditions<'_>) -> Option<f32> {
    let StepConditions { grad_norm_sq, loss, skipped, skip_limit } = conditions;
    let [norm_sq, loss, skipped] = [grad_norm_sq, loss, skipped].map(|x| a.read(x, 1)[0]);
    (norm_sq.is_finite() && loss.is_finite() && skipped < skip_limit).then(|| norm_sq.sqrt())
}

pub(super) fn momentum(t: &Threads, args: MuonMomentum<'_>) {
    let MuonMomentum { flags, momentum, clip, .. } = args;
    let (a, len) = (Access::new("muon_momentum"), args.grads.len());
    assert!(flags.dtype() == DType::U8 && flags.len() == len.div_ceil(DECAY_CHUNK), "muon: {flags:?}");
    let (grads, flags) = (a.read(args.grads, len), a.read_bytes(flags));
    let (m, update) = (a.write(args.m, len), a.write(args.update, len));
    let Some(norm) = applied_norm(&a, args.conditions) else { return };
    let clip = if clip > 0.0 && norm > clip { clip / norm } else { 1.0 };
    t.run(|| {
        let moments = m.par_chunks_mut(BLOCK).zip(update.par_chunks_mut(BLOCK));
        let inputs = grads.par_chunks(BLOCK).zip(flags.par_chunks(BLOCK / DECAY_CHUNK));
        moments.zip(inputs).for_each(|((m, update), (grads, flags))| {
            simd!({
                let chunks = m.chunks_mut(DECAY_CHUNK).zip(update.chunks_mut(DECAY_CHUNK));
                let chunks = chunks.zip(grads.chunks(DECAY_CHUNK)).zip(flags);
                for (((m, update), grads), _) in chunks.filter(|(_, flag)| **flag == MUON_FLAG) {
                    for ((m, update), g) in m.iter_mut().zip(update).zip(grads) {
                        let g = g * clip;
                        *m = momentum * *m + (1.0 - momentum) * g;
                        *update = (1.0 - momentum) * g + momentum * *m;
                    }
                }
            });
        });
    });
}

pub(super) fn orthogonalize(t: &Threads, args: Orthogonalize<'_>) {
    let Orthogonalize { rows, cols, x } = args;
    let a = Access::new("orthogonalize");
    let x = a.write(x, rows * cols);
    let norm = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    #[expect(clippy::cast_possible_truncation, reason = "the operations compute in f32")]
    let factor = 1.0 / (MARGIN * norm as f32 + EPS);
    x.iter_mut().for_each(|x| *x *= factor);
    let (side, tall) = (rows.min(cols), rows > cols);
    let (mut gram, mut squared) = (vec![0.0; side * side], vec![0.0; side * side]);
    let mut product = vec![0.0; rows * cols];
    for [a, b, c] in POLAR_EXPRESS {
        let matrix = Mat::new(x, rows, cols);
        let [left, right] = if tall { [matrix.t(), matrix] } else { [matrix, matrix.t()] };
        blocked_gemm(t, &mut gram, left, right);
        let symmetric = Mat::new(&gram, side, side);
        blocked_gemm(t, &mut squared, symmetric, symmetric.t());
        for (i, (squared, gram)) in squared.iter_mut().zip(&gram).enumerate() {
            let diagonal = if i / side == i % side { a } else { 0.0 };
            *squared = b * gram + c * *squared + diagonal;
        }
        let polynomial = Mat::new(&squared, side, side);
        let [left, right] = if tall { [matrix, polynomial.t()] } else { [polynomial, matrix] };
        blocked_gemm(t, &mut product, left, right);
        x.copy_from_slice(&product);
    }
}

pub(super) fn update(t: &Threads, args: MuonUpdate<'_>) {
    let MuonUpdate { factor, weight_decay, cautious, .. } = args;
    let (a, len) = (Access::new("muon_update"), args.params.len());
    assert!(args.work.is_none(), "muon: the CPU computes with the master weights");
    let (params, update) = (a.write(args.params, len), a.read(args.update, len));
    let rate = a.read(args.scalars, scalar::COUNT)[scalar::MUON_LEARNING_RATE];
    if applied_norm(&a, args.conditions).is_none() {
        return;
    }
    t.run(|| {
        params.par_chunks_mut(BLOCK).zip(update.par_chunks(BLOCK)).for_each(|(params, update)| {
            simd!({
                for (p, u) in params.iter_mut().zip(update) {
                    let decay = if !cautious || u * *p >= 0.0 { weight_decay } else { 0.0 };
                    *p -= rate * (factor * u + decay * *p);
                }
            });
        });
    });
}
