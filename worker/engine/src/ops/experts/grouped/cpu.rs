//! Linear layers of experts by the CPU's GEMM, one expert after another.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    GroupedBackwardInput, GroupedBackwardWeight, GroupedForward, GroupedFp8, GroupedProduct, GroupedShape,
};
use crate::cpu::gemm::{Mat, blocked_gemm, parallel_gemm};
use crate::cpu::{Access, Threads};
use crate::ops::experts::{MAX_CHOSEN, index};
use crate::ops::fp8::cpu::decode;
use crate::ops::gemv::cpu::dot_products;
use crate::ops::{Accumulate, GEMV_ROWS, LinearShape};

/// Largest number of rows of a step of decoding: a row must have the same bits alone and in a batch.
const FEW_ROWS: usize = GEMV_ROWS * MAX_CHOSEN;

/// Returns the rows of each expert.
fn groups(offsets: &[i32]) -> impl Iterator<Item = (usize, Range<usize>)> {
    offsets.windows(2).map(|pair| index(pair[0])..index(pair[1])).enumerate()
}

impl GroupedShape {
    /// Returns the part of (E, O, I) weights that belongs to an expert.
    fn weights(self, expert: usize) -> Range<usize> {
        let len = self.outputs * self.inputs;
        expert * len..(expert + 1) * len
    }
}

pub(super) fn forward(t: &Threads, args: GroupedForward<'_>) {
    let (a, s) = (Access::new("grouped_forward"), args.shape);
    let (x, w) = (a.read(args.x, s.rows * s.inputs), a.read(args.w, s.experts * s.outputs * s.inputs));
    let offsets = a.read_i32(args.offsets, s.experts + 1);
    let y = a.write(args.y, s.rows * s.outputs);
    if s.rows <= FEW_ROWS {
        return few_rows(t, s, offsets, x, w, y);
    }
    for (expert, rows) in groups(offsets).filter(|(_, rows)| !rows.is_empty()) {
        let x = Mat::new(&x[rows.start * s.inputs..rows.end * s.inputs], rows.len(), s.inputs);
        let w = Mat::new(&w[s.weights(expert)], s.outputs, s.inputs);
        blocked_gemm(t, &mut y[rows.start * s.outputs..rows.end * s.outputs], x, w.t(), false);
    }
}

/// Same as [`forward`], with sums whose order does not depend on the number of an expert's rows.
fn few_rows(t: &Threads, s: GroupedShape, offsets: &[i32], x: &[f32], w: &[f32], mut y: &mut [f32]) {
    let mut tasks = Vec::new();
    for (expert, rows) in groups(offsets).filter(|(_, rows)| !rows.is_empty()) {
        let (own, rest) = y.split_at_mut(rows.len() * s.outputs);
        tasks.push((expert, rows, own));
        y = rest;
    }
    t.run(|| {
        tasks.into_par_iter().for_each(|(expert, rows, y)| {
            let shape = LinearShape { rows: rows.len(), inputs: s.inputs, outputs: s.outputs };
            dot_products(shape, &x[rows.start * s.inputs..rows.end * s.inputs], &w[s.weights(expert)], y);
        });
    });
}

pub(super) fn backward_input(t: &Threads, args: GroupedBackwardInput<'_>) {
    let (a, s) = (Access::new("grouped_backward_input"), args.shape);
    let (dy, w) = (a.read(args.dy, s.rows * s.outputs), a.read(args.w, s.experts * s.outputs * s.inputs));
    let offsets = a.read_i32(args.offsets, s.experts + 1);
    let dx = a.write(args.dx, s.rows * s.inputs);
    for (expert, rows) in groups(offsets).filter(|(_, rows)| !rows.is_empty()) {
        let dy = Mat::new(&dy[rows.start * s.outputs..rows.end * s.outputs], rows.len(), s.outputs);
        let w = Mat::new(&w[s.weights(expert)], s.outputs, s.inputs);
        parallel_gemm(t, &mut dx[rows.start * s.inputs..rows.end * s.inputs], dy, w, false);
    }
}

pub(super) fn backward_weight(t: &Threads, args: GroupedBackwardWeight<'_>) {
    let (a, s, add) = (Access::new("grouped_backward_weight"), args.shape, args.acc == Accumulate::Add);
    let (dy, x) = (a.read(args.dy, s.rows * s.outputs), a.read(args.x, s.rows * s.inputs));
    let offsets = a.read_i32(args.offsets, s.experts + 1);
    let dw = a.write(args.dw, s.experts * s.outputs * s.inputs);
    for (expert, rows) in groups(offsets) {
        let dw = &mut dw[s.weights(expert)];
        if rows.is_empty() {
            if !add {
                dw.fill(0.0);
            }
            continue;
        }
        let dy = Mat::new(&dy[rows.start * s.outputs..rows.end * s.outputs], rows.len(), s.outputs);
        let x = Mat::new(&x[rows.start * s.inputs..rows.end * s.inputs], rows.len(), s.inputs);
        parallel_gemm(t, dw, dy.t(), x, add);
    }
}

pub(super) fn fp8(t: &Threads, args: GroupedFp8<'_>) {
    let GroupedFp8 { shape: s, product, offsets, a, b, out, acc } = args;
    let (access, [a_len, b_len, out_len], add) =
        (Access::new("grouped_fp8"), args.lens(), acc == Accumulate::Add);
    let (a, b) = (decode(t, &access, a, a_len), decode(t, &access, b, b_len));
    let out = access.write(out, out_len);
    for (expert, rows) in groups(access.read_i32(offsets, s.experts + 1)) {
        let of_rows = |width: usize| rows.start * width..rows.end * width;
        match product {
            GroupedProduct::Weight if rows.is_empty() && !add => out[s.weights(expert)].fill(0.0),
            _ if rows.is_empty() => (),
            GroupedProduct::Forward => {
                let w = Mat::new(&b[s.weights(expert)], s.outputs, s.inputs);
                let x = Mat::new(&a[of_rows(s.inputs)], rows.len(), s.inputs);
                blocked_gemm(t, &mut out[of_rows(s.outputs)], x, w.t(), false);
            }
            GroupedProduct::Input => {
                let w = Mat::strided(&b[expert * s.outputs..], s.inputs, s.outputs, s.experts * s.outputs);
                let dy = Mat::new(&a[of_rows(s.outputs)], rows.len(), s.outputs);
                blocked_gemm(t, &mut out[of_rows(s.inputs)], dy, w.t(), false);
            }
            GroupedProduct::Weight => {
                let [dy, x] = [(&a, s.outputs), (&b, s.inputs)]
                    .map(|(x, height)| Mat::strided(&x[rows.start..], height, rows.len(), s.rows));
                blocked_gemm(t, &mut out[s.weights(expert)], dy, x.t(), add);
            }
        }
    }
}
