//! Matrix-vector multiplication on threads, among which the outputs are split.
//!
//! A dot product is a sum over interleaved parts, the lanes of [`SUMS`] vectors. This does not depend on the number of
//! rows computed together, so a row gives the same bits alone and in a batch.

use std::array::from_fn;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::Gemv;
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};
use crate::ops::LinearShape;
use crate::ops::activation::cpu::{Function, with_function};

/// Vectors of partial sums of a dot product: several, so that additions do not wait long for each other.
const SUMS: usize = 2;
/// Rows that share each read of the weights. Their partial sums stay in registers.
const TILE_ROWS: usize = 4;
/// Tasks per thread; more than one, to balance the load.
const TASKS: usize = 4;

pub(crate) fn run(t: &Threads, args: Gemv<'_>) {
    let (a, s) = (Access::new("gemv"), args.shape);
    let (x, w) = (a.read(args.x, s.rows * s.inputs), a.read(args.w, s.outputs * s.inputs));
    let bias = args.bias.map(|bias| a.read(bias, s.outputs));
    let y = a.write(args.y, s.rows * s.outputs);
    let per_task = s.outputs.div_ceil(TASKS * t.count());
    // The outputs `first..` of all rows, as (N, len / N).
    let outputs = |first: usize, out: &mut [f32]| {
        let count = out.len() / s.rows;
        let (w, shape) = (&w[first * s.inputs..], LinearShape { outputs: count, ..s });
        dot_products(shape, x, w, out);
        simd!({
            for row in out.chunks_exact_mut(count) {
                if let Some(bias) = bias {
                    row.iter_mut().zip(&bias[first..]).for_each(|(y, bias)| *y += bias);
                }
            }
        });
        if let Some(activation) = args.activation {
            with_function!(activation, F => activate::<F>(out));
        }
    };
    t.run(|| {
        if s.rows == 1 {
            let tasks = y.par_chunks_mut(per_task).enumerate();
            return tasks.for_each(|(task, y)| outputs(task * per_task, y));
        }
        let tasks = (0..s.outputs.div_ceil(per_task)).into_par_iter().map(|task| task * per_task);
        let parts: Vec<(usize, Vec<f32>)> = tasks
            .map(|first| {
                let mut out = vec![0.0; s.rows * per_task.min(s.outputs - first)];
                outputs(first, &mut out);
                (first, out)
            })
            .collect();
        for (first, part) in parts {
            let count = part.len() / s.rows;
            for (y, part) in y.chunks_exact_mut(s.outputs).zip(part.chunks_exact(count)) {
                y[first..first + count].copy_from_slice(part);
            }
        }
    });
}

fn activate<F: Function>(x: &mut [f32]) {
    simd!(x.iter_mut().for_each(|x| *x *= F::gate(*x)));
}

/// Computes `out (N, O) = x (N, I) w (O, I)^T` on this thread. A row has the same bits for every number of rows.
pub(crate) fn dot_products(shape: LinearShape, x: &[f32], w: &[f32], out: &mut [f32]) {
    Arch::new().dispatch(DotProducts { shape, x, w, out });
}

/// `out (N, O) = x (N, I) w (O, I)^T` in explicit vectors: the compiler would turn sums in nested arrays into scalars.
struct DotProducts<'a> {
    shape: LinearShape,
    x: &'a [f32],
    w: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for DotProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { shape: s, x, w, out } = self;
        let whole = s.rows / TILE_ROWS * TILE_ROWS;
        for (output, w) in w.chunks_exact(s.inputs).take(s.outputs).enumerate() {
            for row in (0..whole).step_by(TILE_ROWS) {
                let sums = tile::<S, TILE_ROWS>(simd, s.inputs, &x[row * s.inputs..], w);
                for (r, sum) in sums.into_iter().enumerate() {
                    out[(row + r) * s.outputs + output] = sum;
                }
            }
            for row in whole..s.rows {
                [out[row * s.outputs + output]] = tile::<S, 1>(simd, s.inputs, &x[row * s.inputs..], w);
            }
        }
    }
}

/// Computes the dot products of R rows of x with one row of w.
#[inline(always)]
fn tile<S: Simd, const R: usize>(simd: S, inputs: usize, x: &[f32], w: &[f32]) -> [f32; R] {
    let xs: [(&[S::f32s], &[f32]); R] = from_fn(|r| S::as_simd_f32s(&x[r * inputs..(r + 1) * inputs]));
    let (vectors, rest) = S::as_simd_f32s(w);
    let (groups, last) = vectors.as_chunks::<SUMS>();
    let mut sums = [[simd.splat_f32s(0.0); SUMS]; R];
    for (k, w) in groups.iter().enumerate() {
        for r in 0..R {
            let x = &xs[r].0[k * SUMS..(k + 1) * SUMS];
            for i in 0..SUMS {
                sums[r][i] = simd.mul_add_f32s(w[i], x[i], sums[r][i]);
            }
        }
    }
    from_fn(|r| {
        let (x, x_rest) = xs[r];
        for ((sum, w), x) in sums[r].iter_mut().zip(last).zip(&x[groups.len() * SUMS..]) {
            *sum = simd.mul_add_f32s(*w, *x, *sum);
        }
        let sum = sums[r]
            .into_iter()
            .reduce(|a, b| simd.add_f32s(a, b))
            .map_or(0.0, |sum| simd.reduce_sum_f32s(sum));
        x_rest.iter().zip(rest).fold(sum, |sum, (x, w)| w.mul_add(*x, sum))
    })
}
