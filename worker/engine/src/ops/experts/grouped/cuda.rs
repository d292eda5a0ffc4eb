//! Launches of the grouped GEMMs: tensor cores for bf16, FP32 units otherwise.

use xlaunch_pool::DType;

use super::{GroupedBackwardInput, GroupedBackwardWeight, GroupedForward, GroupedShape};
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
    fn row_tiles(self) -> usize {
        self.rows / TILE + self.experts.min(self.rows)
    }

    /// Returns whether all arrays can be copied as vectors.
    fn wide(self, arrays: &[Slice<'_>]) -> bool {
        vectorizable(self.inputs, arrays) && vectorizable(self.outputs, arrays)
    }
}

pub(super) fn forward(gpu: &Gpu, args: GroupedForward<'_>) -> Result<()> {
    let GroupedForward { shape: s, offsets, x, w, y } = args;
    s.check(gpu, offsets, [x, y]);
    gpu.expect_act(w, s.weights_len());
    let launch = launch(s.row_tiles() * s.outputs.div_ceil(TILE));
    let args = args![offsets, x, w, y, s.experts, s.inputs, s.outputs, s.wide(&[x, w, y])];
    // SAFETY: checked above; offsets do not decrease and end with M by the operation's contract.
    unsafe { gpu.launch("grouped_fwd", launch, args) }
}

pub(super) fn backward_input(gpu: &Gpu, args: GroupedBackwardInput<'_>) -> Result<()> {
    let GroupedBackwardInput { shape: s, offsets, dy, w, dx } = args;
    s.check(gpu, offsets, [dx, dy]);
    gpu.expect_act(w, s.weights_len());
    let launch = launch(s.row_tiles() * s.inputs.div_ceil(TILE));
    let args = args![offsets, dy, w, dx, s.experts, s.inputs, s.outputs, s.wide(&[dy, w, dx])];
    // SAFETY: as in forward.
    unsafe { gpu.launch("grouped_bwd_input", launch, args) }
}

pub(super) fn backward_weight(gpu: &Gpu, args: GroupedBackwardWeight<'_>) -> Result<()> {
    let GroupedBackwardWeight { shape: s, offsets, dy, x, dw, acc } = args;
    s.check(gpu, offsets, [x, dy]);
    expect_grad(dw, s.weights_len());
    let launch = launch(s.experts * s.outputs.div_ceil(TILE) * s.inputs.div_ceil(TILE));
    let add = acc == Accumulate::Add;
    let args = args![offsets, dy, x, dw, is_bf16(dw), add, s.inputs, s.outputs, s.wide(&[dy, x])];
    // SAFETY: as in forward.
    unsafe { gpu.launch("grouped_bwd_weight", launch, args) }
}
