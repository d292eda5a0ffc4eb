//! Forward: tokens to logits, keeping what backward needs.

use xlaunch_engine::{
    Accumulate, AttentionForward, ClassifierShape, DType, EmbedForward, EmbedShape, EngineError,
    FusedClassifier, LinearForward, LinearGeluForward, NormForward, ResidualAdd, Result, Slice, Sum,
    SwigluForward, Tensor,
};
use xlaunch_proto::model::Arch;

use super::layout::{self, Linear};
use super::{Model, Rows, attention_shape};

/// The activations that backward needs. Backward frees each tensor after its last use.
#[derive(Debug)]
pub struct Activations {
    pub(super) rows: Rows,
    pub(super) blocks: Vec<Block>,
    /// Input of the final norm, its output and statistics.
    pub(super) last: Normed,
    /// `[N, Vp]`. [`Model::loss`] with a gradient scale overwrites them with their gradients.
    pub(super) logits: Tensor,
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

impl Activations {
    /// The V logits of row `row`.
    pub fn logits(&self, row: usize, vocab: usize) -> Slice<'_> {
        let padded = self.logits.len() / self.rows.count();
        self.logits.slice(row * padded..row * padded + vocab)
    }
}

impl Model {
    /// Logits of `tokens` I32 `[B, T]`.
    pub fn forward(&self, rows: Rows, tokens: Slice<'_>) -> Result<Activations> {
        self.forward_with_gathers(rows, tokens, |_| Ok(()))
    }

    /// [`forward`](Self::forward) while weights are still being gathered: `needs(start)` is called before weights from
    /// offset `start` on are read, with decreasing `start` down to 0.
    pub fn forward_with_gathers<E: From<EngineError>>(
        &self,
        rows: Rows,
        tokens: Slice<'_>,
        mut needs: impl FnMut(usize) -> std::result::Result<(), E>,
    ) -> std::result::Result<Activations, E> {
        let _tag = xlaunch_pool::tag("forward");
        let mut blocks = Vec::with_capacity(self.shape.layers);
        needs(self.layout.blocks[0].ln1.weight.start)?;
        let mut ln1 = self.norm(rows, self.embed(rows, tokens)?, &self.layout.blocks[0].ln1)?;
        for (index, params) in self.layout.blocks.iter().enumerate() {
            let next = self.layout.blocks.get(index + 1).map_or(&self.layout.lnf, |block| &block.ln1);
            needs(next.weight.start)?;
            let (block, normed) = self.block(rows, ln1, params, next)?;
            blocks.push(block);
            ln1 = normed;
        }
        needs(0)?;
        let padded = self.shape.padded_vocab();
        let logits = self.activation(rows.count() * padded)?;
        let shape = Self::linear_shape(rows, self.shape.dim, padded);
        let (w, y) = (self.param(&self.layout.head), logits.all());
        self.backend.linear_forward(LinearForward { shape, x: ln1.y.all(), w, bias: None, y })?;
        Ok(Activations { rows, blocks, last: ln1, logits })
    }

    /// Writes the cross-entropy loss of every row to `losses` F32 `[N]`. With `grad_scale`, the logits are overwritten
    /// with the gradients of `grad_scale * sum(losses)`.
    pub fn loss(
        &self,
        acts: &Activations,
        targets: Slice<'_>,
        losses: Slice<'_>,
        grad_scale: Option<f32>,
    ) -> Result<()> {
        let shape = ClassifierShape {
            rows: acts.rows.count(),
            vocab: self.shape.vocab,
            padded: self.shape.padded_vocab(),
        };
        let logits = acts.logits.all();
        self.backend.classifier(FusedClassifier { shape, logits, targets, losses, grad_scale })
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

    /// One block, from the output of its first norm to the output of the norm after it.
    fn block(
        &self,
        rows: Rows,
        ln1: Normed,
        params: &layout::Block,
        next: &layout::Norm,
    ) -> Result<(Block, Normed)> {
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
                let h = self.linear(rows, &ln2.y, &params.fc, shape.dim, 2 * shape.ffn)?;
                let args = SwigluForward { rows: n, ffn: shape.ffn, h: h.all(), a: a.all() };
                self.backend.swiglu_forward(args)?;
                h
            }
        };
        let branch = self.linear(rows, &a, &params.out, shape.ffn, shape.dim)?;
        let next = self.add_norm(rows, &ln2.x, branch, next)?;
        Ok((Block { ln1, qkv, att, lse, ln2, h, a }, next))
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

    fn norm(&self, rows: Rows, x: Tensor, params: &layout::Norm) -> Result<Normed> {
        let shape = self.norm_shape(rows);
        let y = self.activation(x.len())?;
        let stats = self.backend.alloc(DType::F32, shape.stats())?;
        self.backend.norm_forward(NormForward {
            shape,
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

    /// Writes (or adds) `weight * mean(losses)` to `out[0]`.
    pub fn mean_loss(&self, losses: &Tensor, weight: f32, out: Slice<'_>, acc: Accumulate) -> Result<()> {
        #[expect(clippy::cast_precision_loss, reason = "rows of one batch are far below 2^24")]
        let scale = weight / losses.len() as f32;
        self.backend.sum(Sum { x: losses.all(), scale, out, acc })
    }
}
