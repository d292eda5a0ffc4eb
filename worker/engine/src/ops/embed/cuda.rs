//! Embedding launches. Backward groups the rows by token (see `kernel.cu`) instead of adding with float atomics.

use xlaunch_pool::DType;

use super::{EmbedBackward, EmbedForward};
use crate::cuda::{
    BLOCK_THREADS, Gpu, KernelFile, Launch, Macro, VEC, args, expect, expect_grad, is_bf16, source,
    vec_threads,
};
use crate::error::Result;

/// Maximum number of threads per row in `embed_fwd`.
const ROW_THREADS: u32 = 128;
/// Threads of a block of `embed_starts` and of `embed_sort`.
const STARTS_THREADS: u32 = 1024;
const SORT_THREADS: u32 = 512;
/// Sorted rows that one block of `embed_bwd_tokens` sums.
pub(super) const PART: usize = 64;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("embed/kernel.cu"),
    kernels: &[
        "embed_fwd",
        "embed_count",
        "embed_starts",
        "embed_places",
        "embed_sort",
        "embed_bwd_tokens",
        "embed_bwd_joins",
        "embed_bwd_positions",
    ],
    macros: &[
        Macro::int("EMBED_STARTS_THREADS", STARTS_THREADS as usize),
        Macro::int("EMBED_SORT_THREADS", SORT_THREADS as usize),
        Macro::int("EMBED_PART", PART),
    ],
    dynamic_shared: &[],
};

pub(crate) fn forward(gpu: &Gpu, a: EmbedForward<'_>) -> Result<()> {
    let s = a.shape;
    let rows = s.batch * s.seq;
    expect(a.tokens, DType::I32, rows);
    gpu.expect_act(a.wte, a.wte.len().max(s.vocab * s.cols));
    if let Some(wpe) = a.wpe {
        let least = if a.positions.is_some() { s.cols } else { s.seq * s.cols };
        gpu.expect_act(wpe, wpe.len().max(least));
    }
    if let Some(positions) = a.positions {
        expect(positions, DType::I32, rows);
    }
    if let Some(documents) = a.documents {
        documents.check(rows);
    }
    gpu.expect_act(a.out, rows * s.cols);
    let first = a.documents.map(|documents| documents.first);
    let threads = vec_threads(gpu, s.cols).min(ROW_THREADS);
    let rows_at_once = if threads < ROW_THREADS { BLOCK_THREADS / threads } else { 1 };
    let block = (threads, rows_at_once);
    let launch = Launch::rows(rows.div_ceil(block.1 as usize), block);
    let args = args![a.tokens, a.wte, a.wpe, a.positions, first, a.out, rows, s.seq, s.cols];
    // SAFETY: checked above; token ids are below V and positions within wpe by the operation's contract.
    unsafe { gpu.launch("embed_fwd", launch, args) }
}

pub(crate) fn backward(gpu: &Gpu, a: EmbedBackward<'_>) -> Result<()> {
    let s = a.shape;
    let rows = s.batch * s.seq;
    expect(a.tokens, DType::I32, rows);
    gpu.expect_act(a.dout, rows * s.cols);
    expect_grad(a.dwte, a.dwte.len().max(s.vocab * s.cols));
    token_gradients(gpu, a)?;
    let Some(dwpe) = a.dwpe else { return Ok(()) };
    expect_grad(dwpe, dwpe.len().max(s.seq * s.cols));
    if let Some(documents) = a.documents {
        documents.check(rows);
    }
    let last = a.documents.map(|documents| documents.last);
    let args = args![a.dout, last, dwpe, is_bf16(dwpe), s.batch, s.seq, s.cols];
    // SAFETY: checked above.
    unsafe { gpu.launch("embed_bwd_positions", row_blocks(gpu, s.seq, s.cols), args) }
}

/// Adds to dwte. The caller has checked the operands.
fn token_gradients(gpu: &Gpu, a: EmbedBackward<'_>) -> Result<()> {
    let (s, rows) = (a.shape, a.shape.batch * a.shape.seq);
    let counters = gpu.alloc(DType::I32, 2 * s.vocab)?;
    gpu.zero(counters.all())?;
    let (counts, placed) = (counters.slice(0..s.vocab), counters.slice(s.vocab..2 * s.vocab));
    let starts = gpu.alloc(DType::I32, s.vocab)?;
    let places = gpu.alloc(DType::I32, 2 * rows)?;
    let (order, sorted) = (places.slice(0..rows), places.slice(rows..2 * rows));
    let parts = rows.div_ceil(PART);
    let partials = gpu.alloc(DType::F32, 2 * parts * s.cols)?;
    let (heads, tails) = (partials.slice(0..parts * s.cols), partials.slice(parts * s.cols..partials.len()));
    let each_row = Launch::threads(rows, BLOCK_THREADS);
    let each_token = Launch::threads(s.vocab, STARTS_THREADS);
    let each_sorted = Launch::threads(rows, SORT_THREADS);
    let each_part = row_blocks(gpu, parts, s.cols);
    let (tokens, starts, bf16) = (a.tokens, starts.all(), is_bf16(a.dwte));
    let sums = args![tokens, sorted, a.dout, a.dwte, bf16, heads, tails, rows, s.cols];
    let joins = args![tokens, counts, starts, sorted, a.dwte, bf16, heads, tails, rows, s.cols];
    // SAFETY: the caller has checked the operands; token ids are below V by the operation's contract, so every counter
    // exists, and all tokens together have `rows` places; heads and tails have one row per part.
    unsafe {
        gpu.launch("embed_count", each_row, args![tokens, counts, rows])?;
        gpu.launch("embed_starts", each_token, args![counts, starts, s.vocab])?;
        gpu.launch("embed_places", each_row, args![tokens, starts, placed, order, rows])?;
        gpu.launch("embed_sort", each_sorted, args![tokens, counts, starts, order, sorted, rows])?;
        gpu.launch("embed_bwd_tokens", each_part, sums)?;
        gpu.launch("embed_bwd_joins", each_part, joins)
    }
}

/// Returns a grid of `count` by the number of blocks that cover `cols` columns, eight per thread.
fn row_blocks(gpu: &Gpu, count: usize, cols: usize) -> Launch {
    let threads = vec_threads(gpu, cols);
    let grid = (count, cols.div_ceil(VEC * threads as usize), 1);
    Launch { grid, ..Launch::blocks(1, threads) }
}
