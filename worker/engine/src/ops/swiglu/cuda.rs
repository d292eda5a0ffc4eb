//! SwiGLU launches.

use super::{SwigluBackward, SwigluForward};
use crate::cuda::{Gpu, KernelFile, Launch, Macro, args, source, vec_threads};
use crate::error::Result;

/// Rows that a block's threads fetch together.
const SWIGLU_ROWS: usize = 2;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("swiglu/kernel.cu"),
    kernels: &["swiglu_fwd", "swiglu_bwd"],
    macros: &[Macro::int("SWIGLU_ROWS", SWIGLU_ROWS)],
    dynamic_shared: &[],
};

pub(crate) fn forward(gpu: &Gpu, args: SwigluForward<'_>) -> Result<()> {
    let SwigluForward { rows, ffn, h, a } = args;
    gpu.expect_act(h, 2 * rows * ffn);
    gpu.expect_act(a, rows * ffn);
    let launch = Launch::blocks(rows.div_ceil(SWIGLU_ROWS), vec_threads(gpu, ffn));
    // SAFETY: checked above.
    unsafe { gpu.launch("swiglu_fwd", launch, args![h, a, rows, ffn]) }
}

pub(crate) fn backward(gpu: &Gpu, args: SwigluBackward<'_>) -> Result<()> {
    let SwigluBackward { rows, ffn, h, da, dh } = args;
    [h, dh].into_iter().for_each(|x| gpu.expect_act(x, 2 * rows * ffn));
    gpu.expect_act(da, rows * ffn);
    let launch = Launch::blocks(rows.div_ceil(SWIGLU_ROWS), vec_threads(gpu, ffn));
    // SAFETY: checked above.
    unsafe { gpu.launch("swiglu_bwd", launch, args![h, da, dh, rows, ffn]) }
}
