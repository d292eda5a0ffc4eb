//! LayerNorm and RMSNorm: which kernels, in how many blocks.

use super::kernels::{Launch, args};
use super::{CudaBackend, THREADS, expect, expect_grad};
use crate::DType;
use crate::backend::{Backend, Result};
use crate::shapes::{Accumulate, NormKind, NormShape};
use crate::tensor::Slice;

/// Most threads of a block of the norm kernels that keep rows in registers, eight columns each: MOST_THREADS there.
const NORM_THREADS: usize = 192;
/// Rows that their threads take at once: ROWS there.
const NORM_ROWS: usize = 2;

impl CudaBackend {
    /// [`Backend::norm_fwd`], or, with a branch, [`Backend::add_norm_fwd`].
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    pub(super) fn norm_forward(
        &self,
        s: NormShape,
        x: Slice<'_>,
        branch_and_sum: Option<(Slice<'_>, Slice<'_>)>,
        gamma: Slice<'_>,
        beta: Option<Slice<'_>>,
        y: Slice<'_>,
        stats: Slice<'_>,
    ) -> Result<()> {
        let (branch, sum) = branch_and_sum.unzip();
        [Some(x), branch, sum, Some(y)].into_iter().flatten().for_each(|x| self.act(x, s.rows * s.cols));
        self.act(gamma, s.cols);
        self.maybe_act(beta, s.cols);
        expect(stats, DType::F32, s.stats());
        let (means, scales) = split_stats(s, stats);
        let operands: Vec<Slice<'_>> =
            [Some(x), branch, sum, Some(gamma), beta, Some(y)].into_iter().flatten().collect();
        let (name, launch) = match norm_block(s, &operands) {
            Some(block) => ("norm_fwd", Launch::rows(s.rows.div_ceil(block.1 as usize * NORM_ROWS), block)),
            None => ("norm_fwd_any", Launch::blocks(s.rows, THREADS)),
        };
        let any =
            (name == "norm_fwd_any").then_some(("norm_fwd", "rows too long, or no multiple of 8 elements"));
        self.fallback.took("norm", s, name, any);
        let args = args![x, branch, sum, gamma, beta, y, means, scales, s.rows, s.cols, s.eps];
        // SAFETY: checked above.
        unsafe { self.launch(name, launch, args) }
    }

    /// [`Backend::norm_bwd`].
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    pub(super) fn norm_backward(
        &self,
        s: NormShape,
        x: Slice<'_>,
        gamma: Slice<'_>,
        stats: Slice<'_>,
        dy: Slice<'_>,
        dx: Slice<'_>,
        add: bool,
        dgamma: Slice<'_>,
        dbeta: Option<Slice<'_>>,
        dsum: Option<Slice<'_>>,
        acc: Accumulate,
    ) -> Result<()> {
        [x, dy, dx].into_iter().for_each(|x| self.act(x, s.rows * s.cols));
        self.act(gamma, s.cols);
        expect(stats, DType::F32, s.stats());
        let outputs: Vec<Slice<'_>> = [Some(dgamma), dbeta, dsum].into_iter().flatten().collect();
        outputs.iter().for_each(|grad| expect_grad(*grad, s.cols));
        let (means, scales) = split_stats(s, stats);
        let (name, launch) = match norm_block(s, &[x, gamma, dy, dx]) {
            Some(block) => {
                let threads = if self.activations == DType::Bf16 { 3 } else { 2 } * NORM_THREADS;
                let at_once = threads / (block.0 * block.1) as usize * self.device.multiprocessors as usize;
                let blocks = s.rows.div_ceil(block.1 as usize * NORM_ROWS).min(at_once);
                ("norm_bwd", Launch::rows(blocks, block))
            }
            None => {
                let at_once = 2 * self.device.multiprocessors as usize;
                ("norm_bwd_any", Launch::blocks(s.rows.min(at_once), THREADS))
            }
        };
        let blocks = launch.grid.0;
        let partials = self.alloc(DType::F32, outputs.len() * blocks * s.cols)?;
        let mut parts = (0..).map(|i| partials.slice(i * blocks * s.cols..(i + 1) * blocks * s.cols));
        let mut part = |wanted: bool| if wanted { parts.next() } else { None };
        let (gammas, betas, sums) = (part(true), part(dbeta.is_some()), part(dsum.is_some()));
        let args = args![x, gamma, means, scales, dy, dx, add, gammas, betas, sums, s.rows, s.cols];
        // SAFETY: checked above; there are as many rows of partial sums as blocks.
        unsafe { self.launch(name, launch, args) }?;
        self.column_sum_final(&partials, blocks, s.cols, &outputs, acc)
    }
}

/// Means and reciprocal deviations in a norm's statistics.
fn split_stats(s: NormShape, stats: Slice<'_>) -> (Option<Slice<'_>>, Slice<'_>) {
    match s.kind {
        NormKind::Layer => (Some(stats.slice(0..s.rows)), stats.slice(s.rows..2 * s.rows)),
        NormKind::Rms => (None, stats),
    }
}

/// The block of the norm kernels that keep rows in registers: threads of a row and rows; none where a row is too wide
/// or cannot be taken eight by eight.
fn norm_block(s: NormShape, operands: &[Slice<'_>]) -> Option<(u32, u32)> {
    let threads = s.cols.div_ceil(8).next_multiple_of(32);
    let eights = s.cols.is_multiple_of(8) && operands.iter().all(|x| x.address().is_multiple_of(16));
    (eights && threads <= NORM_THREADS).then(|| (threads as u32, (NORM_THREADS / threads) as u32))
}
