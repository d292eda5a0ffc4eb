//! Norm launches: kernels that keep rows in registers if rows are narrow enough, and kernels for any width otherwise.

use xlaunch_pool::DType;

use super::{NormBackward, NormForward, NormKind, NormShape, Residual};
use crate::cuda::{
    BLOCK_THREADS, Gpu, KernelFile, Launch, Macro, VEC, args, expect, expect_grad, source, vectorizable,
};
use crate::error::Result;
use crate::ops::reduce;
use crate::tensor::Slice;

/// Maximum number of threads per block of the kernels that keep rows in registers, with eight columns per thread: for
/// blocks of several rows, and of one row.
const NORM_THREADS: usize = 192;
const NORM_WIDE_THREADS: usize = 1024;
/// Number of rows that a thread works on at a time in blocks of several rows.
const NORM_ROWS: usize = 2;
/// Number of `norm_bwd` blocks that a multiprocessor runs at once, which limits the registers per thread.
const BWD_BLOCKS_BF16: usize = 3;
const BWD_BLOCKS_F32: usize = 2;
/// Blocks of `norm_bwd_any` per multiprocessor.
const BWD_ANY_BLOCKS: usize = 2;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("norm/kernel.cu"),
    kernels: &["norm_fwd", "norm_bwd", "norm_fwd_wide", "norm_bwd_wide", "norm_fwd_any", "norm_bwd_any"],
    macros: &[
        Macro::int("NORM_THREADS", NORM_THREADS),
        Macro::int("NORM_WIDE_THREADS", NORM_WIDE_THREADS),
        Macro::int("NORM_ROWS", NORM_ROWS),
        Macro::int("NORM_BWD_BLOCKS_BF16", BWD_BLOCKS_BF16),
        Macro::int("NORM_BWD_BLOCKS_F32", BWD_BLOCKS_F32),
    ],
    dynamic_shared: &["norm_fwd_wide", "norm_bwd_wide"],
};

pub(crate) fn forward(gpu: &Gpu, a: NormForward<'_>) -> Result<()> {
    let s = a.shape;
    // Without `sum`, the kernels add the other operand after the norm.
    let (other, sum) = match a.residual {
        Residual::None => (None, None),
        Residual::Before(add) => (Some(add.branch), Some(add.sum)),
        Residual::After(stream) => (Some(stream), None),
    };
    [Some(a.x), other, sum, Some(a.y)].into_iter().flatten().for_each(|x| gpu.expect_act(x, s.rows * s.cols));
    gpu.expect_act(a.gamma, s.cols);
    gpu.expect_optional_act(a.beta, s.cols);
    expect(a.stats, DType::F32, s.stats());
    let (means, scales) = split_stats(s, a.stats);
    let operands: Vec<Slice<'_>> =
        [Some(a.x), other, sum, Some(a.gamma), a.beta, Some(a.y)].into_iter().flatten().collect();
    let (name, launch, instead_of) = match RegisterBlock::of(gpu, s, &operands) {
        Some(block) if block.is_wide() => {
            let arrays = if other.is_some() { 2 } else { 1 };
            ("norm_fwd_wide", block.launch(gpu, s, 1, arrays), None)
        }
        Some(block) => ("norm_fwd", block.launch(gpu, s, usize::MAX, 0), None),
        None => {
            let reason = "rows are too wide, or not multiples of 8 elements";
            ("norm_fwd_any", Launch::blocks(s.rows, BLOCK_THREADS), Some(("norm_fwd", reason)))
        }
    };
    gpu.variants.selected("norm", s, name, instead_of);
    let args = args![a.x, other, sum, a.gamma, a.beta, a.y, means, scales, s.rows, s.cols, s.eps, s.offset];
    // SAFETY: checked above.
    unsafe { gpu.launch(name, launch, args) }
}

pub(crate) fn backward(gpu: &Gpu, a: NormBackward<'_>) -> Result<()> {
    let s = a.shape;
    [a.x, a.dy, a.dx].into_iter().for_each(|x| gpu.expect_act(x, s.rows * s.cols));
    gpu.expect_act(a.gamma, s.cols);
    expect(a.stats, DType::F32, s.stats());
    let outputs: Vec<Slice<'_>> = [Some(a.dgamma), a.dbeta, a.dsum].into_iter().flatten().collect();
    outputs.iter().for_each(|grad| expect_grad(*grad, s.cols));
    let (means, scales) = split_stats(s, a.stats);
    let arrays = if a.add_to_dx { 3 } else { 2 };
    let (name, launch) = match RegisterBlock::of(gpu, s, &[a.x, a.gamma, a.dy, a.dx]) {
        Some(block) if block.is_wide() => ("norm_bwd_wide", block.launch(gpu, s, 1, arrays)),
        Some(block) => {
            let at_once = if gpu.activations == DType::Bf16 { BWD_BLOCKS_BF16 } else { BWD_BLOCKS_F32 };
            ("norm_bwd", block.launch(gpu, s, at_once, arrays))
        }
        None => {
            let blocks = s.rows.min(BWD_ANY_BLOCKS * gpu.device.multiprocessors as usize);
            ("norm_bwd_any", Launch::blocks(blocks, BLOCK_THREADS))
        }
    };
    let blocks = launch.grid.0;
    let partials = gpu.alloc(DType::F32, outputs.len() * blocks * s.cols)?;
    let mut parts = (0..).map(|i| partials.slice(i * blocks * s.cols..(i + 1) * blocks * s.cols));
    let mut part = |wanted: bool| if wanted { parts.next() } else { None };
    let (dgammas, dbetas, dsums) = (part(true), part(a.dbeta.is_some()), part(a.dsum.is_some()));
    let (x, dy, dx, add) = (a.x, a.dy, a.dx, a.add_to_dx);
    let args =
        args![x, a.gamma, means, scales, dy, dx, add, dgammas, dbetas, dsums, s.rows, s.cols, s.offset];
    // SAFETY: checked above; there is one row of partial sums per block.
    unsafe { gpu.launch(name, launch, args) }?;
    reduce::cuda::column_sum_final(gpu, &partials, s.cols, &outputs, a.acc)
}

/// Splits statistics into means, if the norm has them, and reciprocal deviations.
fn split_stats(s: NormShape, stats: Slice<'_>) -> (Option<Slice<'_>>, Slice<'_>) {
    match s.kind {
        NormKind::Layer => (Some(stats.slice(0..s.rows)), stats.slice(s.rows..2 * s.rows)),
        NormKind::Rms => (None, stats),
    }
}

/// Block shape of the kernels that keep rows in registers.
#[derive(Clone, Copy)]
struct RegisterBlock {
    row_threads: usize,
    /// Rows side by side.
    rows: usize,
}

impl RegisterBlock {
    /// Returns `None` if a row is too wide or cannot be accessed as vectors.
    fn of(gpu: &Gpu, s: NormShape, operands: &[Slice<'_>]) -> Option<Self> {
        let row_threads = s.cols.div_ceil(VEC).next_multiple_of(gpu.device.warp as usize);
        let rows = (NORM_THREADS / row_threads).max(1);
        (vectorizable(s.cols, operands) && row_threads <= NORM_WIDE_THREADS)
            .then_some(Self { row_threads, rows })
    }

    fn is_wide(self) -> bool {
        self.row_threads > NORM_THREADS
    }

    /// Launches as many blocks as there are rows for and as run at once: `at_once` blocks of the largest size per
    /// multiprocessor. Each block copies its next rows of `arrays` arrays to shared memory.
    fn launch(self, gpu: &Gpu, s: NormShape, at_once: usize, arrays: usize) -> Launch {
        let Self { row_threads, rows } = self;
        let (most, per_thread) =
            if self.is_wide() { (NORM_WIDE_THREADS, 1) } else { (NORM_THREADS, NORM_ROWS) };
        let threads = row_threads * rows;
        let blocks_at_once =
            (at_once.saturating_mul(most) / threads).saturating_mul(gpu.device.multiprocessors as usize);
        let blocks = s.rows.div_ceil(rows * per_thread).min(blocks_at_once);
        let shared = arrays * per_thread * threads * VEC * gpu.activations.size();
        Launch { shared, ..Launch::rows(blocks, (row_threads as u32, rows as u32)) }
    }
}
