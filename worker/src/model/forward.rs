//! Forward: from tokens to the output of the final norm. Keeps the activations that backward needs, if it follows.

use std::rc::Rc;

use xlaunch_engine::{
    AddScaled, AttentionForward, AttentionSinksForward, DType, EmbedForward, EmbedShape, EngineError,
    NormForward, QkNormForward, Residual, ResidualAdd, Result, Slice, Tensor,
};
use xlaunch_spec::model::Parallel;

use super::experts::Run;
use super::fp8::Use;
use super::layout;
use super::pass::{OnProgress, Progress};
use super::saved_activations::{Block, Heads, Inputs, Mlp, Normed, SavedActivations, Unnormed};
use super::{Model, Rows, attention_shape, narrow};

/// The result of the pass, which the head reads.
#[derive(Debug)]
pub struct Output<'a> {
    pub(super) rows: Rows<'a>,
    /// Input, output and statistics of the final norm.
    pub(super) last: Normed,
}

/// The activations that backward needs. Backward frees each tensor after its last use.
#[derive(Debug)]
pub struct Activations<'a> {
    /// The result of the pass.
    pub output: Output<'a>,
    pub(super) blocks: Vec<SavedActivations>,
}

impl Model {
    /// Runs the pass over `tokens`, I32 `[B, T]`, up to the head. The model must have all experts.
    pub fn forward<'a>(&self, rows: Rows<'a>, tokens: Slice<'_>) -> Result<Activations<'a>> {
        assert_eq!(self.layout.expert_groups.size, 1, "experts are on other ranks");
        self.forward_with_progress(rows, tokens, |_| Ok(()))
    }

    /// Same as [`forward`](Self::forward), while weights are still being gathered: the layout's
    /// [`forward_parts`](layout::Layout::forward_parts) are announced one by one. The last part is the head.
    pub fn forward_with_progress<'a, E: From<EngineError>>(
        &self,
        rows: Rows<'a>,
        tokens: Slice<'_>,
        progress: impl FnMut(Progress) -> std::result::Result<(), E>,
    ) -> std::result::Result<Activations<'a>, E> {
        let mut blocks = Vec::with_capacity(self.shape.layers);
        let keep = |block| blocks.push(SavedActivations::new(block, self.memory.recompute));
        let output = self.forward_blocks(rows, tokens, progress, keep)?;
        Ok(Activations { output, blocks })
    }

    /// Same as [`forward`](Self::forward) without backward: each block's activations are freed after it.
    pub fn output<'a>(&self, rows: Rows<'a>, tokens: Slice<'_>) -> Result<Output<'a>> {
        assert_eq!(self.layout.expert_groups.size, 1, "experts are on other ranks");
        self.output_with_progress(rows, tokens, |_| Ok(()))
    }

    /// Same as [`forward_with_progress`](Self::forward_with_progress) without backward.
    pub fn output_with_progress<'a, E: From<EngineError>>(
        &self,
        rows: Rows<'a>,
        tokens: Slice<'_>,
        progress: impl FnMut(Progress) -> std::result::Result<(), E>,
    ) -> std::result::Result<Output<'a>, E> {
        self.forward_blocks(rows, tokens, progress, drop)
    }

    fn forward_blocks<'a, E: From<EngineError>>(
        &self,
        rows: Rows<'a>,
        tokens: Slice<'_>,
        mut progress: impl FnMut(Progress) -> std::result::Result<(), E>,
        mut keep: impl FnMut(Block),
    ) -> std::result::Result<Output<'a>, E> {
        let _tag = xlaunch_pool::tag("forward");
        progress(Progress::NextPart)?;
        let x = Rc::new(self.embed(rows, tokens)?);
        let mut stream = self.norm(rows, x, self.layout.blocks[0].ln1.as_ref())?;
        for index in 0..self.shape.layers {
            progress(Progress::NextPart)?;
            let (mut block, beside) = self.block(rows, index, stream, Run::First, &mut progress)?;
            let next = self.layout.norm_after(index);
            stream = self.end_block(rows, &mut block, beside, next, &mut progress)?;
            keep(block);
        }
        progress(Progress::NextPart)?;
        self.scale(stream.y.all(), narrow(self.shape.logit_scale))?;
        Ok(Output { rows, last: stream })
    }

    fn embed(&self, rows: Rows<'_>, tokens: Slice<'_>) -> Result<Tensor> {
        let x = self.activation(rows.count() * self.shape.dim)?;
        let wpe = self.layout.wpe.as_ref().map(|wpe| self.param(wpe));
        let wte = self.param(&self.layout.wte);
        let (shape, documents) = (self.embed_shape(rows), rows.documents);
        self.backend.run(EmbedForward {
            shape,
            tokens,
            wte,
            wpe,
            positions: None,
            documents,
            out: x.all(),
        })?;
        self.scale(x.all(), self.embedding_factor())?;
        Ok(x)
    }

    /// Multiplies a tensor by a factor, in place.
    pub(super) fn scale(&self, x: Slice<'_>, factor: f32) -> Result<()> {
        if factor == 1.0 {
            return Ok(());
        }
        self.backend.run(AddScaled { x: None, y: x, factor, out: x })
    }

    pub(super) fn embed_shape(&self, rows: Rows<'_>) -> EmbedShape {
        EmbedShape { batch: rows.batch, seq: rows.seq, cols: self.shape.dim, vocab: self.shape.vocab }
    }

    /// Computes one block up to the output of the activation function, or up to those of experts. If the layers are
    /// side by side, also returns attention's projected output.
    pub(super) fn block<E: From<EngineError>>(
        &self,
        rows: Rows<'_>,
        index: usize,
        ln1: Normed,
        run: Run,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<(Block, Option<Tensor>), E> {
        let (n, shape, params) = (rows.count(), &self.shape, &self.layout.blocks[index]);
        let (y, ln1) = ln1.split();
        let qkv_input = self.input(n, y.clone(), Use::Both)?;
        let qkv_shape = Self::linear_shape(rows, shape.dim, shape.qkv_width());
        let heads = self.heads(rows, index, self.linear(qkv_shape, &qkv_input, &params.qkv)?)?;
        let qkv_input = qkv_input.kept();
        let att = Rc::new(self.activation(n * shape.attention_width())?);
        let lse = self.backend.alloc(DType::F32, n * shape.heads)?;
        let attention = attention_shape(shape, rows, index);
        self.backend.run(AttentionForward {
            shape: attention,
            qkv: heads.read().all(),
            rope: self.rope(rows, index).filter(|_| heads.normed.is_none()),
            documents: rows.documents,
            out: att.all(),
            lse: lse.all(),
        })?;
        if let Some(sinks) = params.sinks.as_ref().map(|sinks| self.param(sinks)) {
            let (out, lse) = (att.all(), lse.all());
            self.backend.run(AttentionSinksForward { shape: attention, sinks, out, lse })?;
        }
        let proj_input = self.input(n, att.clone(), Use::Both)?;
        let proj_shape = Self::linear_shape(rows, shape.attention_width(), shape.dim);
        let branch = self.linear(proj_shape, &proj_input, &params.proj)?;
        let proj_input = proj_input.kept();
        let ln2 = params.ln2.as_ref();
        let (y, ln2, post1, beside) = match shape.parallel {
            Parallel::No => {
                let (sum, post1) = self.add(rows, &ln1.x, branch, params.post1.as_ref(), ln2)?;
                let (y, ln2) = sum.split();
                (y, ln2, post1, None)
            }
            Parallel::SharedNorm => (y, Unnormed { x: ln1.x.clone(), stats: None }, None, Some(branch)),
            Parallel::TwoNorms => {
                let (y, ln2) = self.norm(rows, ln1.x.clone(), ln2)?.split();
                (y, ln2, None, Some(branch))
            }
        };

        let mlp = if let Some(router) = &params.router {
            let experts = self.experts(index, router, &y, run, progress)?;
            let shared = params.shared.as_ref().map(|shared| self.shared_experts(&y, shared)).transpose()?;
            Mlp::Experts { x: y, experts, shared }
        } else {
            Mlp::Dense(self.dense(n, y, self.dense_layers(params))?)
        };
        let inputs = Inputs { qkv: qkv_input, proj: proj_input };
        Ok((Block { index, ln1, inputs, heads, att, lse, post1, ln2, mlp, post2: None }, beside))
    }

    /// Adds a block's output to the residual stream, and normalises the sum for what follows. `beside` is attention's
    /// projected output if it is still missing in the stream.
    pub(super) fn end_block<E: From<EngineError>>(
        &self,
        rows: Rows<'_>,
        block: &mut Block,
        beside: Option<Tensor>,
        next: Option<&layout::Norm>,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<Normed, E> {
        let params = &self.layout.blocks[block.index];
        let branch = match &block.mlp {
            Mlp::Dense(dense) => self.dense_output(rows.count(), dense, self.dense_layers(params))?,
            Mlp::Experts { experts, shared, .. } => {
                let shared = shared.as_ref().zip(params.shared.as_ref());
                let output = |(shared, params)| self.shared_output(rows.count(), shared, params);
                self.combined(experts, || shared.map(output).transpose(), progress)?
            }
        };
        if let Some(beside) = beside {
            let (x, y) = (Some(beside.all()), branch.all());
            self.backend.run(AddScaled { x, y, factor: 1.0, out: y })?;
        }
        let (sum, post2) = self.add(rows, &block.ln2.x, branch, params.post2.as_ref(), next)?;
        block.post2 = post2;
        Ok(sum)
    }

    /// Prepares queries and keys for attention, as far as it doesn't do so itself.
    pub(super) fn heads(&self, rows: Rows<'_>, index: usize, qkv: Tensor) -> Result<Heads> {
        let Some(norms) = self.qk_norms(rows, index) else { return Ok(Heads { qkv, normed: None }) };
        let normed = self.activation(qkv.len())?;
        self.backend.run(QkNormForward { norms, qkv: qkv.all(), out: normed.all() })?;
        Ok(Heads { qkv, normed: Some(normed) })
    }

    /// Normalises `x`, if there is a norm.
    pub(super) fn norm(
        &self,
        rows: Rows<'_>,
        x: Rc<Tensor>,
        params: Option<&layout::Norm>,
    ) -> Result<Normed> {
        let stats =
            params.map(|_| self.backend.alloc(DType::F32, self.norm_shape(rows).stats())).transpose()?;
        self.norm_again(rows, Unnormed { x, stats }, params)
    }

    /// Same as [`norm`](Self::norm); overwrites the statistics.
    pub(super) fn norm_again(
        &self,
        rows: Rows<'_>,
        Unnormed { x, stats }: Unnormed,
        params: Option<&layout::Norm>,
    ) -> Result<Normed> {
        let y = match params.zip(stats.as_ref()) {
            Some((params, stats)) => Rc::new(self.new_norm(rows, &x, Residual::None, params, stats)?),
            None => x.clone(),
        };
        Ok(Normed { x, y, stats })
    }

    /// Computes the residual stream `x + branch`, with the branch's norm, if there is one, and the norm of the sum.
    /// Also returns the branch as backward needs it.
    fn add(
        &self,
        rows: Rows<'_>,
        x: &Tensor,
        branch: Tensor,
        post: Option<&layout::Norm>,
        next: Option<&layout::Norm>,
    ) -> Result<(Normed, Option<Unnormed>)> {
        let factor = narrow(self.shape.residual_scale);
        if let Some(post) = post {
            let (branch, stats) =
                (Rc::new(branch), self.backend.alloc(DType::F32, self.norm_shape(rows).stats())?);
            let sum = self.new_norm(rows, &branch, Residual::After(x.all()), post, &stats)?;
            let normed = self.norm(rows, Rc::new(sum), next)?;
            return Ok((normed, Some(Unnormed { x: branch, stats: Some(stats) })));
        }
        let sum = self.activation(x.len())?;
        let Some(next) = next else {
            let (stream, y) = (Some(x.all()), branch.all());
            self.backend.run(AddScaled { x: stream, y, factor, out: sum.all() })?;
            return Ok((self.norm(rows, Rc::new(sum), None)?, None));
        };
        // One kernel adds and normalises.
        self.scale(branch.all(), factor)?;
        let stats = self.backend.alloc(DType::F32, self.norm_shape(rows).stats())?;
        let residual = Residual::Before(ResidualAdd { branch: branch.all(), sum: sum.all() });
        let y = self.new_norm(rows, x, residual, next, &stats)?;
        Ok((Normed { x: Rc::new(sum), y: Rc::new(y), stats: Some(stats) }, None))
    }

    fn new_norm(
        &self,
        rows: Rows<'_>,
        x: &Tensor,
        residual: Residual<'_>,
        params: &layout::Norm,
        stats: &Tensor,
    ) -> Result<Tensor> {
        let y = self.activation(x.len())?;
        self.run_norm(rows, x.all(), residual, params, y.all(), stats.all())?;
        Ok(y)
    }

    /// Computes a norm into `y`.
    pub(super) fn run_norm(
        &self,
        rows: Rows<'_>,
        x: Slice<'_>,
        residual: Residual<'_>,
        params: &layout::Norm,
        y: Slice<'_>,
        stats: Slice<'_>,
    ) -> Result<()> {
        let (shape, gamma) = (self.norm_shape(rows), self.param(&params.weight));
        let beta = params.bias.as_ref().map(|bias| self.param(bias));
        self.backend.run(NormForward { shape, x, residual, gamma, beta, y, stats })
    }
}
