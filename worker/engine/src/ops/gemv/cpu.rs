//! Matrix-vector multiplication on threads, which split the outputs.
//!
//! A dot product is a sum over `GEMV_LANES` interleaved parts, whatever tile it is computed in, so that tiles of
//! different sizes give the same bits.

use std::array::from_fn;

use rayon::prelude::*;

use super::Gemv;
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};
use crate::ops::LinearShape;
use crate::ops::gelu::cpu::gelu;

/// Partial sums of a dot product: an AVX-512 register.
const GEMV_LANES: usize = 16;
/// Outputs and rows of a tile, whose partial sums stay in registers.
const TILE_OUTPUTS: usize = 4;
const TILE_ROWS: usize = 4;
/// Tasks per thread, which balances the load.
const TASKS: usize = 4;

pub(crate) fn run(t: &Threads, args: Gemv<'_>) {
    let (a, s) = (Access::new("gemv"), args.shape);
    let (x, w) = (a.read(args.x, s.rows * s.inputs), a.read(args.w, s.outputs * s.inputs));
    let bias = args.bias.map(|bias| a.read(bias, s.outputs));
    let y = a.write(args.y, s.rows * s.outputs);
    let per_task = s.outputs.div_ceil(TASKS * t.count()).next_multiple_of(TILE_OUTPUTS);
    // The outputs `first..` of all rows, as (N, len / N).
    let outputs = |first: usize, out: &mut [f32]| {
        let count = out.len() / s.rows;
        let (w, part) = (&w[first * s.inputs..], LinearShape { outputs: count, ..s });
        simd!({
            dot_products(part, x, w, out);
            for row in out.chunks_exact_mut(count) {
                if let Some(bias) = bias {
                    row.iter_mut().zip(&bias[first..]).for_each(|(y, bias)| *y += bias);
                }
                if args.gelu {
                    row.iter_mut().for_each(|y| *y = gelu(*y));
                }
            }
        });
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

/// `out (N, O) = x (N, I) w (O, I)^T`.
#[inline(always)]
fn dot_products(s: LinearShape, x: &[f32], w: &[f32], out: &mut [f32]) {
    let whole = s.outputs / TILE_OUTPUTS * TILE_OUTPUTS;
    for output in (0..whole).step_by(TILE_OUTPUTS) {
        rows_of_tile::<TILE_OUTPUTS>(s, x, &w[output * s.inputs..], output, out);
    }
    for output in whole..s.outputs {
        rows_of_tile::<1>(s, x, &w[output * s.inputs..], output, out);
    }
}

#[inline(always)]
fn rows_of_tile<const O: usize>(s: LinearShape, x: &[f32], w: &[f32], output: usize, out: &mut [f32]) {
    let whole = s.rows / TILE_ROWS * TILE_ROWS;
    let mut put = |row: usize, sums: &[[f32; O]]| {
        for (r, sums) in sums.iter().enumerate() {
            out[(row + r) * s.outputs + output..][..O].copy_from_slice(sums);
        }
    };
    for row in (0..whole).step_by(TILE_ROWS) {
        put(row, &tile::<O, TILE_ROWS>(s.inputs, &x[row * s.inputs..], w));
    }
    for row in whole..s.rows {
        put(row, &tile::<O, 1>(s.inputs, &x[row * s.inputs..], w));
    }
}

/// The dot products of R rows of x with O rows of w.
#[inline(always)]
fn tile<const O: usize, const R: usize>(inputs: usize, x: &[f32], w: &[f32]) -> [[f32; O]; R] {
    let xs: [(&[[f32; GEMV_LANES]], &[f32]); R] = from_fn(|r| x[r * inputs..(r + 1) * inputs].as_chunks());
    let ws: [(&[[f32; GEMV_LANES]], &[f32]); O] = from_fn(|o| w[o * inputs..(o + 1) * inputs].as_chunks());
    let mut sums = [[[0.0_f32; GEMV_LANES]; O]; R];
    for k in 0..inputs / GEMV_LANES {
        for (r, sums) in sums.iter_mut().enumerate() {
            for (o, sums) in sums.iter_mut().enumerate() {
                for ((sum, w), x) in sums.iter_mut().zip(&ws[o].0[k]).zip(&xs[r].0[k]) {
                    *sum = w.mul_add(*x, *sum);
                }
            }
        }
    }
    from_fn(|r| {
        from_fn(|o| {
            let mut lanes = sums[r][o];
            let mut width = GEMV_LANES;
            while width > 1 {
                width /= 2;
                for lane in 0..width {
                    lanes[lane] += lanes[lane + width];
                }
            }
            xs[r].1.iter().zip(ws[o].1).fold(lanes[0], |sum, (x, w)| w.mul_add(*x, sum))
        })
    })
}
