//! AdamW (Loshchilov and Hutter, 2019) over the flat arena; the formula is with [`Backend::adamw`](crate::Backend).

use rayon::prelude::*;

use super::math::simd;
use super::threads::Threads;
use crate::shapes::{AdamWShape, DECAY_CHUNK, scalar};

/// Elements per task: a multiple of [`DECAY_CHUNK`].
const BLOCK: usize = 256 * DECAY_CHUNK;

/// The arenas of one step.
pub(super) struct Arenas<'a> {
    pub(super) params: &'a mut [f32],
    pub(super) grads: &'a [f32],
    pub(super) m: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    pub(super) decay: &'a [u8],
}

pub(super) fn step(t: &Threads, s: AdamWShape, arenas: Arenas<'_>, scalars: &[f32], square_sum: f32) {
    let Arenas { params, grads, m, v, decay } = arenas;
    let norm = square_sum.sqrt();
    let clip = if s.clip > 0.0 && norm > s.clip { s.clip / norm } else { 1.0 };
    let rate = scalars[scalar::LEARNING_RATE];
    let (c1, c2) = (scalars[scalar::CORRECTION1], scalars[scalar::CORRECTION2]);
    t.run(|| {
        params
            .par_chunks_mut(BLOCK)
            .zip(grads.par_chunks(BLOCK))
            .zip(m.par_chunks_mut(BLOCK))
            .zip(v.par_chunks_mut(BLOCK))
            .zip(decay.par_chunks(BLOCK / DECAY_CHUNK))
            .for_each(|((((params, grads), m), v), decay)| {
                simd!({
                    let chunks = params
                        .chunks_mut(DECAY_CHUNK)
                        .zip(grads.chunks(DECAY_CHUNK))
                        .zip(m.chunks_mut(DECAY_CHUNK).zip(v.chunks_mut(DECAY_CHUNK)))
                        .zip(decay);
                    for (((params, grads), (m, v)), decay) in chunks {
                        let decay = if *decay == 1 { rate * s.weight_decay } else { 0.0 };
                        for (((p, g), m), v) in params.iter_mut().zip(grads).zip(m).zip(v) {
                            let g = g * clip;
                            *m = s.beta1 * *m + (1.0 - s.beta1) * g;
                            *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
                            let update = rate * (*m * c1) / ((*v * c2).sqrt() + s.eps);
                            *p -= update + decay * *p;
                        }
                    }
                });
            });
    });
}
