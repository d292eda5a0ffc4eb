//! AdamW on threads.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::{AdamWStep, GROUP_CHUNK, MUON_GROUP, scalar};
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};

/// Elements per task: a multiple of [`GROUP_CHUNK`].
const ADAMW_BLOCK: usize = 256 * GROUP_CHUNK;

pub(crate) fn step(t: &Threads, args: AdamWStep<'_>) {
    let (a, c, len) = (Access::new("adamw"), args.config, args.params.len());
    assert!(args.work.is_none(), "adamw: the CPU computes with the master weights");
    let groups = args.groups;
    assert!(groups.dtype() == DType::U8 && groups.len() == len.div_ceil(GROUP_CHUNK), "adamw: {groups:?}");
    let (params, grads) = (a.write(args.params, len), a.read(args.grads, len));
    let (m, v, groups) = (a.write(args.m, len), a.write(args.v, len), a.read_bytes(groups));
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
    let (rates, decays) = (&scalars[scalar::LEARNING_RATES..], &scalars[scalar::DECAYS..]);
    let (c1, c2) = (scalars[scalar::CORRECTION1], scalars[scalar::CORRECTION2]);
    t.run(|| {
        params
            .par_chunks_mut(ADAMW_BLOCK)
            .zip(grads.par_chunks(ADAMW_BLOCK))
            .zip(m.par_chunks_mut(ADAMW_BLOCK))
            .zip(v.par_chunks_mut(ADAMW_BLOCK))
            .zip(groups.par_chunks(ADAMW_BLOCK / GROUP_CHUNK))
            .for_each(|((((params, grads), m), v), groups)| {
                simd!({
                    let chunks = params
                        .chunks_mut(GROUP_CHUNK)
                        .zip(grads.chunks(GROUP_CHUNK))
                        .zip(m.chunks_mut(GROUP_CHUNK).zip(v.chunks_mut(GROUP_CHUNK)))
                        .zip(groups)
                        .filter(|(_, group)| **group != MUON_GROUP);
                    for (((params, grads), (m, v)), group) in chunks {
                        let (rate, decay) = (rates[usize::from(*group)], decays[usize::from(*group)]);
                        for (((p, g), m), v) in params.iter_mut().zip(grads).zip(m).zip(v) {
                            let g = g * clip;
                            *m = c.beta1 * *m + (1.0 - c.beta1) * g;
                            *v = c.beta2 * *v + (1.0 - c.beta2) * g * g;
                            // p -= lr (c1 m) / (sqrt(c2 v) + eps) + decay p
                            let update = rate * (*m * c1) / ((*v * c2).sqrt() + c.eps);
                            *p -= update + decay * *p;
                        }
                    }
                });
            });
    });
}
