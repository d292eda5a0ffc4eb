//! The checksum in two stages: one partial sum per block, then their sum.

use xlaunch_pool::DType;

use super::{CHECKSUM_DIGITS, Checksum, words};
use crate::cuda::{BLOCK_THREADS, Gpu, KernelFile, Launch, Macro, args, expect, source};
use crate::error::Result;

/// Blocks of the first stage.
const CHECKSUM_BLOCKS: usize = 1024;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("checksum/kernel.cu"),
    kernels: &["checksum_partials", "checksum_final"],
    macros: &[Macro::int("CHECKSUM_DIGITS", CHECKSUM_DIGITS)],
    dynamic_shared: &[],
};

pub(crate) fn run(gpu: &Gpu, a: Checksum<'_>) -> Result<()> {
    let words = words(a.x);
    expect(a.out, DType::F32, CHECKSUM_DIGITS);
    let partials = gpu.alloc(DType::U8, CHECKSUM_BLOCKS * size_of::<u64>())?;
    let launch = Launch::blocks(CHECKSUM_BLOCKS, BLOCK_THREADS);
    // SAFETY: x holds this number of words; there is one partial sum per block.
    unsafe { gpu.launch("checksum_partials", launch, args![a.x, partials.all(), words]) }?;
    let args = args![partials.all(), CHECKSUM_BLOCKS, a.out];
    // SAFETY: partials holds CHECKSUM_BLOCKS sums; `out` was checked above.
    unsafe { gpu.launch("checksum_final", Launch::blocks(1, BLOCK_THREADS), args) }
}
