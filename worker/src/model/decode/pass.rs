//! A pass through the blocks and the head.

use xlaunch_engine::{
    Accumulate, ActivationForward, AddScaled, CachedAttention, CachedAttentionShape, EmbedForward,
    EmbedShape, GEMV_ROWS, Gemv, GluForward, Greedy, LinearActivationForward, LinearForward, LinearShape,
    QkNormForward, QkNorms, Residual, ResidualAdd, Result, Slice, SoftCap, Tensor,
};
use xlaunch_spec::model::Parallel;

use super::Decoder;
use super::buffers::{Buffers, attention_shape};
use crate::model::expert_buffers::ExpertBuffers;
use crate::model::feed_forward::Layers;
use crate::model::layout::{self, Linear};
use crate::model::{Rows, narrow};

/// The residual stream of a pass: the index of its buffer, and its number of rows.
#[derive(Clone, Copy)]
struct Stream {
    x: usize,
    rows: usize,
}

impl Decoder<'_> {
    /// Runs all blocks; the normalised output is in `b.y`. `distinct` states that no two rows share a slot.
    pub(super) fn pass(&self, b: &Buffers, rows: usize, distinct: bool) -> Result<()> {
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
            rope: self.rope.as_ref().unwrap_or(&model.rope).of_block(&model.shape, block).map(Tensor::all),
            slots: b.slots.slice(0..rows),
            positions: b.positions.slice(0..rows),
            distinct,
            keys: self.cache[block].keys.all(),
            values: self.cache[block].values.all(),
            sinks: model.layout.blocks[block].sinks.as_ref().map(|sinks| model.param(sinks)),
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
            let (inputs, end, amax) = (model.glu_inputs(), None, None);
            return model.backend.run(GluForward { activation, inputs, rows, ffn, h, a, end, amax });
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
        model.adapter_forward_with(shape, params, x, z, y, Accumulate::Add)
    }

    /// Computes the logits of the rows of `x`, and their most likely tokens as rows of the next step.
    pub(super) fn head(&self, x: &Tensor) -> Result<()> {
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
