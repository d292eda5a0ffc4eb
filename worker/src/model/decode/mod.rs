//! Forward for generation: computes new tokens only, with cached keys and values of earlier tokens.
//!
//! ```text
//! prompts --> prefill: rows of all prompts, one after another, in passes --> logits of each prompt's last row
//! set_rows --> step: one row per sequence --> logits, and the most likely tokens as rows of the next step --> step ...
//! ```
//! Each sequence has a slot of the cache. A row is one new token, in a slot and at a position. Rows name their slots
//! and positions, so prompts of different lengths need no padding.
//!
//! A step on a GPU is captured per number of rows, then replayed: all data that changes from step to step is in device
//! memory, and all buffers of a step are allocated once. A greedy step takes its tokens from the previous one, so the
//! host need not wait between them.
//!
//! Invariant: the logits of a row depend on the tokens of its sequence alone.

mod buffers;
mod pass;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use xlaunch_engine::{
    Capture, DType, EmbedForward, EmbedShape, GEMV_ROWS, PendingRead, Result, Slice, Tensor,
};

pub use buffers::Row;
use buffers::{Buffers, id, prompt_rows};

use super::Model;
use super::rope::{self, Rope};

/// Maximum number of sequences that are decoded at once.
pub const MAX_SLOTS: usize = GEMV_ROWS;
/// Maximum number of rows in a pass over prompts.
const PREFILL_ROWS: usize = 512;

/// A model with a cache of keys and values.
#[derive(Debug)]
pub struct Decoder<'a> {
    model: &'a Model,
    slots: usize,
    capacity: usize,
    /// Only ids below this can be generated.
    vocab: usize,
    cache: Vec<BlockCache>,
    /// Rotary tables, if contexts of this capacity have other angles than the model's whole context.
    rope: Option<Rope>,
    step: Buffers,
    /// Number of rows of the next step.
    rows: usize,
    /// Normalised outputs of the last block, for the rows whose logits are requested.
    last: Tensor,
    /// (rows, Vp) F32.
    logits: Tensor,
    /// Most likely token of each row, F32.
    ids: Tensor,
    /// Captured steps by number of rows; `None` if the step has run only once, which has loaded its kernels.
    graphs: RefCell<HashMap<usize, Option<Capture>>>,
}

/// Keys and values of one block, (slots, Hkv, capacity, D) each.
#[derive(Debug)]
struct BlockCache {
    keys: Tensor,
    values: Tensor,
}

impl<'a> Decoder<'a> {
    /// Creates a cache for `slots` sequences of up to `capacity` tokens. Only ids below `vocab` are considered as most
    /// likely. Where a scaling of the rotation depends on the length of the context, that is `capacity`.
    pub fn new(model: &'a Model, slots: usize, capacity: usize, vocab: usize) -> Result<Self> {
        let (shape, backend) = (&model.shape, &model.backend);
        let (slots, capacity) = (slots.clamp(1, MAX_SLOTS), capacity.clamp(1, shape.seq));
        let act = backend.activation_dtype();
        let len = slots * capacity * shape.kv_heads * shape.head_width();
        let block = |_| {
            let [keys, values] = [backend.alloc(act, len)?, backend.alloc(act, len)?];
            Ok(BlockCache { keys, values })
        };
        let cache = (0..shape.layers).map(block).collect::<Result<_>>()?;
        let rotates_alike = Self::rotation_length(model, capacity) == Self::rotation_length(model, shape.seq);
        let rope = (!rotates_alike).then(|| Rope::new(backend, shape, capacity)).transpose()?;
        Ok(Self {
            model,
            slots,
            capacity,
            vocab: vocab.min(shape.vocab),
            cache,
            rope,
            step: Buffers::new(model, slots, slots, capacity)?,
            rows: 0,
            last: backend.alloc(act, slots * shape.dim)?,
            logits: backend.alloc(DType::F32, slots * shape.padded_vocab())?,
            ids: backend.alloc(DType::F32, slots)?,
            graphs: RefCell::default(),
        })
    }

    /// Returns a number that is the same for two capacities if texts are rotated alike with both.
    pub fn rotation_length(model: &Model, capacity: usize) -> usize {
        rope::rotation_length(&model.shape, capacity.min(model.shape.seq))
    }

    /// Returns the size in bytes of one slot of the cache.
    pub fn slot_bytes(model: &Model, capacity: usize) -> usize {
        let shape = &model.shape;
        let elements = 2 * shape.layers * capacity * shape.kv_heads * shape.head_width();
        elements * model.backend.activation_dtype().size()
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns whether steps only enqueue work, so that the next step may be enqueued before the results of the current
    /// one are read.
    pub fn is_asynchronous(&self) -> bool {
        self.model.backend.is_asynchronous()
    }

    /// Fills slots with prompts, at most one per slot. Each has at least one token, and no more than the cache holds.
    /// Afterwards row i of the logits and ids belongs to the token after prompt i.
    pub fn prefill(&mut self, prompts: &[(usize, &[u32])]) -> Result<()> {
        let rows: Vec<Row> = prompts.iter().flat_map(|(slot, tokens)| prompt_rows(*slot, tokens)).collect();
        let mut ends = Vec::with_capacity(prompts.len());
        for (_, tokens) in prompts {
            ends.push(ends.last().copied().unwrap_or(0) + tokens.len());
        }
        let buffers = Buffers::new(self.model, rows.len().min(PREFILL_ROWS), self.slots, self.capacity)?;
        let dim = self.model.shape.dim;
        let mut done = 0;
        for (pass, rows) in rows.chunks(PREFILL_ROWS).enumerate() {
            let first = pass * PREFILL_ROWS;
            buffers.write(self.model, rows)?;
            self.pass(&buffers, rows.len(), false)?;
            let ended = ends[done..].iter().take_while(|end| **end <= first + rows.len()).count();
            if ended > 0 {
                let wanted: Vec<i32> =
                    ends[done..done + ended].iter().map(|end| id(end - 1 - first)).collect();
                let out = self.last.slice(done * dim..(done + ended) * dim);
                self.gather(&buffers, rows.len(), &wanted, out)?;
                done += ended;
            }
        }
        self.rows = prompts.len();
        self.head(&self.last)
    }

    /// Same as [`prefill`](Self::prefill) for a single prompt. Also passes the logits after each of its tokens, in
    /// order, to `each`.
    pub fn prefill_with_logits(
        &mut self,
        slot: usize,
        tokens: &[u32],
        each: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        let rows: Vec<Row> = prompt_rows(slot, tokens).collect();
        let buffers = Buffers::new(self.model, rows.len().min(PREFILL_ROWS), self.slots, self.capacity)?;
        let (padded, vocab) = (self.model.shape.padded_vocab(), self.model.shape.vocab);
        let mut logits = vec![0.0; self.slots * padded];
        for rows in rows.chunks(PREFILL_ROWS) {
            buffers.write(self.model, rows)?;
            self.pass(&buffers, rows.len(), false)?;
            for first in (0..rows.len()).step_by(self.slots) {
                let last = rows.len().min(first + self.slots);
                self.head_of(&buffers, rows.len(), first..last)?;
                let read = &mut logits[..(last - first) * padded];
                self.model.backend.read_f32(self.logits.slice(0..read.len()), read)?;
                read.chunks_exact(padded).for_each(|row| each(&row[..vocab]));
            }
        }
        let rows = rows.len() - (rows.len() - 1) / PREFILL_ROWS * PREFILL_ROWS;
        self.head_of(&buffers, rows, rows - 1..rows)
    }

    /// Sets the rows of the next step, one per sequence.
    pub fn set_rows(&mut self, rows: &[Row]) -> Result<()> {
        self.rows = rows.len();
        self.step.write(self.model, rows)
    }

    /// Enqueues a step over the rows that were set, or over the most likely tokens of the previous step.
    pub fn step(&self) -> Result<()> {
        let enqueue = || {
            self.pass(&self.step, self.rows, true)?;
            self.head(&self.step.y)
        };
        let backend = &self.model.backend;
        if !backend.is_asynchronous() {
            return enqueue();
        }
        let mut graphs = self.graphs.borrow_mut();
        match graphs.get(&self.rows) {
            Some(Some(graph)) => return graph.launch(),
            Some(None) => {}
            None => {
                graphs.insert(self.rows, None);
                return enqueue();
            }
        }
        if !backend.begin_capture()? {
            return enqueue();
        }
        let done = enqueue();
        // End the capture even after an error: the stream would otherwise stay in capture mode.
        let graph = backend.end_capture();
        done?;
        graphs.entry(self.rows).insert_entry(Some(graph?)).get().as_ref().map_or(Ok(()), Capture::launch)
    }

    /// Starts to read the most likely token of each row: -1 if no logit is a number.
    pub fn begin_ids(&self) -> Result<PendingRead> {
        self.model.backend.begin_read(self.ids.slice(0..self.rows))
    }

    /// Reads the logits of a row.
    pub fn read_logits(&self, row: usize, logits: &mut [f32]) -> Result<()> {
        let first = row * self.model.shape.padded_vocab();
        self.model.backend.read_f32(self.logits.slice(first..first + logits.len()), logits)
    }

    /// Returns the number of ids that can be generated.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Computes the logits of `wanted`, a range of the `rows` of a pass.
    fn head_of(&mut self, b: &Buffers, rows: usize, wanted: Range<usize>) -> Result<()> {
        self.rows = wanted.len();
        let wanted: Vec<i32> = wanted.map(id).collect();
        self.gather(b, rows, &wanted, self.last.slice(0..wanted.len() * self.model.shape.dim))?;
        self.head(&self.last)
    }

    /// Copies these rows of the pass's output to `out`.
    fn gather(&self, b: &Buffers, rows: usize, wanted: &[i32], out: Slice<'_>) -> Result<()> {
        let (backend, cols) = (&self.model.backend, self.model.shape.dim);
        let indices = backend.alloc(DType::I32, wanted.len())?;
        backend.write_i32(indices.all(), wanted)?;
        let shape = EmbedShape { batch: wanted.len(), seq: 1, cols, vocab: rows };
        let (tokens, wte) = (indices.all(), b.y.slice(0..rows * cols));
        backend.run(EmbedForward { shape, tokens, wte, wpe: None, positions: None, documents: None, out })
    }
}
