//! Forward: tokens to the output of the final norm, keeping what backward needs.

use xlaunch_engine::{
    AttentionForward, DType, EmbedForward, EmbedShape, EngineError, LinearForward, LinearGeluForward,
    LinearSwigluForward, NormForward, ResidualAdd, Result, Slice, Tensor,
};
use xlaunch_proto::model::Arch;

use super::kept::Kept;
use super::layout::{self, Linear};
use super::{Model, Rows, attention_shape};

/// The activations that backward needs. Backward frees each tensor after its last use.
#[derive(Debug)]
pub struct Activations {
    pub(super) rows: Rows,
    pub(super) blocks: Vec<Kept>,
    /// Input of the final norm, its output and statistics.
    pub(super) last: Normed,
}

/// A norm's input (the residual stream at that point), output and statistics.
#[derive(Debug)]
pub(super) struct Normed {
    pub(super) x: Tensor,
    pub(super) y: Tensor,
    pub(super) stats: Tensor,
}

/// One block's activations.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) ln1: Normed,
    /// `[B, T, (H + 2 Hkv) D]`, after attention, which may rotate it in place.
    pub(super) qkv: Tensor,
    /// `[B, T, H D]`.
    pub(super) att: Tensor,
    /// `[B, H, T]`.
    pub(super) lse: Tensor,
    pub(super) ln2: Normed,
    /// `[N, F]` or, with SwiGLU's gates, `[N, 2 F]`.
    pub(super) h: Tensor,
    /// `[N, F]`.
    pub(super) a: Tensor,
}

impl Model {
    /// The pass of `tokens` I32 `[B, T]` up to the head.
    pub fn forward(&self, rows: Rows, tokens: Slice<'_>) -> Result<Activations> {
        self.forward_with_gathers(rows, tokens, || Ok(()))
    }

    /// [`forward`](Self::forward) while weights are still being gathered: `next_part()` is called before each of the
    /// layout's [`forward_parts`](layout::Layout::forward_parts), of which the last is the head's.
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
            let branch = self.linear(rows, &block.a, &params.out, self.shape.ffn, self.shape.dim)?;
            ln1 = self.add_norm(rows, &block.ln2.x, branch, next)?;
            blocks.push(Kept::new(block, self.memory.recompute));
        }
        next_part()?;
        Ok(Activations { rows, blocks, last: ln1 })
    }

    fn embed(&self, rows: Rows, tokens: Slice<'_>) -> Result<Tensor> {
        let x = self.activation(rows.count() * self.shape.dim)?;
        let wpe = self.layout.wpe.as_ref().map(|wpe| self.param(wpe));
        let wte = self.param(&self.layout.wte);
        let shape = self.embed_shape(rows);
        self.backend.embed_forward(EmbedForward {
            shape,
            tokens,
            wte,
            wpe,
            positions: None,
            out: x.all(),
        })?;
        Ok(x)
    }

    pub(super) fn embed_shape(&self, rows: Rows) -> EmbedShape {
        EmbedShape { batch: rows.batch, seq: rows.seq, cols: self.shape.dim, vocab: self.shape.vocab }
    }

    /// One block, from its first norm up to the output of the activation function: all that backward needs.
    pub(super) fn block(&self, rows: Rows, ln1: Normed, params: &layout::Block) -> Result<Block> {
        let (n, shape) = (rows.count(), &self.shape);
        let qkv = self.linear(rows, &ln1.y, &params.qkv, shape.dim, shape.qkv_width())?;
        let att = self.activation(n * shape.attention_width())?;
        let lse = self.backend.alloc(DType::F32, n * shape.heads)?;
        self.backend.attention_forward(AttentionForward {
            shape: attention_shape(&self.shape, rows),
            qkv: qkv.all(),
            rope: self.rope(rows),
            out: att.all(),
            lse: lse.all(),
        })?;
        let branch = self.linear(rows, &att, &params.proj, shape.attention_width(), shape.dim)?;
        let ln2 = self.add_norm(rows, &ln1.x, branch, &params.ln2)?;

        let a = self.activation(n * shape.ffn)?;
        let h = match (shape.arch, &params.fc.bias) {
            (Arch::Gpt2, Some(bias)) => {
                let h = self.activation(a.len())?;
                self.backend.linear_gelu_forward(LinearGeluForward {
                    shape: Self::linear_shape(rows, shape.dim, shape.ffn),
                    x: ln2.y.all(),
                    w: self.param(&params.fc.weight),
                    bias: self.param(bias),
                    h: h.all(),
                    a: a.all(),
                })?;
                h
            }
            _ => {
                let h = self.activation(2 * a.len())?;
                self.backend.linear_swiglu_forward(LinearSwigluForward {
                    shape: Self::linear_shape(rows, shape.dim, 2 * shape.ffn),
                    x: ln2.y.all(),
                    w: self.param(&params.fc.weight),
                    h: h.all(),
                    a: a.all(),
                })?;
                h
            }
        };
        Ok(Block { ln1, qkv, att, lse, ln2, h, a })
    }

    fn linear(
        &self,
        rows: Rows,
        x: &Tensor,
        params: &Linear,
        inputs: usize,
        outputs: usize,
    ) -> Result<Tensor> {
        let y = self.activation(rows.count() * outputs)?;
        let bias = params.bias.as_ref().map(|bias| self.param(bias));
        let shape = Self::linear_shape(rows, inputs, outputs);
        let w = self.param(&params.weight);
        self.backend.linear_forward(LinearForward { shape, x: x.all(), w, bias, y: y.all() })?;
        Ok(y)
    }

    pub(super) fn norm(&self, rows: Rows, x: Tensor, params: &layout::Norm) -> Result<Normed> {
        let stats = self.backend.alloc(DType::F32, self.norm_shape(rows).stats())?;
        self.norm_with_stats(rows, x, stats, params)
    }

    /// The norm of `x`; overwrites `stats`.
    pub(super) fn norm_with_stats(
        &self,
        rows: Rows,
        x: Tensor,
        stats: Tensor,
        params: &layout::Norm,
    ) -> Result<Normed> {
        let y = self.activation(x.len())?;
        self.backend.norm_forward(NormForward {
            shape: self.norm_shape(rows),
            x: x.all(),
            residual: None,
            gamma: self.param(&params.weight),
            beta: params.bias.as_ref().map(|bias| self.param(bias)),
            y: y.all(),
            stats: stats.all(),
        })?;
        Ok(Normed { x, y, stats })
    }

    /// The residual stream `x + branch` and its norm, in one kernel.
    fn add_norm(&self, rows: Rows, x: &Tensor, branch: Tensor, params: &layout::Norm) -> Result<Normed> {
        let shape = self.norm_shape(rows);
        let sum = self.activation(x.len())?;
        let y = self.activation(x.len())?;
        let stats = self.backend.alloc(DType::F32, shape.stats())?;
        self.backend.norm_forward(NormForward {
            shape,
            x: x.all(),
            residual: Some(ResidualAdd { branch: branch.all(), sum: sum.all() }),
            gamma: self.param(&params.weight),
            beta: params.bias.as_ref().map(|bias| self.param(bias)),
            y: y.all(),
            stats: stats.all(),
        })?;
        Ok(Normed { x: sum, y, stats })
    }
}
