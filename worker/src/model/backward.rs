//! Backward: from gradients of the logits to the gradients of all parameters, in the order of the arena.
//!
//! The gradient of a bias is the column sum of its output's gradient. Where that saves a pass over the output's
//! gradient, the kernel that writes it also computes the sum: GELU's backward for `fc`, a norm's backward for `out` and
//! `proj`, if their outputs were added to the residual stream that the norm reads.

use std::rc::Rc;

use xlaunch_engine::{
    Accumulate, AddScaled, AttentionBackward, AttentionSinksBackward, ColumnSum, DType, EmbedBackward,
    EngineError, NormBackward, QkNormBackward, Result, Slice, Tensor,
};
use xlaunch_spec::model::{NormPlace, Parallel};

use super::forward::Activations;
use super::gradient_arena::GradientArena;
use super::layout::{self, Linear};
use super::pass::{OnProgress, Pass, Progress};
use super::saved_activations::{Block, Mlp, Unnormed};
use super::{Model, attention_shape, narrow};

/// The gradient of a norm's input.
#[derive(Clone, Copy)]
enum Gradient<'a> {
    /// It is overwritten.
    New(&'a Tensor),
    /// It already holds the gradient of the residual path.
    Sum(&'a Tensor),
}

impl Model {
    /// Writes (or adds, depending on `acc`) the gradients of all parameters except the head's to `grads`, whose gaps
    /// must be zero. The head's gradients are there already: `dy` is the result of
    /// [`loss_and_gradients`](Self::loss_and_gradients).
    pub fn backward<E: From<EngineError>>(
        &self,
        mut acts: Activations<'_>,
        dy: Tensor,
        tokens: Slice<'_>,
        grads: GradientArena<'_>,
        acc: Accumulate,
        mut progress: impl FnMut(Progress) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let _tag = xlaunch_pool::tag("backward");
        let vectors = self.layout.is_frozen().then(|| 2 * self.widest_vector());
        let discarded = vectors.map(|len| self.backend.alloc(DType::F32, len)).transpose()?;
        let pass = Pass { rows: acts.output.rows, grads, acc, discarded: discarded.as_ref() };
        progress(Progress::NextPart)?;
        let dx = Rc::new(self.top_backward(pass, acts.output.last.split().1, &dy)?);
        if !self.shape.tied && !self.layout.is_frozen() {
            progress(Progress::Finished(self.layout.top_end))?;
        }
        while let Some(kept) = acts.blocks.pop() {
            let index = acts.blocks.len();
            progress(Progress::NextPart)?;
            let block = self.restore(pass.rows, kept, index, &mut progress)?;
            self.block_backward(pass, &block, &dx, &mut progress)?;
            progress(Progress::Finished(self.layout.trained_end(index)))?;
        }
        if !self.layout.is_frozen() {
            self.embed_backward(pass, tokens, &dx)?;
        }
        progress(Progress::Finished(self.layout.trained().len))
    }

    /// Returns the maximum length of a scale or shift of a norm.
    fn widest_vector(&self) -> usize {
        self.shape.dim.max(self.shape.attention_width())
    }

    /// Backward of the final norm. Returns the gradient of the residual stream.
    fn top_backward(&self, pass: Pass<'_>, last: Unnormed, dy: &Tensor) -> Result<Tensor> {
        self.scale(dy.all(), narrow(self.shape.logit_scale))?;
        let dx = self.activation(dy.len())?;
        let added = self.layout.blocks.last().map(|block| &block.out);
        self.norm_backward(pass, &last, &self.layout.lnf, dy, Gradient::New(&dx), added)?;
        Ok(dx)
    }

    /// Backward of one block. `dx` is the gradient of the residual stream after the block, and is updated to the
    /// gradient before it.
    fn block_backward<E: From<EngineError>>(
        &self,
        pass: Pass<'_>,
        block: &Block,
        dx: &Rc<Tensor>,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<(), E> {
        let params = &self.layout.blocks[block.index];
        let below = block.index.checked_sub(1).map(|below| &self.layout.blocks[below].out);
        let (ln1, ln2) = (params.ln1.as_ref(), params.ln2.as_ref());
        let dbranch =
            self.branch_gradient(pass, dx, block.post2.as_ref().zip(params.post2.as_ref()), &params.out)?;
        let dmlp = self.mlp_backward(pass, block, params, &dbranch, progress)?;
        if self.shape.parallel == Parallel::No {
            self.add_gradient(pass, &block.ln2, ln2, &dmlp, dx, Some(&params.proj))?;
        }
        let post1 = block.post1.as_ref().zip(params.post1.as_ref());
        let dbranch = self.branch_gradient(pass, dx, post1, &params.proj)?;
        let datt = self.attention_backward(pass, block, params, &dbranch)?;
        match self.shape.parallel {
            Parallel::No => {}
            Parallel::SharedNorm => {
                let (x, y) = (Some(dmlp.all()), datt.all());
                self.backend.run(AddScaled { x, y, factor: 1.0, out: y })?;
            }
            Parallel::TwoNorms => self.add_gradient(pass, &block.ln2, ln2, &dmlp, dx, None)?,
        }
        Ok(self.add_gradient(pass, &block.ln1, ln1, &datt, dx, below)?)
    }

    /// Returns the gradient of a branch from that of the stream to which it was added. `post` is the branch's norm,
    /// `layer` the layer before that.
    fn branch_gradient(
        &self,
        pass: Pass<'_>,
        dx: &Rc<Tensor>,
        post: Option<(&Unnormed, &layout::Norm)>,
        layer: &Linear,
    ) -> Result<Rc<Tensor>> {
        let factor = narrow(self.shape.residual_scale);
        let gradient = if let Some((normed, params)) = post {
            let gradient = self.activation(dx.len())?;
            self.norm_backward(pass, normed, params, dx, Gradient::New(&gradient), None)?;
            Rc::new(gradient)
        } else if factor == 1.0 {
            dx.clone()
        } else {
            let gradient = self.activation(dx.len())?;
            self.backend.run(AddScaled { x: None, y: dx.all(), factor, out: gradient.all() })?;
            Rc::new(gradient)
        };
        if let Some(out) = pass.bias(layer).filter(|_| !self.norms_sum_biases()) {
            let (rows, cols) = (pass.rows.count(), self.shape.dim);
            self.backend.run(ColumnSum { rows, cols, x: gradient.all(), out, acc: pass.acc })?;
        }
        Ok(gradient)
    }

    /// Returns whether the gradient of the bias of a projection into the stream is the sum of the stream's gradient,
    /// which the backward of the norm after the addition computes.
    fn norms_sum_biases(&self) -> bool {
        let Self { shape, .. } = self;
        shape.parallel == Parallel::No && shape.norm_place == NormPlace::Pre && shape.residual_scale == 1.0
    }

    /// Returns the gradient of the input of the projection to queries, keys and values.
    fn attention_backward(
        &self,
        pass: Pass<'_>,
        block: &Block,
        params: &layout::Block,
        dbranch: &Rc<Tensor>,
    ) -> Result<Tensor> {
        let (n, inputs, shape) = (pass.rows.count(), &block.inputs, &self.shape);
        let dproj = self.output_gradient(n, dbranch.clone())?;
        let proj = pass.layer(&params.proj, [shape.attention_width(), shape.dim], &inputs.proj, &dproj);
        let datt = self.input_gradient(proj)?;
        let dqkv = Rc::new(self.activation(block.heads.qkv.len())?);
        let attention = attention_shape(shape, pass.rows, block.index);
        let sinks = params.sinks.as_ref();
        if let Some((sinks, dsinks)) = sinks.and_then(|sinks| Some((sinks, pass.gradient(sinks)?))) {
            self.backend.run(AttentionSinksBackward {
                shape: attention,
                sinks: self.param(sinks),
                out: block.att.all(),
                dout: datt.all(),
                lse: block.lse.all(),
                dsinks,
                acc: pass.acc,
            })?;
        }
        self.backend.run(AttentionBackward {
            shape: attention,
            qkv: block.heads.read().all(),
            rope: self.rope(pass.rows, block.index).filter(|_| block.heads.normed.is_none()),
            documents: pass.rows.documents,
            out: block.att.all(),
            dout: datt.all(),
            lse: block.lse.all(),
            dqkv: dqkv.all(),
        })?;
        if let Some((norms, [q, k])) = self.qk_norms(pass.rows, block.index).zip(params.qk_norm.as_ref())
            && let (dq_gamma, Some(dk_gamma)) = pass.vectors(q, Some(k))
        {
            let (qkv, dqkv, acc) = (block.heads.qkv.all(), dqkv.all(), pass.acc);
            self.backend.run(QkNormBackward { norms, qkv, dqkv, dq_gamma, dk_gamma, acc })?;
        }
        let dqkv_operand = self.output_gradient(n, dqkv.clone())?;
        let qkv = pass.layer(&params.qkv, [shape.dim, shape.qkv_width()], &inputs.qkv, &dqkv_operand);
        self.weight_gradients([proj, qkv])?;
        if let Some(out) = pass.bias(&params.qkv) {
            let (rows, cols, x, acc) = (n, shape.qkv_width(), dqkv.all(), pass.acc);
            self.backend.run(ColumnSum { rows, cols, x, out, acc })?;
        }
        self.input_gradient(qkv)
    }

    /// Returns the gradient of the input of the feed-forward layers.
    fn mlp_backward<E: From<EngineError>>(
        &self,
        pass: Pass<'_>,
        block: &Block,
        params: &layout::Block,
        dbranch: &Rc<Tensor>,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<Tensor, E> {
        match &block.mlp {
            Mlp::Dense(dense) => {
                Ok(self.dense_backward(pass, dense, self.dense_layers(params), dbranch.clone())?)
            }
            Mlp::Experts { x, experts, shared } => {
                let shared = shared.as_ref().zip(params.shared.as_ref());
                self.experts_backward(pass, block.index, (experts, shared), x, dbranch, progress)
            }
        }
    }

    fn embed_backward(&self, pass: Pass<'_>, tokens: Slice<'_>, dx: &Tensor) -> Result<()> {
        let dwte = pass.grads.slice(self.layout.wte.clone());
        let dwpe = self.layout.wpe.as_ref().map(|wpe| pass.grads.slice(wpe.clone()));
        if pass.acc == Accumulate::Overwrite {
            // A tied table already contains the head's gradient. Other tables start from zero, because the operation
            // only adds.
            for table in dwpe.into_iter().chain((!self.shape.tied).then_some(dwte)) {
                self.backend.zero(table)?;
            }
        }
        self.scale(dx.all(), self.embedding_factor())?;
        let (shape, documents) = (self.embed_shape(pass.rows), pass.rows.documents);
        self.backend.run(EmbedBackward { shape, tokens, documents, dout: dx.all(), dwte, dwpe })
    }

    /// Adds the gradient `dy` of what reads the residual stream, through a norm if there is one, to the gradient of the
    /// stream. `added` is the layer whose output was added to the stream before.
    fn add_gradient(
        &self,
        pass: Pass<'_>,
        normed: &Unnormed,
        params: Option<&layout::Norm>,
        dy: &Tensor,
        dx: &Tensor,
        added: Option<&Linear>,
    ) -> Result<()> {
        match params {
            Some(params) => self.norm_backward(pass, normed, params, dy, Gradient::Sum(dx), added),
            None => {
                let (x, y) = (Some(dx.all()), dy.all());
                self.backend.run(AddScaled { x, y, factor: 1.0, out: dx.all() })
            }
        }
    }

    fn norm_backward(
        &self,
        pass: Pass<'_>,
        normed: &Unnormed,
        params: &layout::Norm,
        dy: &Tensor,
        gradient: Gradient<'_>,
        added: Option<&Linear>,
    ) -> Result<()> {
        let Some(stats) = &normed.stats else { return Ok(()) };
        let (dx, add_to_dx) = match gradient {
            Gradient::New(dx) => (dx, false),
            Gradient::Sum(dx) => (dx, true),
        };
        let added = added.filter(|_| self.norms_sum_biases());
        let (dgamma, dbeta) = pass.vectors(&params.weight, params.bias.as_ref());
        self.backend.run(NormBackward {
            shape: self.norm_shape(pass.rows),
            x: normed.x.all(),
            gamma: self.param(&params.weight),
            stats: stats.all(),
            dy: dy.all(),
            dx: dx.all(),
            add_to_dx,
            dgamma,
            dbeta,
            dsum: added.and_then(|layer| pass.bias(layer)),
            acc: pass.acc,
        })
    }
}
