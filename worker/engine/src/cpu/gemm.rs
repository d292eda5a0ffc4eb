//! Matrix multiplication by the `gemm` crate, with rows split among threads.

use std::ops::Range;

use rayon::prelude::*;

use super::threads::Threads;

/// A matrix in memory: element (i, j) at `i * row_stride + j * col_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> Mat<'a> {
    /// Describes a row-major matrix without gaps.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// Describes `rows` rows of `cols` elements, `row_stride` apart.
    pub(crate) fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// Transposes the matrix, in the same memory.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Selects some of the rows, in the same memory.
    fn part(self, rows: Range<usize>) -> Self {
        let data = self.data.get(rows.start * self.row_stride..).unwrap_or_default();
        Self { data, rows: rows.len(), ..self }
    }

    fn fits(self) -> bool {
        let last = |count: usize, stride: usize| count.saturating_sub(1) * stride;
        self.rows == 0
            || self.cols == 0
            || last(self.rows, self.row_stride) + last(self.cols, self.col_stride) < self.data.len()
    }
}

/// Maximum number of products that the `gemm` crate sums at once regardless of the other sizes. It splits longer sums
/// into parts whose length depends on the other sizes, so results would depend on how rows are split among threads.
const DEPTH: usize = 512;

/// Computes `out = scale a b`, or adds to `out` if `add`. Rows of `out` are `stride` apart.
pub(crate) fn gemm(out: &mut [f32], stride: usize, a: Mat<'_>, b: Mat<'_>, scale: f32, add: bool) {
    assert!(a.cols == b.rows);
    for first in (0..a.cols.max(1)).step_by(DEPTH) {
        let depth = first..(first + DEPTH).min(a.cols);
        let (a, b) = (a.t().part(depth.clone()).t(), b.part(depth));
        gemm_at_once(out, stride, a, b, scale, add || first > 0);
    }
}

/// Same as `gemm`, with at most [`DEPTH`] products in each sum.
fn gemm_at_once(out: &mut [f32], stride: usize, a: Mat<'_>, b: Mat<'_>, scale: f32, add: bool) {
    let shape = Mat { data: out, rows: a.rows, cols: b.cols, row_stride: stride, col_stride: 1 };
    assert!(a.cols == b.rows && a.fits() && b.fits() && shape.fits() && stride >= b.cols);
    // SAFETY: every element that the call reads or writes is inside its slice, as `fits` has checked; `out` is borrowed
    // mutably, so it overlaps neither input; its rows do not overlap each other, because they are `stride >= cols`
    // apart.
    unsafe {
        // The kernels prefer column-major outputs: the transposed product `out^T = b^T a^T` occupies the same memory.
        gemm_f32::gemm::f32::get_gemm_fn()(
            b.cols,
            a.rows,
            a.cols,
            out.as_mut_ptr(),
            stride.cast_signed(),
            1,
            add,
            b.data.as_ptr(),
            b.row_stride.cast_signed(),
            b.col_stride.cast_signed(),
            a.data.as_ptr(),
            a.row_stride.cast_signed(),
            a.col_stride.cast_signed(),
            1.0,
            scale,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

/// Rows of a block of [`blocked_gemm`].
const BLOCK_ROWS: usize = 32;

/// Computes `out = a b`, or adds to `out` if `add`, in blocks of rows, whose number does not depend on that of the
/// threads: for a transposed `b` and depths at which the `gemm` crate sums in an order that depends on the number of
/// rows.
pub(crate) fn blocked_gemm(threads: &Threads, out: &mut [f32], a: Mat<'_>, b: Mat<'_>, add: bool) {
    threads.run(|| {
        out.par_chunks_mut(BLOCK_ROWS * b.cols).enumerate().for_each(|(block, out)| {
            let first = block * BLOCK_ROWS;
            gemm(out, b.cols, a.part(first..a.rows.min(first + BLOCK_ROWS)), b, 1.0, add);
        });
    });
}

/// Computes `out = a b`, or adds to `out` if `add`, with the rows of `out` split among threads. No thread gets a single
/// row of several: the `gemm` crate would sum it in another order.
pub(crate) fn parallel_gemm(threads: &Threads, out: &mut [f32], a: Mat<'_>, b: Mat<'_>, add: bool) {
    parallel_strided_gemm(threads, out, b.cols, a, b, 1.0, add);
}

/// Same as [`parallel_gemm`], for `out = scale a b` with rows of `out` that are `stride` apart.
pub(crate) fn parallel_strided_gemm(
    threads: &Threads,
    out: &mut [f32],
    stride: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    scale: f32,
    add: bool,
) {
    let parts = threads.count().min(a.rows / 2).max(1);
    let (mut rest, mut tasks) = (out, Vec::with_capacity(parts));
    for part in 0..parts {
        let rows = a.rows * part / parts..a.rows * (part + 1) / parts;
        // Nothing follows the last row.
        let (own, others) = rest.split_at_mut((rows.len() * stride).min(rest.len()));
        tasks.push((rows, own));
        rest = others;
    }
    threads.run(|| {
        tasks.into_par_iter().for_each(|(rows, out)| {
            gemm(out, stride, a.part(rows), b, scale, add);
        });
    });
}
