//! Rows of choices from tokens, and back.
//!
//! `rows[i] = x[choice_of[i] / k]`, and `out[n] = sum_j weights[n, j] rows[row_of[n k + j]]`, in the order of j.
//!
//! If a device has only some of the experts, the rows of the others, which come last, do not exist: `end`, in device
//! memory, is the number of rows that do. The others are neither read nor written, and sums leave them out. Only the
//! first [`PADDING_ROWS`] of them are written, as 0: GEMMs that sum over rows read whole tiles.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::index;
use crate::cpu::{Access, Threads, math};
use crate::cuda::{Arg, BLOCK_THREADS, KernelFile, Launch, Macro, args, expect, source, vec_threads};
use crate::error::Result;
use crate::ops::{Cuda, Op};
use crate::tensor::Slice;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("experts/rows.cu"),
    kernels: &["gather_rows", "sum_rows", "combine_rows", "combine_rows_bwd"],
    macros: &[Macro::int("PADDING_ROWS", PADDING_ROWS)],
    dynamic_shared: &[],
};

/// Rows past the last one that are written as 0: the depth of the tiles of GEMMs.
pub(crate) const PADDING_ROWS: usize = 64;

/// N tokens of C elements with k choices each.
#[derive(Clone, Copy, Debug)]
pub struct RowsShape {
    /// N.
    pub tokens: usize,
    /// k.
    pub chosen: usize,
    /// C.
    pub cols: usize,
}

/// `rows[i] = x[choice_of[i] / k]`.
#[derive(Clone, Copy, Debug)]
pub struct GatherRows<'a> {
    /// Sizes.
    pub shape: RowsShape,
    /// (N k,) I32: see [`SortByExpert`](super::SortByExpert).
    pub choice_of: Slice<'a>,
    /// (N, C).
    pub x: Slice<'a>,
    /// (N k, C).
    pub rows: Slice<'a>,
    /// (1,) I32: the number of rows that exist; `None` if all do.
    pub end: Option<Slice<'a>>,
}

/// `dx[n] = sum_j drows[row_of[n k + j]]`.
#[derive(Clone, Copy, Debug)]
pub struct GatherRowsBackward<'a> {
    /// Sizes.
    pub shape: RowsShape,
    /// (N k,) I32.
    pub row_of: Slice<'a>,
    /// (N k, C).
    pub drows: Slice<'a>,
    /// (N, C).
    pub dx: Slice<'a>,
    /// Whether the sums are added to dx.
    pub add: bool,
    /// (1,) I32: the number of rows that exist; `None` if all do.
    pub end: Option<Slice<'a>>,
}

/// `out[n] = sum_j weights[n, j] rows[row_of[n k + j]]`.
#[derive(Clone, Copy, Debug)]
pub struct CombineRows<'a> {
    /// Sizes.
    pub shape: RowsShape,
    /// (N k,) I32.
    pub row_of: Slice<'a>,
    /// (N, k) F32.
    pub weights: Slice<'a>,
    /// (N k, C).
    pub rows: Slice<'a>,
    /// (N, C).
    pub out: Slice<'a>,
    /// Whether the sums are added to out.
    pub add: bool,
    /// (1,) I32: the number of rows that exist; `None` if all do.
    pub end: Option<Slice<'a>>,
}

/// `drows[row_of[n k + j]] = weights[n, j] dout[n]` and `dweights[n, j] = dout[n] . rows[row_of[n k + j]]`.
#[derive(Clone, Copy, Debug)]
pub struct CombineRowsBackward<'a> {
    /// Sizes.
    pub shape: RowsShape,
    /// (N k,) I32.
    pub row_of: Slice<'a>,
    /// (N, k) F32.
    pub weights: Slice<'a>,
    /// (N k, C).
    pub rows: Slice<'a>,
    /// (N, C).
    pub dout: Slice<'a>,
    /// (N k, C).
    pub drows: Slice<'a>,
    /// (N, k) F32.
    pub dweights: Slice<'a>,
    /// (1,) I32: the number of rows that exist; `None` if all do.
    pub end: Option<Slice<'a>>,
}

impl RowsShape {
    fn choices(self) -> usize {
        self.tokens * self.chosen
    }

    fn check(
        self,
        gpu: &Cuda,
        order: Slice<'_>,
        rows: &[Slice<'_>],
        tokens: Slice<'_>,
        end: Option<Slice<'_>>,
    ) {
        end.into_iter().for_each(|end| expect(end, DType::I32, 1));
        expect(order, DType::I32, self.choices());
        rows.iter().for_each(|rows| gpu.expect_act(*rows, self.choices() * self.cols));
        gpu.expect_act(tokens, self.tokens * self.cols);
    }

    /// Returns a launch with `count` rows of threads along the columns.
    fn launch(self, gpu: &Cuda, count: usize) -> Launch {
        let threads = vec_threads(gpu, self.cols);
        let at_once = (BLOCK_THREADS / threads).max(1);
        Launch::rows(count.div_ceil(at_once as usize), (threads, at_once))
    }
}

impl Op for GatherRows<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s) = (Access::new("gather_rows"), self.shape);
        let (choice_of, x) = (a.read_i32(self.choice_of, s.choices()), a.read(self.x, s.tokens * s.cols));
        let rows = a.write(self.rows, s.choices() * s.cols);
        let end = rows_end(&a, self.end, s.choices());
        threads.run(|| {
            let rows = rows.par_chunks_mut(s.cols).zip(choice_of).enumerate();
            rows.take(end + PADDING_ROWS).for_each(|(number, (row, choice))| {
                if number < end {
                    row.copy_from_slice(&x[index(*choice) / s.chosen * s.cols..][..s.cols]);
                } else {
                    row.fill(0.0);
                }
            });
        });
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, choice_of, x, rows, end } = self;
        s.check(gpu, choice_of, &[rows], x, end);
        let args = args![choice_of, x, rows, end, s.choices(), s.chosen, s.cols];
        // SAFETY: checked above; choices are below N k by the operation's contract.
        unsafe { gpu.launch("gather_rows", s.launch(gpu, s.choices()), args) }
    }
}

impl Op for GatherRowsBackward<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s) = (Access::new("gather_rows_backward"), self.shape);
        let (row_of, drows) =
            (a.read_i32(self.row_of, s.choices()), a.read(self.drows, s.choices() * s.cols));
        let dx = a.write(self.dx, s.tokens * s.cols);
        let rows = (drows, rows_end(&a, self.end, s.choices()));
        sum(threads, s, row_of, rows, None, dx, self.add);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, row_of, drows, dx, add, end } = self;
        s.check(gpu, row_of, &[drows], dx, end);
        let args = args![row_of, drows, dx, end, s.tokens, s.chosen, s.cols, add];
        // SAFETY: checked above; rows are below N k by the operation's contract.
        unsafe { gpu.launch("sum_rows", s.launch(gpu, s.tokens), args) }
    }
}

impl Op for CombineRows<'_> {
    fn cpu(self, threads: &Threads) {
        let (a, s) = (Access::new("combine_rows"), self.shape);
        let (row_of, rows) = (a.read_i32(self.row_of, s.choices()), a.read(self.rows, s.choices() * s.cols));
        let weights = a.read(self.weights, s.choices());
        let rows = (rows, rows_end(&a, self.end, s.choices()));
        sum(threads, s, row_of, rows, Some(weights), a.write(self.out, s.tokens * s.cols), self.add);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, row_of, weights, rows, out, add, end } = self;
        s.check(gpu, row_of, &[rows], out, end);
        expect(weights, DType::F32, s.choices());
        let args = args![row_of, weights, rows, out, end, s.tokens, s.chosen, s.cols, add];
        // SAFETY: checked above; rows are below N k by the operation's contract.
        unsafe { gpu.launch("combine_rows", s.launch(gpu, s.tokens), args) }
    }
}

impl Op for CombineRowsBackward<'_> {
    fn cpu(self, _: &Threads) {
        let (a, s) = (Access::new("combine_rows_backward"), self.shape);
        let (row_of, rows) = (a.read_i32(self.row_of, s.choices()), a.read(self.rows, s.choices() * s.cols));
        let (weights, dout) = (a.read(self.weights, s.choices()), a.read(self.dout, s.tokens * s.cols));
        let (drows, dweights) =
            (a.write(self.drows, s.choices() * s.cols), a.write(self.dweights, s.choices()));
        let end = rows_end(&a, self.end, s.choices());
        for (choice, (row, dweight)) in row_of.iter().zip(dweights).enumerate() {
            if index(*row) >= end {
                *dweight = 0.0;
                continue;
            }
            let (at, dout) = (index(*row) * s.cols, &dout[choice / s.chosen * s.cols..][..s.cols]);
            *dweight = math::dot(dout, &rows[at..at + s.cols]);
            drows[at..at + s.cols]
                .iter_mut()
                .zip(dout)
                .for_each(|(drow, dout)| *drow = weights[choice] * dout);
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { shape: s, row_of, weights, rows, dout, drows, dweights, end } = self;
        s.check(gpu, row_of, &[rows, drows], dout, end);
        [weights, dweights].into_iter().for_each(|x| expect(x, DType::F32, s.choices()));
        let launch = Launch::threads(s.choices() * gpu.device.warp as usize, BLOCK_THREADS);
        let args: &[Arg] =
            args![row_of, weights, rows, dout, drows, dweights, end, s.choices(), s.chosen, s.cols];
        // SAFETY: checked above; rows are below N k and distinct by the operation's contract.
        unsafe { gpu.launch("combine_rows_bwd", launch, args) }
    }
}

/// Returns the number of rows that exist.
pub(crate) fn rows_end(access: &Access, end: Option<Slice<'_>>, rows: usize) -> usize {
    end.map_or(rows, |end| index(access.read_i32(end, 1)[0]).min(rows))
}

/// Writes (or adds) the sums of each token's rows, with the weights of its choices.
fn sum(
    threads: &Threads,
    s: RowsShape,
    row_of: &[i32],
    (rows, end): (&[f32], usize),
    weights: Option<&[f32]>,
    out: &mut [f32],
    add: bool,
) {
    threads.run(|| {
        out.par_chunks_mut(s.cols).enumerate().for_each(|(token, out)| {
            let mut total = vec![0.0; s.cols];
            let choices = token * s.chosen..(token + 1) * s.chosen;
            for choice in choices.filter(|choice| index(row_of[*choice]) < end) {
                let weight = weights.map_or(1.0, |weights| weights[choice]);
                let row = &rows[index(row_of[choice]) * s.cols..][..s.cols];
                total.iter_mut().zip(row).for_each(|(total, x)| *total += weight * x);
            }
            for (out, total) in out.iter_mut().zip(total) {
                *out = if add { *out + total } else { total };
            }
        });
    });
}
