//! Two-stage reductions: one partial result per block, then a kernel that adds them in a fixed order.

use xlaunch_pool::DType;

use super::{ColumnSum, Scale, SquaredNorm, Sum};
use crate::cuda::{
    BLOCK_THREADS, COLUMN_BLOCK, Gpu, KernelFile, Launch, Macro, VEC, args, expect, expect_grad, is_bf16,
    source,
};
use crate::error::Result;
use crate::ops::Accumulate;
use crate::tensor::{Slice, Tensor};

/// Number of blocks of column sums that run on a multiprocessor at once.
const COLUMN_SUM_BLOCKS_PER_SM: usize = 4;
/// Most blocks of the first stage of a sum.
const SUM_BLOCKS: usize = 1024;
/// Rows and columns of threads of `column_sum_final`; at most the warp size.
const FINAL_TILE: u32 = 32;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("reduce/kernel.cu"),
    kernels: &[
        "sum_partials",
        "squared_norm_partials",
        "sum_final",
        "column_sum_partials",
        "column_sum_final",
    ],
    macros: &[Macro::int("FINAL_TILE", FINAL_TILE as usize)],
    dynamic_shared: &[],
};

pub(crate) fn sum(gpu: &Gpu, a: Sum<'_>) -> Result<()> {
    expect(a.x, DType::F32, a.x.len());
    expect(a.out, DType::F32, 1);
    if let Scale::Memory(scale) = a.scale {
        expect(scale, DType::F32, 1);
    }
    let partials = gpu.alloc(DType::F32, SUM_BLOCKS)?;
    let launch = Launch::sharing(a.x.len(), 1, SUM_BLOCKS);
    let partials = partials.slice(0..launch.grid.0);
    // SAFETY: checked above; there is one partial sum per block.
    unsafe { gpu.launch("sum_partials", launch, args![a.x, partials, a.x.len()]) }?;
    sum_final(gpu, partials, a.scale, a.out, a.acc == Accumulate::Add)
}

pub(crate) fn squared_norm(gpu: &Gpu, a: SquaredNorm<'_>) -> Result<()> {
    expect_grad(a.x, a.x.len());
    expect(a.out, DType::F32, 1);
    let partials = gpu.alloc(DType::F32, SUM_BLOCKS)?;
    let launch = Launch::sharing(a.x.len(), VEC, SUM_BLOCKS);
    let partials = partials.slice(0..launch.grid.0);
    let args = args![a.x, is_bf16(a.x), partials, a.x.len()];
    // SAFETY: checked above; there is one partial sum per block.
    unsafe { gpu.launch("squared_norm_partials", launch, args) }?;
    sum_final(gpu, partials, Scale::Constant(1.0), a.out, false)
}

/// `out (+)= scale * sum(partials)`.
fn sum_final(gpu: &Gpu, partials: Slice<'_>, scale: Scale<'_>, out: Slice<'_>, add: bool) -> Result<()> {
    let (constant, memory) = match scale {
        Scale::Constant(scale) => (scale, None),
        Scale::Memory(scale) => (1.0, Some(scale)),
    };
    let args = args![partials, partials.len(), constant, memory, out, add];
    // SAFETY: the callers have allocated `partials` and checked `out`.
    unsafe { gpu.launch("sum_final", Launch::blocks(1, BLOCK_THREADS), args) }
}

pub(crate) fn column_sum(gpu: &Gpu, args: ColumnSum<'_>) -> Result<()> {
    let ColumnSum { rows, cols, x, out, acc } = args;
    gpu.expect_act(x, rows * cols);
    expect_grad(out, cols);
    let sums = ColumnSums::new(gpu, rows, cols)?;
    sums.partials_of(gpu, x)?;
    sums.finish(gpu, out, acc)
}

/// Column sums of an (N, C) array: memory for partial sums, and the launch of the kernel that writes them.
pub(crate) struct ColumnSums {
    /// N.
    pub(crate) rows: usize,
    /// C.
    pub(crate) cols: usize,
    /// Launch of `column_sum_partials`, or of another kernel that also writes the same partial sums.
    pub(crate) launch: Launch,
    /// (grid rows of `launch`, C).
    pub(crate) partials: Tensor,
}

impl ColumnSums {
    /// Plans as many blocks as run at once, each over its share of the rows.
    #[track_caller]
    pub(crate) fn new(gpu: &Gpu, rows: usize, cols: usize) -> Result<Self> {
        let (x, y) = COLUMN_BLOCK;
        let column_blocks = cols.div_ceil(x as usize * VEC);
        let at_once = gpu.device.multiprocessors as usize * COLUMN_SUM_BLOCKS_PER_SM;
        let row_blocks = (at_once / column_blocks).clamp(1, rows.div_ceil(y as usize).max(1));
        let launch = Launch { grid: (column_blocks, row_blocks, 1), block: COLUMN_BLOCK, shared: 0 };
        Ok(Self { rows, cols, launch, partials: gpu.alloc(DType::F32, row_blocks * cols)? })
    }

    /// Writes the partial sums of `x` (N, C). The caller has checked `x`.
    pub(crate) fn partials_of(&self, gpu: &Gpu, x: Slice<'_>) -> Result<()> {
        let args = args![x, self.partials.all(), self.rows, self.cols];
        // SAFETY: the caller has checked x; there is one row of partial sums per grid row.
        unsafe { gpu.launch("column_sum_partials", self.launch, args) }
    }

    /// `out (+)= sum of the partial sums`. The caller has checked `out`.
    pub(crate) fn finish(&self, gpu: &Gpu, out: Slice<'_>, acc: Accumulate) -> Result<()> {
        column_sum_final(gpu, &self.partials, self.cols, &[out], acc)
    }
}

/// `outs[i] (+)= sum over j of partials[i, j]` with partials (outs, any, C). The caller has checked `outs`.
pub(crate) fn column_sum_final(
    gpu: &Gpu,
    partials: &Tensor,
    cols: usize,
    outs: &[Slice<'_>],
    acc: Accumulate,
) -> Result<()> {
    let count = partials.len() / (outs.len() * cols);
    let [first, second, third] = [0, 1, 2].map(|i| outs.get(i).copied());
    let bf16 = outs.iter().any(|out| is_bf16(*out));
    assert!(outs.len() <= 3 && outs.iter().all(|out| is_bf16(*out) == bf16), "column sums of {outs:?}");
    let args = args![partials.all(), count, cols, first, second, third, bf16, acc == Accumulate::Add];
    let grid = (cols.div_ceil(FINAL_TILE as usize), outs.len(), 1);
    let launch = Launch { grid, block: (FINAL_TILE, FINAL_TILE), shared: 0 };
    // SAFETY: partials holds (outs, count, cols) floats; the caller has checked `outs`.
    unsafe { gpu.launch("column_sum_final", launch, args) }
}
