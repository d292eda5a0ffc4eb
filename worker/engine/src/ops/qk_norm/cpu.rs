//! Norm of queries and keys on threads; the rotation is a pass of its own. Sums over rows are formed per task and added
//! in order.

use rayon::prelude::*;

use super::{QkNormBackward, QkNormForward, QkNorms};
use crate::cpu::math::{self, simd};
use crate::cpu::{Access, Threads};
use crate::ops::rope::{self, Rotation};
use crate::ops::{Accumulate, Documents, reduce};

/// Rows per task.
const TASK_ROWS: usize = 64;

/// The norm of the queries, or of the keys.
#[derive(Clone, Copy)]
struct Norm<'a> {
    /// Elements that are normalised together.
    width: usize,
    gamma: &'a [f32],
    eps: f32,
    offset: f32,
}

impl Norm<'_> {
    /// Returns `1 / sqrt(mean(x^2) + eps)`.
    #[inline(always)]
    fn scale(&self, x: &[f32]) -> f32 {
        1.0 / (math::dot(x, x) / self.width as f32 + self.eps).sqrt()
    }

    /// `y = x r (offset + gamma)`.
    #[inline(always)]
    fn forward(&self, x: &[f32], y: &mut [f32]) {
        for (x, y) in x.chunks_exact(self.width).zip(y.chunks_exact_mut(self.width)) {
            let scale = self.scale(x);
            for ((y, x), gamma) in y.iter_mut().zip(x).zip(self.gamma) {
                *y = x * scale * (self.offset + gamma);
            }
        }
    }

    /// Replaces the gradients `dy` of y by those of x, and adds to `dgamma`.
    #[inline(always)]
    fn backward(&self, x: &[f32], dy: &mut [f32], dgamma: &mut [f32]) {
        let (gamma, dgamma) = (&self.gamma[..self.width], &mut dgamma[..self.width]);
        for (x, dy) in x.chunks_exact(self.width).zip(dy.chunks_exact_mut(self.width)) {
            let scale = self.scale(x);
            let mean_gx = math::sum(self.width, |i| dy[i] * (self.offset + gamma[i]) * x[i]) * scale
                / self.width as f32;
            for i in 0..self.width {
                let (normed, g) = (x[i] * scale, dy[i] * (self.offset + gamma[i]));
                dgamma[i] += dy[i] * normed;
                // dx = r (g - xh mean(g xh))
                dy[i] = scale * (g - normed * mean_gx);
            }
        }
    }
}

/// Returns the norms of the queries and of the keys.
fn norms<'a>(a: &'a Access, norms: QkNorms<'a>) -> [Norm<'a>; 2] {
    let QkNorms { shape, kind, eps, offset, q_gamma, k_gamma, .. } = norms;
    let [q, k] = kind.gammas(shape);
    [(q_gamma, q), (k_gamma, k)].map(|(gamma, width)| Norm {
        width,
        gamma: a.read(gamma, width),
        eps,
        offset,
    })
}

pub(crate) fn forward(t: &Threads, args: QkNormForward<'_>) {
    let (a, s) = (Access::new("qk_norm_forward"), args.norms.shape);
    let (rows, row) = (s.batch * s.seq, s.qkv_width());
    let [q_norm, k_norm] = norms(&a, args.norms);
    let (qkv, out) = (a.read(args.qkv, rows * row), a.write(args.out, rows * row));
    let (keys, values) = (s.heads * s.width, (s.heads + s.kv_heads) * s.width);
    t.run(|| {
        out.par_chunks_mut(TASK_ROWS * row).zip(qkv.par_chunks(TASK_ROWS * row)).for_each(|(out, qkv)| {
            simd!({
                for (out, qkv) in out.chunks_exact_mut(row).zip(qkv.chunks_exact(row)) {
                    q_norm.forward(&qkv[..keys], &mut out[..keys]);
                    k_norm.forward(&qkv[keys..values], &mut out[keys..values]);
                    out[values..].copy_from_slice(&qkv[values..]);
                }
            });
        });
    });
    if let Some(table) = args.norms.rope {
        let bounds = Documents::read(args.norms.documents, &a, rows, s.seq);
        rope::cpu(t, s, out, a.read(table, s.seq * s.width), bounds, Rotation::Forward);
    }
}

pub(crate) fn backward(t: &Threads, args: QkNormBackward<'_>) {
    let (a, s) = (Access::new("qk_norm_backward"), args.norms.shape);
    let (rows, row) = (s.batch * s.seq, s.qkv_width());
    let [q_norm, k_norm] = norms(&a, args.norms);
    let (q_len, k_len) = (q_norm.width, k_norm.width);
    let (dq_gamma, dk_gamma) = (a.write(args.dq_gamma, q_len), a.write(args.dk_gamma, k_len));
    let (qkv, dqkv) = (a.read(args.qkv, rows * row), a.write(args.dqkv, rows * row));
    if let Some(table) = args.norms.rope {
        let bounds = Documents::read(args.norms.documents, &a, rows, s.seq);
        rope::cpu(t, s, dqkv, a.read(table, s.seq * s.width), bounds, Rotation::Back);
    }
    let (keys, values) = (s.heads * s.width, (s.heads + s.kv_heads) * s.width);
    let partials: (Vec<Vec<f32>>, Vec<Vec<f32>>) = t.run(|| {
        let tasks = dqkv.par_chunks_mut(TASK_ROWS * row).zip(qkv.par_chunks(TASK_ROWS * row));
        tasks
            .map(|(dqkv, qkv)| {
                let (mut dq_gamma, mut dk_gamma) = (vec![0.0; q_len], vec![0.0; k_len]);
                simd!({
                    for (dqkv, qkv) in dqkv.chunks_exact_mut(row).zip(qkv.chunks_exact(row)) {
                        q_norm.backward(&qkv[..keys], &mut dqkv[..keys], &mut dq_gamma);
                        k_norm.backward(&qkv[keys..values], &mut dqkv[keys..values], &mut dk_gamma);
                    }
                });
                (dq_gamma, dk_gamma)
            })
            .unzip()
    });
    let accumulate = args.acc == Accumulate::Add;
    reduce::cpu::add_partials(&partials.0, dq_gamma, accumulate);
    reduce::cpu::add_partials(&partials.1, dk_gamma, accumulate);
}
