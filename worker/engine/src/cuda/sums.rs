//! Sums in two stages: every block's, then the sum of those, in one order: the same bits every run.

use super::kernels::{Launch, args};
use super::{CudaBackend, THREADS, expect, expect_grad, is_bf16};
use crate::DType;
use crate::backend::{Backend, Result};
use crate::shapes::Accumulate;
use crate::tensor::{Slice, Tensor};

/// Blocks of column sums that a multiprocessor runs at once.
const SUM_BLOCKS_AT_ONCE: usize = 4;
/// Blocks of a sum's first stage.
const SUM_BLOCKS: usize = 1024;

impl CudaBackend {
    /// [`Backend::sum`].
    pub(super) fn sum_of(&self, x: Slice<'_>, scale: f32, out: Slice<'_>, acc: Accumulate) -> Result<()> {
        expect(x, DType::F32, x.len());
        expect(out, DType::F32, 1);
        let partials = self.alloc(DType::F32, SUM_BLOCKS)?;
        let launch = Launch::blocks(SUM_BLOCKS, THREADS);
        // SAFETY: checked above; there is one partial sum per block.
        unsafe { self.launch("sum_partials", launch, args![x, partials.all(), x.len()]) }?;
        self.sum_final(&partials, scale, out, acc == Accumulate::Add)
    }

    /// [`Backend::square_sum`].
    pub(super) fn square_sum_of(&self, x: Slice<'_>, out: Slice<'_>) -> Result<()> {
        expect_grad(x, x.len());
        expect(out, DType::F32, 1);
        let partials = self.alloc(DType::F32, SUM_BLOCKS)?;
        let args = args![x, is_bf16(x), partials.all(), x.len()];
        // SAFETY: checked above; there is one partial sum per block.
        unsafe { self.launch("square_sum_partials", Launch::blocks(SUM_BLOCKS, THREADS), args) }?;
        self.sum_final(&partials, 1.0, out, false)
    }

    /// As many blocks of column sums as run at once, each over its share of the rows.
    pub(super) fn sums_of_columns(&self, rows: usize, cols: usize) -> Launch {
        let at_once = self.device.multiprocessors as usize * SUM_BLOCKS_AT_ONCE;
        let launch = Launch::wide_columns(cols, 1);
        let row_blocks = (at_once / launch.grid.0).clamp(1, rows.div_ceil(launch.block.1 as usize).max(1));
        Launch::wide_columns(cols, row_blocks)
    }

    /// `outs[i] (+)= sum of count rows of partials`, whose rows of the first output come first.
    pub(super) fn column_sum_final(
        &self,
        partials: &Tensor,
        count: usize,
        cols: usize,
        outs: &[Slice<'_>],
        acc: Accumulate,
    ) -> Result<()> {
        let [first, second, third] = [0, 1, 2].map(|i| outs.get(i).copied());
        let bf16 = outs.iter().any(|out| is_bf16(*out));
        assert!(outs.len() <= 3 && outs.iter().all(|out| is_bf16(*out) == bf16), "column sums of {outs:?}");
        let args = args![partials.all(), count, cols, first, second, third, bf16, acc == Accumulate::Add];
        let launch = Launch { grid: (cols.div_ceil(32), outs.len(), 1), block: (32, 32), shared: 0 };
        // SAFETY: partials holds [outs, count, cols] floats by construction; outs were checked by the caller.
        unsafe { self.launch("column_sum_final", launch, args) }
    }

    /// `out (+)= scale * sum of SUM_BLOCKS partials`.
    fn sum_final(&self, partials: &Tensor, scale: f32, out: Slice<'_>, add: bool) -> Result<()> {
        let args = args![partials.all(), SUM_BLOCKS, scale, out, add];
        // SAFETY: partials holds SUM_BLOCKS floats; out was checked by the caller.
        unsafe { self.launch("sum_final", Launch::blocks(1, THREADS), args) }
    }
}
