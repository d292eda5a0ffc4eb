//! AdamW on threads.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::{AdamWStep, DECAY_CHUNK, MUON_FLAG, scalar};
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};

/// Elements per task: a multiple of [`DECAY_CHUNK`].
const ADAMW_BLOCK: usize = 256 * DECAY_CHUNK;

pub(crate) fn step(t: &Threads, args: AdamWStep<'_>) {
    let (a, c, len) = (Access::new("adamw"), args.config, args.params.len());
    assert!(args.work.is_none(), "adamw: the CPU computes with the master weights");
    let decay = args.decay;
    assert!(decay.dtype() == DType::U8 && decay.len() == len.div_ceil(DECAY_CHUNK), "adamw: {decay:?}");
    let (params, grads) = (a.write(args.params, len), a.read(args.grads, len));
    let (m, v, decay) = (a.write(args.m, len), a.write(args.v, len), a.read_bytes(decay));
    let scalars = a.read(args.scalars, scalar::COUNT);
    let (norm_sq, loss) = (a.read(args.grad_norm_sq, 1)[0], a.read(args.loss, 1)[0]);
    let skipped = &mut a.write(args.skipped, 1)[0];
    if !(norm_sq.is_finite() && loss.is_finite()) {
        *skipped = (*skipped + 1.0).min(c.skip_limit);
        return;
    }
    if *skipped >= c.skip_limit {
        return;
    }
    *skipped = 0.0;
    let norm = norm_sq.sqrt();
    // clip = min(1, max_norm / |g|)
    let clip = if c.clip > 0.0 && norm > c.clip { c.clip / norm } else { 1.0 };
    let rate = scalars[scalar::LEARNING_RATE];
    let (c1, c2) = (scalars[scalar::CORRECTION1], scalars[scalar::CORRECTION2]);
    t.run(|| {
        params
            .par_chunks_mut(ADAMW_BLOCK)
            .zip(grads.par_chunks(ADAMW_BLOCK))
            .zip(m.par_chunks_mut(ADAMW_BLOCK))
            .zip(v.par_chunks_mut(ADAMW_BLOCK))
            .zip(decay.par_chunks(ADAMW_BLOCK / DECAY_CHUNK))
            .for_each(|((((params, grads), m), v), decay)| {
                simd!({
                    let chunks = params
                        .chunks_mut(DECAY_CHUNK)
                        .zip(grads.chunks(DECAY_CHUNK))
                        .zip(m.chunks_mut(DECAY_CHUNK).zip(v.chunks_mut(DECAY_CHUNK)))
                        .zip(decay)
                        .filter(|(_, flag)| **flag != MUON_FLAG);
                    for (((params, grads), (m, v)), decay) in chunks {
                        let decay = if *decay == 1 { rate * c.weight_decay } else { 0.0 };
                        for (((p, g), m), v) in params.iter_mut().zip(grads).zip(m).zip(v) {
                            let g = g * clip;
                            *m = c.beta1 * *m + (1.0 - c.beta1) * g;
                            *v = c.beta2 * *v + (1.0 - c.beta2) * g * g;
                            // p -= lr (c1 m) / (sqrt(c2 v) + eps) + lr weight_decay p
                            let update = rate * (*m * c1) / ((*v * c2).sqrt() + c.eps);
                            *p -= update + decay * *p;
                        }
                    }
                });
            });
    });
}
