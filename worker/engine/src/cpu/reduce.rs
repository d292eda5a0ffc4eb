//! Sums to one number, in blocks of fixed size whose results are added in order in double precision.

use rayon::prelude::*;

use super::math::{self, simd};
use super::threads::Threads;

/// Elements per block.
const BLOCK: usize = 1 << 14;

pub(super) fn total(t: &Threads, x: &[f32]) -> f64 {
    blocks(t, x, math::total)
}

pub(super) fn squares(t: &Threads, x: &[f32]) -> f64 {
    blocks(t, x, |block| math::dot(block, block))
}

fn blocks(t: &Threads, x: &[f32], f: impl Fn(&[f32]) -> f32 + Sync) -> f64 {
    let sums: Vec<f32> = t.run(|| x.par_chunks(BLOCK).map(|block| simd!(f(block))).collect());
    sums.into_iter().map(f64::from).sum()
}
