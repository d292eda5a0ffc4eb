//! Launch of greedy decoding.

use xlaunch_pool::DType;

use super::Greedy;
use crate::cuda::{Gpu, KernelFile, Launch, args, expect, source};
use crate::error::Result;

/// Threads of a block, which processes one row.
const GREEDY_THREADS: u32 = 1024;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("greedy/kernel.cu"),
    kernels: &["greedy"],
    macros: &[],
    dynamic_shared: &[],
};

pub(crate) fn run(gpu: &Gpu, a: Greedy<'_>) -> Result<()> {
    let padded = a.logits.len() / a.rows.max(1);
    assert!(padded >= a.vocab, "{padded} logits of {}", a.vocab);
    expect(a.logits, DType::F32, a.rows * padded);
    [a.tokens, a.positions].into_iter().for_each(|ids| expect(ids, DType::I32, a.rows));
    expect(a.ids, DType::F32, a.rows);
    let args = args![a.logits, a.tokens, a.positions, a.ids, a.vocab, padded, a.last];
    // SAFETY: checked above.
    unsafe { gpu.launch("greedy", Launch::blocks(a.rows, GREEDY_THREADS), args) }
}
