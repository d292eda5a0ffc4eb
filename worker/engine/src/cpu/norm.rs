//! LayerNorm and RMSNorm over rows of C elements.
//!
//! With `xh = (x - mean) r`, `r = 1 / sqrt(var + eps)` (for RMSNorm mean is 0 and var the mean square):
//! `y = xh gamma + beta`. Backward, with `g = dy gamma`:
//! `dx = r (g - mean(g) - xh mean(g xh))` (RMSNorm without `mean(g)`), `dgamma = sum dy xh`, `dbeta = sum dy`.

use rayon::prelude::*;

use super::linear::add_partials;
use super::math::{self, simd};
use super::threads::Threads;
use crate::shapes::{Accumulate, NormKind, NormShape};

/// Rows per task; partial sums of parameter gradients are formed per task and added in order.
const ROWS: usize = 64;

/// What backward of one block of rows gives for gamma and beta.
type Partials = (Vec<f32>, Vec<f32>);

#[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
pub(super) fn fwd(
    t: &Threads,
    s: NormShape,
    x: &[f32],
    branch: Option<(&[f32], &mut [f32])>,
    gamma: &[f32],
    beta: Option<&[f32]>,
    y: &mut [f32],
    stats: &mut [f32],
) {
    let cols = s.cols;
    let (means, scales) = split_stats(s, stats);
    // The sum of both inputs is formed first, block by block, while it is in cache.
    let (x, sums) = match branch {
        None => (x, None),
        Some((branch, sum)) => (x, Some((branch, sum))),
    };
    let block = ROWS * cols;
    t.run(|| {
        let rows = y.par_chunks_mut(block).zip(scales.par_chunks_mut(ROWS)).zip(means.par_chunks_mut(ROWS));
        match sums {
            None => rows.zip(x.par_chunks(block)).for_each(|(((y, scales), means), x)| {
                simd!(rows_fwd(s, x, gamma, beta, y, means, scales));
            }),
            Some((branch, sum)) => {
                let inputs = x.par_chunks(block).zip(branch.par_chunks(block)).zip(sum.par_chunks_mut(block));
                rows.zip(inputs).for_each(|(((y, scales), means), ((x, branch), sum))| {
                    simd!({
                        for ((sum, x), branch) in sum.iter_mut().zip(x).zip(branch) {
                            *sum = x + branch;
                        }
                        rows_fwd(s, sum, gamma, beta, y, means, scales);
                    });
                });
            }
        }
    });
}

/// Means (a dummy of one element per row for RMSNorm would cost memory: its kind has none) and reciprocal deviations.
fn split_stats(s: NormShape, stats: &mut [f32]) -> (Means<'_>, &mut [f32]) {
    match s.kind {
        NormKind::Layer => {
            let (means, scales) = stats.split_at_mut(s.rows);
            (Means(Some(means), s.rows), scales)
        }
        NormKind::Rms => (Means(None, s.rows), stats),
    }
}

/// The means of all rows, if this kind of norm has any.
struct Means<'a>(Option<&'a mut [f32]>, usize);

impl<'a> Means<'a> {
    /// The means of each block of `rows` rows.
    fn par_chunks_mut(self, rows: usize) -> impl IndexedParallelIterator<Item = Option<&'a mut [f32]>> {
        let blocks: Vec<Option<&mut [f32]>> = match self.0 {
            Some(means) => means.chunks_mut(rows).map(Some).collect(),
            None => (0..self.1.div_ceil(rows)).map(|_| None).collect(),
        };
        blocks.into_par_iter()
    }
}

#[inline(always)]
fn rows_fwd(
    s: NormShape,
    x: &[f32],
    gamma: &[f32],
    beta: Option<&[f32]>,
    y: &mut [f32],
    mut means: Option<&mut [f32]>,
    scales: &mut [f32],
) {
    let count = s.cols as f32;
    for (row, ((x, y), scale)) in
        x.chunks_exact(s.cols).zip(y.chunks_exact_mut(s.cols)).zip(scales).enumerate()
    {
        let mean = match &mut means {
            None => 0.0,
            Some(means) => {
                means[row] = math::total(x) / count;
                means[row]
            }
        };
        let variance = math::sum(s.cols, |i| (x[i] - mean) * (x[i] - mean)) / count;
        *scale = 1.0 / (variance + s.eps).sqrt();
        match beta {
            None => {
                for ((y, x), gamma) in y.iter_mut().zip(x).zip(gamma) {
                    *y = (x - mean) * *scale * gamma;
                }
            }
            Some(beta) => {
                for (((y, x), gamma), beta) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
                    *y = (x - mean) * *scale * gamma + beta;
                }
            }
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
pub(super) fn bwd(
    t: &Threads,
    s: NormShape,
    x: &[f32],
    gamma: &[f32],
    stats: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    add: bool,
    dgamma: &mut [f32],
    dbeta: Option<&mut [f32]>,
    acc: Accumulate,
) {
    let block = ROWS * s.cols;
    let (means, scales) = match s.kind {
        NormKind::Layer => (Some(&stats[..s.rows]), &stats[s.rows..]),
        NormKind::Rms => (None, stats),
    };
    let with_beta = dbeta.is_some();
    let partials: Vec<Partials> = t.run(|| {
        dx.par_chunks_mut(block)
            .zip(x.par_chunks(block))
            .zip(dy.par_chunks(block))
            .zip(scales.par_chunks(ROWS))
            .enumerate()
            .map(|(index, (((dx, x), dy), scales))| {
                let means = means.map(|means| &means[index * ROWS..]);
                let mut partial = (vec![0.0; s.cols], vec![0.0; if with_beta { s.cols } else { 0 }]);
                simd!(rows_bwd(s, x, gamma, means, scales, dy, dx, add, &mut partial));
                partial
            })
            .collect()
    });
    let (gammas, betas): (Vec<_>, Vec<_>) = partials.into_iter().unzip();
    add_partials(&gammas, dgamma, acc == Accumulate::Add);
    if let Some(dbeta) = dbeta {
        add_partials(&betas, dbeta, acc == Accumulate::Add);
    }
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
fn rows_bwd(
    s: NormShape,
    x: &[f32],
    gamma: &[f32],
    means: Option<&[f32]>,
    scales: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    add: bool,
    (dgamma, dbeta): &mut Partials,
) {
    let (cols, count) = (s.cols, s.cols as f32);
    let keep = if add { 1.0 } else { 0.0 };
    let (gamma, dgamma) = (&gamma[..cols], &mut dgamma[..cols]);
    for row in 0..scales.len() {
        let (x, dy) = (&x[row * cols..][..cols], &dy[row * cols..][..cols]);
        let dx = &mut dx[row * cols..][..cols];
        let (mean, scale) = (means.map_or(0.0, |means| means[row]), scales[row]);
        let mean_g = if means.is_some() { math::dot(dy, gamma) / count } else { 0.0 };
        let mean_gx = math::sum(cols, |i| dy[i] * gamma[i] * (x[i] - mean)) * scale / count;
        for i in 0..cols {
            let normed = (x[i] - mean) * scale;
            // What dx held may be anything, even NaN, unless it is to be added to.
            let kept = if add { dx[i] * keep } else { 0.0 };
            dx[i] = kept + scale * (dy[i] * gamma[i] - mean_g - normed * mean_gx);
            dgamma[i] += dy[i] * normed;
        }
        for (sum, dy) in dbeta.iter_mut().zip(dy) {
            *sum += dy;
        }
    }
}
