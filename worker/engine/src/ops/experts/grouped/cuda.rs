//! Launches of the grouped GEMMs: our own for compute capability 9.0, or portable kernels on tensor cores for bf16 and
//! on FP32 units otherwise. The former are always faster, so nothing is timed.

use std::cell::Cell;

use xlaunch_pool::DType;

use super::{GroupedBackwardInput, GroupedBackwardWeight, GroupedForward, GroupedShape, hopper};
use crate::cuda::{
    BLOCK_THREADS, Gpu, KernelFile, Launch, Macro, args, expect, expect_grad, is_bf16, source, vectorizable,
};
use crate::error::Result;
use crate::ops::Accumulate;
use crate::ops::experts::MAX_EXPERTS;
use crate::tensor::Slice;

/// Rows and columns of a tile of the result.
const TILE: usize = 128;
/// Number of tiles of each operand in shared memory at a time.
const GROUP_STAGES: usize = 3;
/// Bytes of a row of a tile along the sum, without and with the padding that avoids bank conflicts.
const DEPTH_BYTES: usize = 64;
const ROW_BYTES: usize = DEPTH_BYTES + 16;

const KERNEL_NAMES: &[&str] = &["grouped_fwd", "grouped_bwd_input", "grouped_bwd_weight"];

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("experts/grouped/kernel.cu"),
    kernels: KERNEL_NAMES,
    macros: &[
        Macro::int("GROUP_TILE", TILE),
        Macro::int("GROUP_STAGES", GROUP_STAGES),
        Macro::int("GROUP_DEPTH_BYTES", DEPTH_BYTES),
    ],
    dynamic_shared: KERNEL_NAMES,
};

fn launch(blocks: usize) -> Launch {
    Launch { shared: GROUP_STAGES * 2 * TILE * ROW_BYTES, ..Launch::blocks(blocks, BLOCK_THREADS) }
}

impl GroupedShape {
    fn check(self, gpu: &Gpu, offsets: Slice<'_>, [x, y]: [Slice<'_>; 2]) {
        assert!(self.experts <= MAX_EXPERTS, "{self:?}");
        expect(offsets, DType::I32, self.experts + 1);
        gpu.expect_act(x, self.rows * self.inputs);
        gpu.expect_act(y, self.rows * self.outputs);
    }

    fn weights_len(self) -> usize {
        self.experts * self.outputs * self.inputs
    }

    /// Returns the largest number of row tiles of all experts: each expert that has rows may have one that is not full.
    pub(super) fn row_tiles(self, tile: usize) -> usize {
        self.rows / tile + self.experts.min(self.rows)
    }

    /// Returns whether all arrays can be copied as vectors.
    fn wide(self, arrays: &[Slice<'_>]) -> bool {
        vectorizable(self.inputs, arrays) && vectorizable(self.outputs, arrays)
    }
}

/// Grouped GEMMs of a device.
#[derive(Debug, Default)]
pub(crate) struct Grouped {
    /// Set by tests of the portable kernels.
    portable: Cell<bool>,
}

impl Grouped {
    pub(super) fn forward(&self, gpu: &Gpu, args: GroupedForward<'_>) -> Result<()> {
        let GroupedForward { shape: s, offsets, x, w, y } = args;
        s.check(gpu, offsets, [x, y]);
        gpu.expect_act(w, s.weights_len());
        if self.is_own(gpu, "grouped_forward", s, hopper::supports(gpu, s, &[x, w, y])) {
            // SAFETY: checked above; offsets do not decrease and end with M by the operation's contract.
            return unsafe { hopper::forward(gpu, args) };
        }
        let launch = launch(s.row_tiles(TILE) * s.outputs.div_ceil(TILE));
        let args = args![offsets, x, w, y, s.experts, s.inputs, s.outputs, s.wide(&[x, w, y])];
        // SAFETY: as above.
        unsafe { gpu.launch("grouped_fwd", launch, args) }
    }

    pub(super) fn backward_input(&self, gpu: &Gpu, args: GroupedBackwardInput<'_>) -> Result<()> {
        let GroupedBackwardInput { shape: s, offsets, dy, w, dx } = args;
        s.check(gpu, offsets, [dx, dy]);
        gpu.expect_act(w, s.weights_len());
        if self.is_own(gpu, "grouped_backward_input", s, hopper::supports(gpu, s, &[dy, w, dx])) {
            // SAFETY: as in forward.
            return unsafe { hopper::backward_input(gpu, args) };
        }
        let launch = launch(s.row_tiles(TILE) * s.inputs.div_ceil(TILE));
        let args = args![offsets, dy, w, dx, s.experts, s.inputs, s.outputs, s.wide(&[dy, w, dx])];
        // SAFETY: as in forward.
        unsafe { gpu.launch("grouped_bwd_input", launch, args) }
    }

    pub(super) fn backward_weight(&self, gpu: &Gpu, args: GroupedBackwardWeight<'_>) -> Result<()> {
        let GroupedBackwardWeight { shape: s, offsets, dy, x, dw, acc } = args;
        s.check(gpu, offsets, [x, dy]);
        expect_grad(dw, s.weights_len());
        if self.is_own(gpu, "grouped_backward_weight", s, hopper::supports_weight(gpu, &args)) {
            // SAFETY: as in forward.
            return unsafe { hopper::backward_weight(gpu, args) };
        }
        let launch = launch(s.experts * s.outputs.div_ceil(TILE) * s.inputs.div_ceil(TILE));
        let add = acc == Accumulate::Add;
        let args = args![offsets, dy, x, dw, is_bf16(dw), add, s.inputs, s.outputs, s.wide(&[dy, x])];
        // SAFETY: as in forward.
        unsafe { gpu.launch("grouped_bwd_weight", launch, args) }
    }

    /// Runs the portable kernels from now on, or the fastest ones again.
    pub(crate) fn force_portable(&self, portable: bool) {
        self.portable.set(portable);
    }

    /// Selects our own GEMM for compute capability 9.0 if it can run, and logs the choice.
    fn is_own(&self, gpu: &Gpu, operation: &'static str, shape: GroupedShape, is_supported: bool) -> bool {
        let (own, portable) = ("own GEMM, tiles of 128 x 256", "portable kernel");
        let is_own = is_supported && !self.portable.get();
        let reason = "it is not bf16, not aligned, or not on compute capability 9.0";
        let (selected, faster) = if is_own { (own, None) } else { (portable, Some((own, reason))) };
        gpu.variants.selected(operation, shape, selected, faster);
        is_own
    }
}
