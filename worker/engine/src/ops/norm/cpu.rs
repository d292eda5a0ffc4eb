//! Norms on threads. Sums over rows are formed per task and added in order.

use rayon::prelude::*;

use super::{NormBackward, NormForward, NormKind, NormShape, Residual};
use crate::cpu::math::{self, simd};
use crate::cpu::{Access, Threads};
use crate::ops::{Accumulate, reduce};

/// Rows per task.
const NORM_TASK_ROWS: usize = 64;

/// Operands of the residual addition: branch and sum, or the stream.
enum Added<'a> {
    Nothing,
    Before(&'a [f32], &'a mut [f32]),
    After(&'a [f32]),
}

pub(crate) fn forward(t: &Threads, args: NormForward<'_>) {
    let (a, s) = (Access::new("norm_forward"), args.shape);
    let (len, block) = (s.rows * s.cols, NORM_TASK_ROWS * s.cols);
    let (gamma, beta) = (a.read(args.gamma, s.cols), args.beta.map(|beta| a.read(beta, s.cols)));
    let (y, stats, x) = (a.write(args.y, len), a.write(args.stats, s.stats()), a.read(args.x, len));
    let residual = match args.residual {
        Residual::None => Added::Nothing,
        Residual::Before(add) => Added::Before(a.read(add.branch, len), a.write(add.sum, len)),
        Residual::After(stream) => Added::After(a.read(stream, len)),
    };
    let (means, scales) = split_stats(s, stats);
    t.run(|| {
        let rows = y
            .par_chunks_mut(block)
            .zip(scales.par_chunks_mut(NORM_TASK_ROWS))
            .zip(means.par_chunks_mut(NORM_TASK_ROWS));
        match residual {
            Added::Nothing => rows.zip(x.par_chunks(block)).for_each(|(((y, scales), means), x)| {
                simd!(forward_rows(s, x, gamma, beta, y, means, scales));
            }),
            // The sum is formed block by block and normalised while it is in cache.
            Added::Before(branch, sum) => {
                let inputs = x.par_chunks(block).zip(branch.par_chunks(block)).zip(sum.par_chunks_mut(block));
                rows.zip(inputs).for_each(|(((y, scales), means), ((x, branch), sum))| {
                    simd!({
                        for ((sum, x), branch) in sum.iter_mut().zip(x).zip(branch) {
                            *sum = x + branch;
                        }
                        forward_rows(s, sum, gamma, beta, y, means, scales);
                    });
                });
            }
            Added::After(stream) => {
                let inputs = x.par_chunks(block).zip(stream.par_chunks(block));
                rows.zip(inputs).for_each(|(((y, scales), means), (x, stream))| {
                    simd!({
                        forward_rows(s, x, gamma, beta, y, means, scales);
                        y.iter_mut().zip(stream).for_each(|(y, stream)| *y += stream);
                    });
                });
            }
        }
    });
}

/// Splits statistics into means, if the norm has them, and reciprocal deviations.
fn split_stats(s: NormShape, stats: &mut [f32]) -> (Means<'_>, &mut [f32]) {
    match s.kind {
        NormKind::Layer => {
            let (means, scales) = stats.split_at_mut(s.rows);
            (Means(Some(means), s.rows), scales)
        }
        NormKind::Rms => (Means(None, s.rows), stats),
    }
}

/// The means of a number of rows; `None` if the norm has no means.
struct Means<'a>(Option<&'a mut [f32]>, usize);

impl<'a> Means<'a> {
    /// Splits the means into blocks of `rows` rows.
    fn par_chunks_mut(self, rows: usize) -> impl IndexedParallelIterator<Item = Option<&'a mut [f32]>> {
        let blocks: Vec<Option<&mut [f32]>> = match self.0 {
            Some(means) => means.chunks_mut(rows).map(Some).collect(),
            None => (0..self.1.div_ceil(rows)).map(|_| None).collect(),
        };
        blocks.into_par_iter()
    }
}

#[inline(always)]
fn forward_rows(
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
                    *y = (x - mean) * *scale * (s.offset + gamma);
                }
            }
            Some(beta) => {
                for (((y, x), gamma), beta) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
                    *y = (x - mean) * *scale * (s.offset + gamma) + beta;
                }
            }
        }
    }
}

pub(crate) fn backward(t: &Threads, args: NormBackward<'_>) {
    let (a, s, add) = (Access::new("norm_backward"), args.shape, args.add_to_dx);
    let (len, block) = (s.rows * s.cols, NORM_TASK_ROWS * s.cols);
    let (gamma, stats) = (a.read(args.gamma, s.cols), a.read(args.stats, s.stats()));
    let (dgamma, dbeta) = (a.write(args.dgamma, s.cols), args.dbeta.map(|dbeta| a.write(dbeta, s.cols)));
    let dsum = args.dsum.map(|dsum| a.write(dsum, s.cols));
    let (x, dy, dx) = (a.read(args.x, len), a.read(args.dy, len), a.write(args.dx, len));
    let (means, scales) = match s.kind {
        NormKind::Layer => (Some(&stats[..s.rows]), &stats[s.rows..]),
        NormKind::Rms => (None, stats),
    };
    let beta_cols = if dbeta.is_some() { s.cols } else { 0 };
    let partials: Vec<(Vec<f32>, Vec<f32>)> = t.run(|| {
        dx.par_chunks_mut(block)
            .zip(x.par_chunks(block))
            .zip(dy.par_chunks(block))
            .zip(scales.par_chunks(NORM_TASK_ROWS))
            .enumerate()
            .map(|(index, (((dx, x), dy), scales))| {
                let means = means.map(|means| &means[index * NORM_TASK_ROWS..]);
                let rows = Rows { x, gamma, means, scales, dy };
                let (mut dgamma, mut dbeta) = (vec![0.0; s.cols], vec![0.0; beta_cols]);
                simd!(backward_rows(s, rows, dx, add, &mut dgamma, &mut dbeta));
                (dgamma, dbeta)
            })
            .collect()
    });
    let (dgammas, dbetas): (Vec<_>, Vec<_>) = partials.into_iter().unzip();
    let accumulate = args.acc == Accumulate::Add;
    reduce::cpu::add_partials(&dgammas, dgamma, accumulate);
    if let Some(dbeta) = dbeta {
        reduce::cpu::add_partials(&dbetas, dbeta, accumulate);
    }
    if let Some(dsum) = dsum {
        reduce::cpu::column_sums(t, dx, s.cols, dsum, accumulate);
    }
}

/// Inputs of backward for some rows.
#[derive(Clone, Copy)]
struct Rows<'a> {
    x: &'a [f32],
    gamma: &'a [f32],
    means: Option<&'a [f32]>,
    scales: &'a [f32],
    dy: &'a [f32],
}

#[inline(always)]
fn backward_rows(
    s: NormShape,
    rows: Rows<'_>,
    dx: &mut [f32],
    add: bool,
    dgamma: &mut [f32],
    dbeta: &mut [f32],
) {
    let (cols, count) = (s.cols, s.cols as f32);
    let keep = if add { 1.0 } else { 0.0 };
    let (gamma, dgamma) = (&rows.gamma[..cols], &mut dgamma[..cols]);
    for row in 0..rows.scales.len() {
        let (x, dy) = (&rows.x[row * cols..][..cols], &rows.dy[row * cols..][..cols]);
        let dx = &mut dx[row * cols..][..cols];
        let (mean, scale) = (rows.means.map_or(0.0, |means| means[row]), rows.scales[row]);
        let g = |i: usize| dy[i] * (s.offset + gamma[i]);
        let mean_g = if rows.means.is_some() { math::sum(cols, g) / count } else { 0.0 };
        let mean_gx = math::sum(cols, |i| g(i) * (x[i] - mean)) * scale / count;
        for i in 0..cols {
            let normed = (x[i] - mean) * scale;
            // If dx is overwritten, its contents are arbitrary, even NaN.
            let kept = if add { dx[i] * keep } else { 0.0 };
            // dx = r (g - mean(g) - xh mean(g xh))
            dx[i] = kept + scale * (g(i) - mean_g - normed * mean_gx);
            dgamma[i] += dy[i] * normed;
        }
        for (sum, dy) in dbeta.iter_mut().zip(dy) {
            *sum += dy;
        }
    }
}
