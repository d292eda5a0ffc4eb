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

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use xlaunch_engine::{
    ActivationForward, AddScaled, CachedAttention, CachedAttentionShape, Capture, DType, EmbedForward,
    EmbedShape, GEMV_ROWS, Gemv, GluForward, Greedy, LinearActivationForward, LinearForward, LinearShape,
    PendingRead, QkNormForward, QkNorms, Residual, ResidualAdd, Result, Slice, SoftCap, Tensor,
};
use xlaunch_spec::model::{Parallel, QkNorm};

use super::expert_buffers::ExpertBuffers;
use super::feed_forward::Layers;
use super::layout::{self, Linear};
use super::{Model, Rows, attention_options, narrow};

/// Maximum number of sequences that are decoded at once.
pub const MAX_SLOTS: usize = GEMV_ROWS;
/// Maximum number of rows in a pass over prompts.
const PREFILL_ROWS: usize = 512;

/// The next token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Slot of the sequence.
    pub slot: usize,
    /// Number of tokens before this one.
    pub position: usize,
    /// Id of the token, below the vocabulary size.
    pub token: u32,
}

/// A model with a cache of keys and values.
#[derive(Debug)]
pub struct Decoder<'a> {
    model: &'a Model,
    slots: usize,
    capacity: usize,
    /// Only ids below this can be generated.
    vocab: usize,
    cache: Vec<BlockCache>,
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

/// Inputs and activations of a pass of up to `rows` rows.
#[derive(Debug)]
struct Buffers {
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    /// The residual stream, before and after an addition.
    x: [Tensor; 2],
    y: Tensor,
    stats: Tensor,
    qkv: Tensor,
    /// The same with queries and keys normalised; empty without such norms.
    normed: Tensor,
    att: Tensor,
    branch: Tensor,
    h: Tensor,
    a: Tensor,
    partials: Tensor,
    counters: Tensor,
    /// Inputs of the adapters' second matrices; empty without adapters.
    z: Tensor,
    /// `None` without experts.
    experts: Option<ExpertBuffers>,
}

/// The residual stream of a pass: the index of its buffer, and its number of rows.
#[derive(Clone, Copy)]
struct Stream {
    x: usize,
    rows: usize,
}

impl<'a> Decoder<'a> {
    /// Creates a cache for `slots` sequences of up to `capacity` tokens. Only ids below `vocab` are considered as most
    /// likely.
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
        Ok(Self {
            model,
            slots,
            capacity,
            vocab: vocab.min(shape.vocab),
            cache,
            step: Buffers::new(model, slots, slots, capacity)?,
            rows: 0,
            last: backend.alloc(act, slots * shape.dim)?,
            logits: backend.alloc(DType::F32, slots * shape.padded_vocab())?,
            ids: backend.alloc(DType::F32, slots)?,
            graphs: RefCell::default(),
        })
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

    /// Runs all blocks; the normalised output is in `b.y`. `distinct` states that no two rows share a slot.
    fn pass(&self, b: &Buffers, rows: usize, distinct: bool) -> Result<()> {
        let (model, shape) = (self.model, &self.model.shape);
        let (dim, width) = (shape.dim, shape.attention_width());
        let embed = EmbedShape { batch: rows, seq: 1, cols: dim, vocab: shape.vocab };
        let positions = b.positions.slice(0..rows);
        model.backend.run(EmbedForward {
            shape: embed,
            tokens: b.tokens.slice(0..rows),
            wte: model.param(&model.layout.wte),
            wpe: model.layout.wpe.as_ref().map(|wpe| model.param(wpe)),
            positions: model.layout.wpe.as_ref().map(|_| positions),
            documents: None,
            out: b.x[0].slice(0..rows * dim),
        })?;
        model.scale(b.x[0].slice(0..rows * dim), model.embedding_factor())?;
        let mut stream = Stream { x: 0, rows };
        let mut input = self.norm(b, stream, model.layout.blocks[0].ln1.as_ref())?;
        for (index, params) in model.layout.blocks.iter().enumerate() {
            let branch = b.branch.slice(0..rows * dim);
            self.linear(b, rows, input, &params.qkv, (dim, shape.qkv_width()), &b.qkv)?;
            self.attention(b, rows, index, distinct)?;
            self.linear(b, rows, b.att.slice(0..rows * width), &params.proj, (width, dim), &b.branch)?;
            input = match shape.parallel {
                Parallel::No => self.add(b, &mut stream, params.post1.as_ref(), params.ln2.as_ref())?,
                Parallel::SharedNorm => input,
                Parallel::TwoNorms => self.norm(b, stream, params.ln2.as_ref())?,
            };
            if let Some((experts, router)) = b.experts.as_ref().zip(params.router.as_ref()) {
                if let Some(shared) = &params.shared {
                    self.shared_experts(b, stream, (experts, shared), input)?;
                }
                let add = params.shared.is_some();
                experts.run(model, rows, input, (index, router), branch, add)?;
                input = self.add(b, &mut stream, params.post2.as_ref(), model.layout.norm_after(index))?;
                continue;
            }
            self.mlp(b, rows, input, model.dense_layers(params))?;
            let a = b.a.slice(0..rows * shape.ffn);
            if shape.parallel == Parallel::No {
                self.linear(b, rows, a, &params.out, (shape.ffn, dim), &b.branch)?;
            } else {
                let free = &b.x[1 - stream.x];
                self.linear(b, rows, a, &params.out, (shape.ffn, dim), free)?;
                let y = free.slice(0..rows * dim);
                model.backend.run(AddScaled { x: Some(branch), y, factor: 1.0, out: branch })?;
            }
            input = self.add(b, &mut stream, params.post2.as_ref(), model.layout.norm_after(index))?;
        }
        model.scale(input, narrow(shape.logit_scale))
    }

    /// Adds `branch`, normalised if there is a norm for it, to the residual stream. Returns what the next layer reads.
    fn add<'b>(
        &self,
        b: &'b Buffers,
        stream: &mut Stream,
        post: Option<&layout::Norm>,
        next: Option<&layout::Norm>,
    ) -> Result<Slice<'b>> {
        let (model, len) = (self.model, stream.rows * self.model.shape.dim);
        let (branch, factor) = (b.branch.slice(0..len), narrow(model.shape.residual_scale));
        let (x, sum) = (b.x[stream.x].slice(0..len), b.x[1 - stream.x].slice(0..len));
        stream.x = 1 - stream.x;
        if let Some(post) = post {
            self.run_norm(b, stream.rows, branch, Residual::After(x), post, sum)?;
            return self.norm(b, *stream, next);
        }
        let Some(next) = next else {
            model.backend.run(AddScaled { x: Some(x), y: branch, factor, out: sum })?;
            return Ok(sum);
        };
        model.scale(branch, factor)?;
        let y = b.y.slice(0..len);
        self.run_norm(b, stream.rows, x, Residual::Before(ResidualAdd { branch, sum }), next, y)?;
        Ok(y)
    }

    /// Normalises the residual stream, if there is a norm. Returns what the next layer reads.
    fn norm<'b>(
        &self,
        b: &'b Buffers,
        Stream { x, rows }: Stream,
        params: Option<&layout::Norm>,
    ) -> Result<Slice<'b>> {
        let len = rows * self.model.shape.dim;
        let (x, y) = (b.x[x].slice(0..len), b.y.slice(0..len));
        let Some(params) = params else { return Ok(x) };
        self.run_norm(b, rows, x, Residual::None, params, y)?;
        Ok(y)
    }

    fn run_norm(
        &self,
        b: &Buffers,
        rows: usize,
        x: Slice<'_>,
        residual: Residual<'_>,
        params: &layout::Norm,
        y: Slice<'_>,
    ) -> Result<()> {
        let (model, rows) = (self.model, Rows::new(rows, 1));
        let stats = b.stats.slice(0..model.norm_shape(rows).stats());
        model.run_norm(rows, x, residual, params, y, stats)
    }

    fn attention(&self, b: &Buffers, rows: usize, block: usize, distinct: bool) -> Result<()> {
        let model = self.model;
        let shape = CachedAttentionShape { rows, ..attention_shape(model, block, self.slots, self.capacity) };
        let mut qkv = b.qkv.slice(0..rows * shape.qkv_width());
        if let Some(norms) = model.qk_norms(Rows::new(rows, 1), block) {
            let out = b.normed.slice(0..qkv.len());
            // Attention rotates, as only it knows the positions.
            let norms = QkNorms { rope: None, ..norms };
            model.backend.run(QkNormForward { norms, qkv, out })?;
            qkv = out;
        }
        model.backend.run(CachedAttention {
            shape,
            qkv,
            rope: model.rope_table(block).map(Tensor::all),
            slots: b.slots.slice(0..rows),
            positions: b.positions.slice(0..rows),
            distinct,
            keys: self.cache[block].keys.all(),
            values: self.cache[block].values.all(),
            partials: b.partials.all(),
            counters: b.counters.all(),
            out: b.att.slice(0..rows * shape.heads * shape.width),
        })
    }

    /// Writes the output of a block's shared experts to `b.branch`.
    fn shared_experts(
        &self,
        b: &Buffers,
        Stream { x: stream, rows }: Stream,
        (experts, shared): (&ExpertBuffers, &layout::Shared),
        x: Slice<'_>,
    ) -> Result<()> {
        let (model, dim, width) = (self.model, self.model.shape.dim, self.model.shape.shared_width());
        self.mlp(b, rows, x, model.shared_layers(shared))?;
        let a = b.a.slice(0..rows * width);
        let Some(gate) = &shared.gate else {
            return self.linear(b, rows, a, &shared.out, (width, dim), &b.branch);
        };
        let free = &b.x[1 - stream];
        self.linear(b, rows, a, &shared.out, (width, dim), free)?;
        let [y, out] = [free, &b.branch].map(|tensor| tensor.slice(0..rows * dim));
        experts.gate(model, rows, gate, [x, y, out])
    }

    /// Computes the inputs `a` of the last one of these layers from `x`.
    fn mlp(&self, b: &Buffers, rows: usize, x: Slice<'_>, layers: Layers<'_>) -> Result<()> {
        let (model, sizes) = (self.model, &self.model.shape);
        let Layers { fc, width: ffn, outputs, .. } = layers;
        let a = b.a.slice(0..rows * ffn);
        let activation = model.activation_function();
        if sizes.gated {
            self.linear(b, rows, x, fc, (sizes.dim, outputs), &b.h)?;
            let h = b.h.slice(0..rows * outputs);
            return model.backend.run(GluForward { activation, rows, ffn, h, a, end: None });
        }
        if fc.adapter.is_some() {
            self.linear(b, rows, x, fc, (sizes.dim, ffn), &b.h)?;
            let h = b.h.slice(0..rows * ffn);
            return model.backend.run(ActivationForward { activation, h, a });
        }
        let (w, bias) = (model.param(&fc.weight), fc.bias.as_ref().map(|bias| model.param(bias)));
        let shape = LinearShape { rows, inputs: sizes.dim, outputs: ffn };
        if rows <= GEMV_ROWS {
            return model.backend.run(Gemv { shape, x, w, bias, activation: Some(activation), y: a });
        }
        let h = b.h.slice(0..rows * ffn);
        model.backend.run(LinearActivationForward { shape, activation, x, w, bias, h, a })
    }

    /// Computes a layer; `sizes` are the numbers of inputs and outputs.
    fn linear(
        &self,
        b: &Buffers,
        rows: usize,
        x: Slice<'_>,
        params: &Linear,
        sizes: (usize, usize),
        y: &Tensor,
    ) -> Result<()> {
        let (model, shape) = (self.model, LinearShape { rows, inputs: sizes.0, outputs: sizes.1 });
        let y = y.slice(0..rows * sizes.1);
        let (w, bias) = (model.param(&params.weight), params.bias.as_ref().map(|bias| model.param(bias)));
        if rows <= GEMV_ROWS {
            model.backend.run(Gemv { shape, x, w, bias, activation: None, y })?;
        } else {
            model.backend.run(LinearForward { shape, x, w, bias, y })?;
        }
        let z = b.z.slice(0..rows * model.adapter_width(params));
        model.add_adapter_with(shape, params, x, z, y)
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

    /// Computes the logits of the rows of `x`, and their most likely tokens as rows of the next step.
    fn head(&self, x: &Tensor) -> Result<()> {
        let (model, rows, dim) = (self.model, self.rows, self.model.shape.dim);
        let padded = model.shape.padded_vocab();
        let logits = self.logits.slice(0..rows * padded);
        model.backend.run(Gemv {
            shape: LinearShape { rows, inputs: dim, outputs: padded },
            x: x.slice(0..rows * dim),
            w: model.param(&model.layout.head),
            bias: model.layout.head_bias.as_ref().map(|bias| model.param(bias)),
            activation: None,
            y: logits,
        })?;
        if let Some(cap) = model.logit_softcap() {
            model.backend.run(SoftCap { x: logits, cap })?;
        }
        model.backend.run(Greedy {
            rows,
            vocab: self.vocab,
            logits,
            tokens: self.step.tokens.slice(0..rows),
            positions: self.step.positions.slice(0..rows),
            last: self.capacity - 1,
            ids: self.ids.slice(0..rows),
        })
    }
}

impl Buffers {
    fn new(model: &Model, rows: usize, slots: usize, capacity: usize) -> Result<Self> {
        let (shape, backend) = (&model.shape, &model.backend);
        let attention = attention_shape(model, 0, slots, capacity);
        let act = |cols: usize| backend.alloc(backend.activation_dtype(), rows * cols);
        let ints = |len: usize| {
            let tensor = backend.alloc(DType::I32, len)?;
            backend.zero(tensor.all())?;
            Ok::<Tensor, xlaunch_engine::EngineError>(tensor)
        };
        let partials = (1..=rows).map(|rows| CachedAttentionShape { rows, ..attention }.partials()).max();

        let stats = model.norm_shape(Rows::new(rows, 1)).stats();
        Ok(Self {
            tokens: ints(rows)?,
            slots: ints(rows)?,
            positions: ints(rows)?,
            x: [act(shape.dim)?, act(shape.dim)?],
            y: act(shape.dim)?,
            stats: backend.alloc(DType::F32, stats)?,
            qkv: act(shape.qkv_width())?,
            normed: act(if shape.qk_norm == QkNorm::None { 0 } else { shape.qkv_width() })?,
            att: act(shape.attention_width())?,
            branch: act(shape.dim)?,
            h: act(shape.ffn_inputs().max(shape.shared_inputs()))?,
            a: act(shape.ffn.max(shape.shared_width()))?,
            partials: backend.alloc(DType::F32, partials.unwrap_or(0))?,
            counters: ints(rows * shape.heads)?,
            z: act(model.widest_adapter())?,
            experts: (shape.experts > 0).then(|| ExpertBuffers::new(model, rows)).transpose()?,
        })
    }

    fn write(&self, model: &Model, rows: &[Row]) -> Result<()> {
        let write = |tensor: &Tensor, value: fn(&Row) -> usize| {
            let values: Vec<i32> = rows.iter().map(|row| id(value(row))).collect();
            model.backend.write_i32(tensor.slice(0..rows.len()), &values)
        };
        write(&self.tokens, |row| row.token as usize)?;
        write(&self.slots, |row| row.slot)?;
        write(&self.positions, |row| row.position)
    }
}

/// Returns the rows of a prompt in a slot.
fn prompt_rows(slot: usize, tokens: &[u32]) -> impl Iterator<Item = Row> {
    tokens.iter().enumerate().map(move |(position, token)| Row { slot, position, token: *token })
}

fn attention_shape(model: &Model, block: usize, slots: usize, capacity: usize) -> CachedAttentionShape {
    let shape = &model.shape;
    let (heads, kv_heads, width) = (shape.heads, shape.kv_heads, shape.head_width());
    let options = attention_options(shape, block);
    CachedAttentionShape { rows: 0, heads, kv_heads, width, slots, capacity, options }
}

/// Converts a number of the model to an id; all of them are below 2^31.
fn id(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BackendHandle, init};
    use xlaunch_engine::{Backend, PoolMode};
    use xlaunch_spec::model::{Arch, ModelSection, ModelShape};

    fn shapes() -> Vec<ModelShape> {
        let shape = |arch, kv_heads, tied| {
            let section = ModelSection {
                arch: Some(arch),
                layers: Some(3),
                heads: Some(4),
                kv_heads: Some(kv_heads),
                dim: Some(64),
                ffn: Some(100),
                seq: Some(48),
                vocab: Some(1100),
                tied: Some(tied),
                ..ModelSection::default()
            };
            section.resolve().unwrap()
        };
        let one = shape(Arch::Llama, 1, true);
        let shared = |shared_gate| {
            let sizes = ModelShape { expert_ffn: 40, ..shape(Arch::Qwen3Moe, 2, false) };
            ModelShape { dense_layers: 1, shared_experts: 3, shared_gate, router_bias: shared_gate, ..sizes }
        };
        let mut shapes = vec![shape(Arch::Gpt2, 4, true), shape(Arch::Llama, 2, false), one];
        shapes.extend([shared(false), shared(true)]);
        shapes.extend(Arch::ALL[2..].iter().map(|arch| {
            let shape = shape(*arch, 2, !arch.base().head_bias);
            let window = if shape.window == 0 { 0 } else { 7 };
            ModelShape { window, query_scale: 0.3, residual_scale: residual_scale(*arch), ..shape }
        }));
        shapes
    }

    fn residual_scale(arch: Arch) -> f64 {
        if arch == Arch::Granite { 0.5 } else { 1.0 }
    }

    fn model(shape: &ModelShape) -> Model {
        let backend = BackendHandle::new(Backend::cpu(2, PoolMode::On));
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let layout = layout::Layout::new(shape);
        let mut weights = init::weights(&layout, 3, &threads);
        // Weights are larger than at the start of training, and biases are not zero, so that logits differ.
        let mut random = crate::random::Random::new(1, "test");
        for weight in &mut weights {
            #[expect(clippy::cast_possible_truncation, reason = "test data")]
            let noise = (random.uniform() - 0.5) as f32;
            *weight = 3.0 * *weight + 0.1 * noise;
        }
        Model::new(&backend, shape, &weights).unwrap()
    }

    /// Returns the logits of the last of these tokens, computed by the forward pass of training.
    fn forward(model: &Model, tokens: &[u32]) -> Vec<f32> {
        let rows = Rows::new(1, model.shape.seq);
        let ids = model.backend.alloc(DType::I32, rows.seq).unwrap();
        let mut window: Vec<i32> = tokens.iter().map(|token| id(*token as usize)).collect();
        window.resize(rows.seq, 0);
        model.backend.write_i32(ids.all(), &window).unwrap();
        let acts = model.forward(rows, ids.all()).unwrap();
        let mut logits = vec![0.0; model.shape.vocab];
        let last = model.logits(&acts, tokens.len() - 1..tokens.len()).unwrap();
        model.backend.read_f32(last.slice(0..logits.len()), &mut logits).unwrap();
        logits
    }

    fn argmax(logits: &[f32]) -> u32 {
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        u32::try_from(best).unwrap()
    }

    fn ids(decoder: &Decoder<'_>) -> Vec<u32> {
        let mut ids = vec![0.0; decoder.rows];
        decoder.begin_ids().unwrap().wait(&mut ids).unwrap();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "ids are small")]
        ids.into_iter().map(|id| id as u32).collect()
    }

    fn prompt(len: usize, seed: u32) -> Vec<u32> {
        (0..len as u32).map(|i| (seed + i * i * 31) % 1100).collect()
    }

    #[test]
    fn cached_steps_equal_forward_over_the_whole_sequence() {
        for shape in shapes() {
            let model = model(&shape);
            let mut tokens = prompt(9, 5);
            let mut decoder = Decoder::new(&model, 1, shape.seq, shape.vocab).unwrap();
            decoder.prefill(&[(0, &tokens)]).unwrap();
            // The scores of experts amplify rounding.
            let tolerance = if shape.experts > 0 { 2e-4 } else { 5e-5 };
            for step in 0..20 {
                let expected = forward(&model, &tokens);
                let mut logits = vec![0.0; shape.vocab];
                decoder.read_logits(0, &mut logits).unwrap();
                let distance = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let largest = expected.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
                assert!(
                    distance < tolerance * largest,
                    "{:?}, step {step}: {distance:.2e} of {largest}",
                    shape.arch
                );
                assert_eq!(ids(&decoder), [argmax(&expected)], "{:?}, step {step}", shape.arch);
                let token = ids(&decoder)[0];
                if step % 2 == 0 {
                    decoder.set_rows(&[Row { slot: 0, position: tokens.len(), token }]).unwrap();
                }
                tokens.push(token);
                decoder.step().unwrap();
            }
        }
    }

    #[test]
    fn ragged_batch_equals_single_sequences_bit_for_bit_in_steps() {
        for shape in shapes() {
            let model = model(&shape);
            let prompts = [prompt(3, 1), prompt(40, 2), prompt(1, 3), prompt(17, 4)];
            let generate = |prompts: &[Vec<u32>]| {
                let mut decoder = Decoder::new(&model, prompts.len(), shape.seq, shape.vocab).unwrap();
                let slots: Vec<(usize, &[u32])> =
                    prompts.iter().enumerate().map(|(slot, prompt)| (slot, &prompt[..])).collect();
                decoder.prefill(&slots).unwrap();
                let mut generated = vec![ids(&decoder)];
                let row =
                    |(slot, token): (usize, &u32)| Row { slot, position: prompts[slot].len(), token: *token };
                let rows: Vec<Row> = generated[0].iter().enumerate().map(row).collect();
                decoder.set_rows(&rows).unwrap();
                for _ in 0..7 {
                    decoder.step().unwrap();
                    generated.push(ids(&decoder));
                }
                generated
            };
            let together = generate(&prompts);
            for (index, prompt) in prompts.iter().enumerate() {
                let alone: Vec<u32> = generate(std::slice::from_ref(prompt)).concat();
                let batch: Vec<u32> = together.iter().map(|ids| ids[index]).collect();
                assert_eq!(alone, batch, "{:?}, prompt {index}", shape.arch);
            }
        }
    }

    #[test]
    fn logits_of_a_prompt_are_those_after_each_of_its_beginnings() {
        for shape in shapes().into_iter().take(2) {
            let shape = ModelShape { seq: PREFILL_ROWS + 40, ..shape };
            let model = model(&shape);
            let tokens = prompt(PREFILL_ROWS + 7, 3);
            let mut decoder = Decoder::new(&model, 3, shape.seq, shape.vocab).unwrap();
            let mut rows = Vec::new();
            decoder.prefill_with_logits(2, &tokens, &mut |row| rows.push(row.to_vec())).unwrap();
            assert_eq!(rows.len(), tokens.len());
            for len in [1, 2, 30, PREFILL_ROWS, PREFILL_ROWS + 1, tokens.len()] {
                assert_eq!(argmax(&rows[len - 1]), argmax(&forward(&model, &tokens[..len])), "{len} tokens");
            }
            // The prompt is in the cache, and the next token follows it.
            let mut plain = Decoder::new(&model, 3, shape.seq, shape.vocab).unwrap();
            plain.prefill(&[(2, &tokens)]).unwrap();
            for _ in 0..3 {
                assert_eq!(ids(&decoder), ids(&plain));
                let row = Row { slot: 2, position: tokens.len(), token: ids(&plain)[0] };
                for decoder in [&mut decoder, &mut plain] {
                    decoder.set_rows(&[row]).unwrap();
                    decoder.step().unwrap();
                }
            }
        }
    }

    #[test]
    fn long_prompts_take_several_passes() {
        let shape = ModelShape { seq: 3 * PREFILL_ROWS, ..shapes().remove(1) };
        let model = model(&shape);
        let prompts = [prompt(2 * PREFILL_ROWS, 1), prompt(5, 2)];
        let mut decoder = Decoder::new(&model, 2, shape.seq, shape.vocab).unwrap();
        decoder.prefill(&[(1, &prompts[0]), (0, &prompts[1])]).unwrap();
        let expected: Vec<u32> = prompts.iter().map(|prompt| argmax(&forward(&model, prompt))).collect();
        assert_eq!(ids(&decoder), expected);
    }
}
