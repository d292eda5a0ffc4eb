//! Multiplication of matrices that may be parts of larger ones, for low-rank adapters: `c = factor a b`.

use xlaunch_pool::DType;

use super::{Accumulate, Cuda, Op};
use crate::cpu::gemm::{Mat, parallel_strided_gemm};
use crate::cpu::{Access, Threads};
use crate::cuda::gemm::{Epilogue, GemmCall, Operand, plain, transposed};
use crate::error::Result;
use crate::tensor::Slice;

/// A row-major matrix, or some columns of one.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Elements from the first to the last one of the matrix.
    pub slice: Slice<'a>,
    /// Distance between rows in memory.
    pub stride: usize,
    /// True if the operand is the transpose of the matrix in memory.
    pub transposed: bool,
}

impl<'a> Matrix<'a> {
    /// Describes a matrix whose rows have `cols` elements without gaps.
    pub fn new(slice: Slice<'a>, cols: usize) -> Self {
        Self { slice, stride: cols, transposed: false }
    }

    /// Transposes the operand.
    #[must_use]
    pub fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Returns the number of elements that an operand of this shape spans in memory.
    fn span(self, [rows, cols]: [usize; 2]) -> usize {
        let [rows, cols] = if self.transposed { [cols, rows] } else { [rows, cols] };
        assert!(cols <= self.stride, "rows of {cols} elements overlap: they are {} apart", self.stride);
        rows.saturating_sub(1) * self.stride + cols
    }

    fn mat(self, access: &'a Access, shape: [usize; 2]) -> Mat<'a> {
        let data = access.read(self.slice, self.span(shape));
        let [rows, cols] = shape;
        if self.transposed {
            Mat::strided(data, cols, rows, self.stride).t()
        } else {
            Mat::strided(data, rows, cols, self.stride)
        }
    }

    /// Returns the operand as cuBLASLt sees it: as the transpose of a column-major matrix.
    fn operand(self) -> Operand<'a> {
        let operand = if self.transposed { transposed(self.slice) } else { plain(self.slice) };
        operand.strided(self.stride)
    }
}

/// `c (rows, cols) = factor a (rows, depth) b (depth, cols)`, or added to c.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// Rows of c.
    pub rows: usize,
    /// Columns of c.
    pub cols: usize,
    /// Columns of a, and rows of b.
    pub depth: usize,
    /// (rows, depth), of the activations' type.
    pub a: Matrix<'a>,
    /// (depth, cols), of the activations' type.
    pub b: Matrix<'a>,
    /// Factor of the product.
    pub factor: f32,
    /// (rows, cols), not transposed: of the activations' type, or a gradient. Elements between its rows are unchanged.
    pub c: Matrix<'a>,
    /// Selects whether the product is added to c.
    pub acc: Accumulate,
}

impl Op for Gemm<'_> {
    fn cpu(self, threads: &Threads) {
        let Self { rows, cols, depth, a, b, factor, c, acc } = self;
        let access = Access::new("gemm");
        let (a, b) = (a.mat(&access, [rows, depth]), b.mat(&access, [depth, cols]));
        let out = access.write(c.slice, c.span([rows, cols]));
        parallel_strided_gemm(threads, out, c.stride, a, b, factor, acc == Accumulate::Add);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { rows, cols, depth, a, b, factor, c, acc } = self;
        gpu.expect_act(a.slice, a.span([rows, depth]));
        gpu.expect_act(b.slice, b.span([depth, cols]));
        let span = c.span([rows, cols]);
        assert!(!c.transposed && c.slice.len() == span, "expected {span} elements, got {:?}", c.slice);
        assert!(matches!(c.slice.dtype(), DType::F32 | DType::Bf16) && !c.slice.is_lent(), "{:?}", c.slice);
        // c^T = b^T a^T.
        let call = GemmCall {
            m: cols,
            n: rows,
            k: depth,
            a: b.operand(),
            b: a.operand(),
            epilogue: Epilogue::Part { factor, stride: c.stride },
            c: c.slice,
            accumulate: acc == Accumulate::Add,
        };
        // SAFETY: checked above; c overlaps no input by the operation's contract.
        unsafe { gpu.gemm.run(&call) }
    }
}
