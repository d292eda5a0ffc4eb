//! Matrix products: `y = x w^T + b` and its gradients, by the `gemm` crate, rows shared out among threads.

use rayon::prelude::*;

use super::math::simd;
use super::threads::Threads;
use crate::shapes::{Accumulate, LinearShape};

/// Rows of a bias gradient's partial sums.
const BIAS_ROWS: usize = 128;

/// A matrix in memory: element (i, j) at `i * row_stride + j * col_stride`.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A row-major matrix without gaps.
    pub(super) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// `rows` rows of `cols` elements, `row_stride` apart.
    pub(super) fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// Rows and columns exchanged.
    pub(super) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    fn fits(self) -> bool {
        let last = |count: usize, stride: usize| count.saturating_sub(1) * stride;
        self.rows == 0
            || self.cols == 0
            || last(self.rows, self.row_stride) + last(self.cols, self.col_stride) < self.data.len()
    }
}

/// `out = scale a b`, added to what `out` holds if `add`. Rows of `out` are `stride` apart.
pub(super) fn product(out: &mut [f32], stride: usize, a: Mat<'_>, b: Mat<'_>, scale: f32, add: bool) {
    let shape = Mat { data: out, rows: a.rows, cols: b.cols, row_stride: stride, col_stride: 1 };
    assert!(a.cols == b.rows && a.fits() && b.fits() && shape.fits() && stride >= b.cols);
    // SAFETY: every element the call reads or writes lies inside its slice, as `fits` has checked; `out` is borrowed
    // mutably, so it overlaps neither input; its rows do not overlap each other, since they are `stride >= cols` apart.
    // The kernels prefer column-major outputs: the transposed product `out^T = b^T a^T` is the same memory.
    unsafe {
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

/// `out[rows, b.cols] = a b` with rows of `out` shared out among threads.
fn parallel_product(threads: &Threads, out: &mut [f32], a: Mat<'_>, b: Mat<'_>, add: bool) {
    let cols = b.cols;
    let per_thread = a.rows.div_ceil(threads.count()).max(1);
    threads.run(|| {
        out.par_chunks_mut(per_thread * cols).enumerate().for_each(|(index, out)| {
            let first = index * per_thread;
            let part = Mat { data: &a.data[first * a.row_stride..], rows: out.len() / cols, ..a };
            product(out, cols, part, b, 1.0, add);
        });
    });
}

pub(super) fn fwd(t: &Threads, s: LinearShape, x: &[f32], w: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
    if let Some(bias) = bias {
        y.chunks_exact_mut(s.outputs).for_each(|row| row.copy_from_slice(bias));
    }
    let (x, w) = (Mat::new(x, s.rows, s.inputs), Mat::new(w, s.outputs, s.inputs));
    parallel_product(t, y, x, w.t(), bias.is_some());
}

pub(super) fn bwd_input(t: &Threads, s: LinearShape, dy: &[f32], w: &[f32], dx: &mut [f32]) {
    let (dy, w) = (Mat::new(dy, s.rows, s.outputs), Mat::new(w, s.outputs, s.inputs));
    parallel_product(t, dx, dy, w, false);
}

pub(super) fn bwd_weight(
    t: &Threads,
    s: LinearShape,
    dy: &[f32],
    x: &[f32],
    dw: &mut [f32],
    dbias: Option<&mut [f32]>,
    acc: Accumulate,
) {
    let add = acc == Accumulate::Add;
    let (dy_mat, x) = (Mat::new(dy, s.rows, s.outputs), Mat::new(x, s.rows, s.inputs));
    parallel_product(t, dw, dy_mat.t(), x, add);
    if let Some(dbias) = dbias {
        column_sums(t, dy, s.outputs, dbias, add);
    }
}

/// `out = sum of the rows of x`, in blocks of rows whose partial sums are added in order.
pub(super) fn column_sums(t: &Threads, x: &[f32], cols: usize, out: &mut [f32], add: bool) {
    let partials: Vec<Vec<f32>> = t.run(|| {
        x.par_chunks(BIAS_ROWS * cols)
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

/// `out = sum of partials`, added to what it holds if `add`.
pub(super) fn add_partials(partials: &[Vec<f32>], out: &mut [f32], add: bool) {
    if !add {
        out.fill(0.0);
    }
    for partial in partials {
        out.iter_mut().zip(partial).for_each(|(sum, value)| *sum += value);
    }
}
