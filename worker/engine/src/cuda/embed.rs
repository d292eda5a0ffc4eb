//! Embeddings: rows looked up, and their gradients by lists of the rows that each token has.

use super::kernels::{Launch, args};
use super::{CudaBackend, THREADS, eights, expect, expect_grad, is_bf16};
use crate::DType;
use crate::backend::{Backend, Result};
use crate::shapes::EmbedShape;
use crate::tensor::Slice;

/// Threads of a row's embedding: each copies eight columns.
const EMBED_THREADS: u32 = 128;
/// Threads of a block of embed_starts and of embed_sort.
const STARTS_THREADS: u32 = 1024;
const SORT_THREADS: u32 = 512;
/// PART in embed.cu.
const PART: usize = 64;

impl CudaBackend {
    /// [`Backend::embed_fwd`].
    pub(super) fn embed_forward(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        wte: Slice<'_>,
        wpe: Option<Slice<'_>>,
        out: Slice<'_>,
    ) -> Result<()> {
        let rows = s.batch * s.seq;
        expect(tokens, DType::I32, rows);
        self.act(wte, wte.len().max(s.vocab * s.cols));
        if let Some(wpe) = wpe {
            self.act(wpe, wpe.len().max(s.seq * s.cols));
        }
        self.act(out, rows * s.cols);
        let args = args![tokens, wte, wpe, out, s.seq, s.cols];
        // SAFETY: checked above; token ids are below V by the operation's contract.
        unsafe { self.launch("embed_fwd", Launch::blocks(rows, EMBED_THREADS), args) }
    }

    /// [`Backend::embed_bwd`].
    pub(super) fn embed_backward(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        dout: Slice<'_>,
        dwte: Slice<'_>,
        dwpe: Option<Slice<'_>>,
    ) -> Result<()> {
        let rows = s.batch * s.seq;
        expect(tokens, DType::I32, rows);
        self.act(dout, rows * s.cols);
        expect_grad(dwte, dwte.len().max(s.vocab * s.cols));
        self.embed_bwd_tokens(s, tokens, dout, dwte)?;
        let Some(dwpe) = dwpe else { return Ok(()) };
        expect_grad(dwpe, dwpe.len().max(s.seq * s.cols));
        let threads = eights(s.cols);
        let grid = (s.seq, s.cols.div_ceil(8 * threads as usize), 1);
        let launch = Launch { grid, ..Launch::blocks(1, threads) };
        let args = args![dout, dwpe, is_bf16(dwpe), s.batch, s.seq, s.cols];
        // SAFETY: checked above.
        unsafe { self.launch("embed_bwd_positions", launch, args) }
    }

    /// Adds the rows of each token of the vocabulary to its gradient.
    fn embed_bwd_tokens(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        dout: Slice<'_>,
        dwte: Slice<'_>,
    ) -> Result<()> {
        let rows = s.batch * s.seq;
        let counters = self.alloc(DType::I32, 2 * s.vocab)?;
        self.zero(counters.all())?;
        let (counts, placed) = (counters.slice(0..s.vocab), counters.slice(s.vocab..2 * s.vocab));
        let starts = self.alloc(DType::I32, s.vocab)?;
        let places = self.alloc(DType::I32, 2 * rows)?;
        let (order, sorted) = (places.slice(0..rows), places.slice(rows..2 * rows));
        let each_row = Launch::blocks(rows.div_ceil(THREADS as usize), THREADS);
        let each_token = Launch::blocks(s.vocab.div_ceil(STARTS_THREADS as usize), STARTS_THREADS);
        let parts = rows.div_ceil(PART);
        let partials = self.alloc(DType::F32, 2 * parts * s.cols)?;
        let (heads, tails) =
            (partials.slice(0..parts * s.cols), partials.slice(parts * s.cols..partials.len()));
        let threads = eights(s.cols);
        let grid = (parts, s.cols.div_ceil(8 * threads as usize), 1);
        let each_part = Launch { grid, ..Launch::blocks(1, threads) };
        let each_sorted = Launch::blocks(rows.div_ceil(SORT_THREADS as usize), SORT_THREADS);
        let (starts, bf16) = (starts.all(), is_bf16(dwte));
        let sums = args![tokens, sorted, dout, dwte, bf16, heads, tails, rows, s.cols];
        let joins = args![tokens, counts, starts, sorted, dwte, bf16, heads, tails, rows, s.cols];
        // SAFETY: the caller checked the operands; token ids are below V by the operation's contract, so every counter
        // exists and the places of all tokens are as many as there are rows; a part has a row each of heads and tails.
        unsafe {
            self.launch("embed_count", each_row, args![tokens, counts, rows])?;
            self.launch("embed_starts", each_token, args![counts, starts, s.vocab])?;
            self.launch("embed_places", each_row, args![tokens, starts, placed, order, rows])?;
            self.launch("embed_sort", each_sorted, args![tokens, counts, starts, order, sorted, rows])?;
            self.launch("embed_bwd_tokens", each_part, sums)?;
            self.launch("embed_bwd_joins", each_part, joins)
        }
    }
}
