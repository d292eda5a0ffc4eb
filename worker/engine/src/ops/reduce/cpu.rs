//! Reductions on threads: blocks of a fixed size, whose sums are added in order.

use rayon::prelude::*;

use super::{ColumnSum, Scale, SquaredNorm, Sum};
use crate::cpu::math::{self, simd};
use crate::cpu::{Access, Threads};
use crate::ops::Accumulate;

/// Elements per block of a sum.
const REDUCE_BLOCK: usize = 1 << 14;
/// Rows per block of a column sum.
const REDUCE_ROWS: usize = 128;

#[expect(clippy::cast_possible_truncation, reason = "the result is F32")]
pub(crate) fn sum(t: &Threads, args: Sum<'_>) {
    let a = Access::new("sum");
    let scale = match args.scale {
        Scale::Constant(scale) => scale,
        Scale::Memory(scale) => a.read(scale, 1)[0],
    };
    let total = (f64::from(scale) * blocks(t, a.read(args.x, args.x.len()), math::total)) as f32;
    let out = &mut a.write(args.out, 1)[0];
    *out = if args.acc == Accumulate::Add { *out + total } else { total };
}

#[expect(clippy::cast_possible_truncation, reason = "the result is F32")]
pub(crate) fn squared_norm(t: &Threads, args: SquaredNorm<'_>) {
    let a = Access::new("squared_norm");
    let x = a.read(args.x, args.x.len());
    a.write(args.out, 1)[0] = blocks(t, x, |block| math::dot(block, block)) as f32;
}

/// Returns the sum of `f` over blocks, in double precision.
fn blocks(t: &Threads, x: &[f32], f: impl Fn(&[f32]) -> f32 + Sync) -> f64 {
    let sums: Vec<f32> = t.run(|| x.par_chunks(REDUCE_BLOCK).map(|block| simd!(f(block))).collect());
    sums.into_iter().map(f64::from).sum()
}

pub(crate) fn column_sum(t: &Threads, args: ColumnSum<'_>) {
    let (a, add) = (Access::new("column_sum"), args.acc == Accumulate::Add);
    column_sums(t, a.read(args.x, args.rows * args.cols), args.cols, a.write(args.out, args.cols), add);
}

/// `out = sum of the rows of x`, added to the contents of `out` if `add`.
pub(crate) fn column_sums(t: &Threads, x: &[f32], cols: usize, out: &mut [f32], add: bool) {
    let partials: Vec<Vec<f32>> = t.run(|| {
        x.par_chunks(REDUCE_ROWS * cols)
            .map(|block| {
                let mut partial = vec![0.0; cols];
                simd!({
                    for row in block.chunks_exact(cols) {
                        partial.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                    }
                });
                partial
            })
            .collect()
    });
    add_partials(&partials, out, add);
}

/// `out = sum of partials`, added to the contents of `out` if `add`.
pub(crate) fn add_partials(partials: &[Vec<f32>], out: &mut [f32], add: bool) {
    if !add {
        out.fill(0.0);
    }
    for partial in partials {
        out.iter_mut().zip(partial).for_each(|(sum, value)| *sum += value);
    }
}
