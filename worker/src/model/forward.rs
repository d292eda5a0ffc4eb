//! Forward: from tokens to the output of the final norm. Keeps the activations that backward needs.

use std::rc::Rc;

use xlaunch_engine::{
    AttentionForward, DType, EmbedForward, EmbedShape, EngineError, LinearShape, NormForward, Residual,
    ResidualAdd, Result, Slice, Tensor,
};

use super::layout;
use super::linear::Use;
use super::saved_activations::{Block, Inputs, Normed, SavedActivations};
use super::{Model, Rows, attention_shape};

/// The activations that backward needs. Backward frees each tensor after its last use.
#[derive(Debug)]
pub struct Activations {
    pub(super) rows: Rows,
    pub(super) blocks: Vec<SavedActivations>,
    /// Input, output and statistics of the final norm.
    pub(super) last: Normed,
}

impl Model {
    /// Runs the pass over `tokens`, I32 `[B, T]`, up to the head.
    pub fn forward(&self, rows: Rows, tokens: Slice<'_>) -> Result<Activations> {
        self.forward_with_gathers(rows, tokens, || Ok(()))
    }

    /// Same as [`forward`](Self::forward), while weights are still being gathered: calls `next_part()` before each of
    /// the layout's [`forward_parts`](layout::Layout::forward_parts). The last part is the head.
    pub fn forward_with_gathers<E: From<EngineError>>(
        &self,
        rows: Rows,
        tokens: Slice<'_>,
        mut next_part: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Activations, E> {
        let _tag = xlaunch_pool::tag("forward");
        let mut blocks = Vec::with_capacity(self.shape.layers);
        next_part()?;
        let mut ln1 = self.norm(rows, self.embed(rows, tokens)?, &self.layout.blocks[0].ln1)?;
        for (index, params) in self.layout.blocks.iter().enumerate() {
            let next = self.layout.blocks.get(index + 1).map_or(&self.layout.lnf, |block| &block.ln1);
            next_part()?;
            let block = self.block(rows, ln1, params)?;
            let shape = Self::linear_shape(rows, self.shape.ffn, self.shape.dim);
            let branch = self.linear(shape, &block.inputs.out, &params.out)?;
            ln1 = self.add_norm(rows, &block.ln2.x, branch, next)?;
            blocks.push(SavedActivations::new(block, self.memory.recompute));
        }
        next_part()?;
        Ok(Activations { rows, blocks, last: ln1 })
    }

    fn embed(&self, rows: Rows, tokens: Slice<'_>) -> Result<Tensor> {
        let x = self.activation(rows.count() * self.shape.dim)?;
        let wpe = self.layout.wpe.as_ref().map(|wpe| self.param(wpe));
        let wte = self.param(&self.layout.wte);
        let shape = self.embed_shape(rows);
        self.backend.run(EmbedForward { shape, tokens, wte, wpe, positions: None, out: x.all() })?;
        Ok(x)
    }

    pub(super) fn embed_shape(&self, rows: Rows) -> EmbedShape {
        EmbedShape { batch: rows.batch, seq: rows.seq, cols: self.shape.dim, vocab: self.shape.vocab }
    }

    /// Computes one block, from its first norm to the output of the activation function, which is all that backward
    /// needs.
    pub(super) fn block(&self, rows: Rows, ln1: Normed, params: &layout::Block) -> Result<Block> {
        let (n, shape) = (rows.count(), &self.shape);
        let (y, ln1) = ln1.split();
        let qkv_input = self.input(n, y, Use::Both)?;
        let qkv_shape = Self::linear_shape(rows, shape.dim, shape.qkv_width());
        let qkv = self.linear(qkv_shape, &qkv_input, &params.qkv)?;
        let qkv_input = qkv_input.kept();
        let att = Rc::new(self.activation(n * shape.attention_width())?);
        let lse = self.backend.alloc(DType::F32, n * shape.heads)?;
        self.backend.run(AttentionForward {
            shape: attention_shape(&self.shape, rows),
            qkv: qkv.all(),
            rope: self.rope(rows),
            out: att.all(),
            lse: lse.all(),
        })?;
        let proj_input = self.input(n, att.clone(), Use::Both)?;
        let proj_shape = Self::linear_shape(rows, shape.attention_width(), shape.dim);
        let branch = self.linear(proj_shape, &proj_input, &params.proj)?;
        let proj_input = proj_input.kept();
        let (y, ln2) = self.add_norm(rows, &ln1.x, branch, &params.ln2)?.split();

        let fc_input = self.input(n, y, Use::Both)?;
        let fc_shape = Self::linear_shape(rows, shape.dim, shape.ffn);
        let [h, a] = match (shape.gated, &params.fc.bias) {
            (false, Some(bias)) => self.linear_gelu(fc_shape, &fc_input, &params.fc, self.param(bias))?,
            _ => {
                let gates = LinearShape { outputs: 2 * shape.ffn, ..fc_shape };
                self.linear_swiglu(gates, &fc_input, &params.fc)?
            }
        };
        let out_input = self.input(n, Rc::new(a), Use::Both)?;
        let inputs = Inputs { qkv: qkv_input, proj: proj_input, fc: fc_input.kept(), out: out_input };
        Ok(Block { ln1, inputs, qkv, att, lse, ln2, h })
    }

    pub(super) fn norm(&self, rows: Rows, x: Tensor, params: &layout::Norm) -> Result<Normed> {
        let stats = self.backend.alloc(DType::F32, self.norm_shape(rows).stats())?;
        self.norm_with_stats(rows, x, stats, params)
    }

    /// Computes the norm of `x`; overwrites `stats`.
    pub(super) fn norm_with_stats(
        &self,
        rows: Rows,
        x: Tensor,
        stats: Tensor,
        params: &layout::Norm,
    ) -> Result<Normed> {
        let y = self.activation(x.len())?;
        self.backend.run(NormForward {
            shape: self.norm_shape(rows),
            x: x.all(),
            residual: Residual::None,
            gamma: self.param(&params.weight),
            beta: params.bias.as_ref().map(|bias| self.param(bias)),
            y: y.all(),
            stats: stats.all(),
        })?;
        Ok(Normed { x, y, stats })
    }

    /// Computes the residual stream `x + branch` and its norm in one kernel.
    fn add_norm(&self, rows: Rows, x: &Tensor, branch: Tensor, params: &layout::Norm) -> Result<Normed> {
        let shape = self.norm_shape(rows);
        let sum = self.activation(x.len())?;
        let y = self.activation(x.len())?;
        let stats = self.backend.alloc(DType::F32, shape.stats())?;
        self.backend.run(NormForward {
            shape,
            x: x.all(),
            residual: Residual::Before(ResidualAdd { branch: branch.all(), sum: sum.all() }),
            gamma: self.param(&params.weight),
            beta: params.bias.as_ref().map(|bias| self.param(bias)),
            y: y.all(),
            stats: stats.all(),
        })?;
        Ok(Normed { x: sum, y, stats })
    }
}
