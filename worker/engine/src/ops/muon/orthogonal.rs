//! Making matrices orthogonal on a GPU: batched products, by our own kernels where the results are symmetric.

use xlaunch_pool::DType;

use super::symmetric::{self, Operand, Sizes, Sum};
use super::{EPS, MARGIN, Orthogonalize, steps};
use crate::cuda::gemm::{self, Batch, Epilogue, GemmCall, plain, transposed};
use crate::cuda::{BLOCK_THREADS, Launch, VEC, args};
use crate::error::Result;
use crate::ops::Cuda;
use crate::tensor::Slice;

/// Most partial sums of a matrix's squared norm; at most a block has threads.
const NORM_PARTIALS: usize = 64;

/// Returns the most partial sums for a batch of matrices.
pub(super) fn norm_partials(count: usize) -> usize {
    count * NORM_PARTIALS
}

pub(super) fn orthogonalize(gpu: &Cuda, a: Orthogonalize<'_>) -> Result<()> {
    let Orthogonalize { rows, cols, x } = a;
    let (len, full, side) = (rows * cols, a.batch(), rows.min(cols));
    gpu.expect_act(x, x.len() / len * len);
    let most = full.min(x.len() / len);
    let partials = gpu.alloc(DType::F32, norm_partials(most))?;
    let alloc = |elements| gpu.alloc(gpu.activations, most * elements);
    let scaled = alloc(len)?;
    let squares = [alloc(side * side)?, alloc(side * side)?, alloc(side * side)?];
    for first in (0..x.len()).step_by(full * len) {
        let x = x.slice(first..x.len().min(first + full * len));
        let count = x.len() / len;
        let scaled = scaled.slice(0..count * len);
        let [gram, first, second] = squares.each_ref().map(|square| square.slice(0..count * side * side));
        let blocks = |parts| Launch { grid: (parts, count, 1), block: (BLOCK_THREADS, 1), shared: 0 };
        let sums = Launch::sharing(len, VEC, NORM_PARTIALS).grid.0;
        // SAFETY: x was checked; the others were allocated with room for as many matrices.
        unsafe {
            gpu.launch("muon_norm_partials", blocks(sums), args![x, partials.all(), len])?;
            let parts = blocks(len.div_ceil(BLOCK_THREADS as usize * VEC));
            let args = args![x, scaled, partials.all(), sums, len, MARGIN, EPS];
            gpu.launch("muon_scale", parts, args)?;
        }
        let matrices = Matrices { gpu, rows, cols, batch: Batch { count, full } };
        // An odd number of steps ends in x.
        let (mut from, mut to) = (scaled, x);
        for group in steps((rows, cols)) {
            matrices.gram(from, gram)?;
            matrices.polynomial(gram, group[0], first)?;
            let factor = if let Some(next) = group.get(1) {
                matrices.product([first, gram], second)?;
                matrices.product([second, first], gram)?;
                matrices.polynomial(gram, *next, second)?;
                matrices.product([first, second], gram)?;
                gram
            } else {
                first
            };
            matrices.times(factor, from, to)?;
            (from, to) = (to, from);
        }
    }
    Ok(())
}

/// A batch of matrices of one shape, and of square ones with the smaller of its sides.
struct Matrices<'a> {
    gpu: &'a Cuda,
    rows: usize,
    cols: usize,
    batch: Batch,
}

impl Matrices<'_> {
    fn is_tall(&self) -> bool {
        self.rows > self.cols
    }

    fn side(&self) -> usize {
        self.rows.min(self.cols)
    }

    /// Computes the smaller of `A = x x^T` and `A = x^T x`.
    fn gram(&self, x: Slice<'_>, out: Slice<'_>) -> Result<()> {
        let (side, depth) = (self.side(), self.rows.max(self.cols));
        let operand = if self.is_tall() { Operand::Tall } else { Operand::Wide };
        if let Some(done) = self.symmetric(depth, operand, [x, x], None, out) {
            return done;
        }
        let operands = if self.is_tall() { [plain(x), transposed(x)] } else { [transposed(x), plain(x)] };
        self.multiply([side, side, depth], operands, out)
    }

    /// Computes `out = a I + b A + c A^2`.
    fn polynomial(&self, gram: Slice<'_>, [a, b, c]: [f32; 3], out: Slice<'_>) -> Result<()> {
        let side = self.side();
        let sum = Sum { alpha: a, added: gram, beta: b, gamma: c };
        if let Some(done) = self.symmetric(side, Operand::Wide, [gram, gram], Some(sum), out) {
            return done;
        }
        self.multiply([side; 3], [transposed(gram), plain(gram)], out)?;
        let blocks = (side * side).div_ceil(BLOCK_THREADS as usize * VEC);
        let launch = Launch { grid: (blocks, self.batch.count, 1), block: (BLOCK_THREADS, 1), shared: 0 };
        // SAFETY: both hold `count` matrices of side * side activations.
        unsafe { self.gpu.launch("muon_polynomial", launch, args![gram, out, side, a, b, c]) }
    }

    /// Multiplies polynomials of the same symmetric matrix.
    fn product(&self, [x, y]: [Slice<'_>; 2], out: Slice<'_>) -> Result<()> {
        let side = self.side();
        self.symmetric(side, Operand::Wide, [x, y], None, out)
            .unwrap_or_else(|| self.multiply([side; 3], [plain(y), plain(x)], out))
    }

    /// Multiplies x by a symmetric matrix.
    fn times(&self, factor: Slice<'_>, x: Slice<'_>, out: Slice<'_>) -> Result<()> {
        let operands =
            if self.is_tall() { [transposed(factor), plain(x)] } else { [plain(x), plain(factor)] };
        self.multiply([self.cols, self.rows, self.side()], operands, out)
    }

    /// Computes a symmetric result by our own kernel, if it supports the operands.
    fn symmetric(
        &self,
        depth: usize,
        operand: Operand,
        operands: [Slice<'_>; 2],
        sum: Option<Sum<'_>>,
        out: Slice<'_>,
    ) -> Option<Result<()>> {
        let sizes = Sizes { side: self.side(), depth, matrices: self.batch.count };
        let [x, y] = operands;
        // SAFETY: the operands are supported; every slice has `count` matrices of its size.
        symmetric::supports(self.gpu, sizes, &[x, y, out])
            .then(|| unsafe { symmetric::product(self.gpu, sizes, operand, operands, sum, out) })
    }

    /// Multiplies all matrices of the batch by the library, to which they are column-major.
    fn multiply(&self, [m, n, k]: [usize; 3], [a, b]: [gemm::Operand<'_>; 2], c: Slice<'_>) -> Result<()> {
        let call = GemmCall { m, n, k, a, b, epilogue: Epilogue::None, c, accumulate: false };
        // SAFETY: every operand has `count` matrices of these sizes, and c is none of the inputs.
        unsafe { self.gpu.gemm.run_batch(&call, self.batch) }
    }
}
