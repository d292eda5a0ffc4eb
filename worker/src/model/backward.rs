//! Backward: from gradients of the logits to gradients of every parameter, in the order of the arena.
//!
//! The gradient of a bias is the column sum of its output's gradient. The kernel that writes that gradient computes the
//! sum too where this saves another pass over it: GELU's backward for `fc`, a norm's backward for `out` and `proj`,
//! whose outputs were added to the residual stream that the norm reads.

use xlaunch_engine::{Accumulate, Result, Slice, Tensor};
use xlaunch_proto::model::Arch;

use super::forward::{Activations, Block, Normed};
use super::layout::{self, Linear};
use super::{Model, Rows};

impl Model {
    /// Writes (or adds, by `acc`) the gradients of all parameters to `grads`, an arena of the layout (F32 or Bf16) that
    /// was zeroed once.
    ///
    /// `finished(end, grads)` is called whenever all gradients below offset `end` have been enqueued.
    pub fn backward<E: From<xlaunch_engine::EngineError>>(
        &self,
        mut acts: Activations,
        tokens: Slice<'_>,
        grads: &Tensor,
        acc: Accumulate,
        mut finished: impl FnMut(usize, &Tensor) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let _tag = xlaunch_pool::tag("backward");
        let rows = acts.rows;
        let dx = self.top_bwd(&acts, grads, acc)?;
        drop(acts.logits);
        if !self.shape.tied {
            finished(self.layout.top_end, grads)?;
        }
        while let Some(block) = acts.blocks.pop() {
            let index = acts.blocks.len();
            let params = &self.layout.blocks[index];
            let below = index.checked_sub(1).map(|below| &self.layout.blocks[below]);
            self.block_bwd(rows, block, params, below, &dx, grads, acc)?;
            finished(params.end, grads)?;
        }
        self.embed_bwd(rows, tokens, &dx, grads, acc)?;
        finished(self.layout.len, grads)
    }

    /// Head and final norm. Returns the gradient of the residual stream.
    fn top_bwd(&self, acts: &Activations, grads: &Tensor, acc: Accumulate) -> Result<Tensor> {
        let (rows, head) = (acts.rows, &self.layout.head);
        let shape = Self::linear_shape(rows, self.shape.dim, self.shape.padded_vocab());
        let dlogits = acts.logits.all();
        let dy = self.activation(rows.count() * self.shape.dim)?;
        self.backend.linear_bwd_input(shape, dlogits, self.param(head), dy.all())?;
        let dhead = grads.slice(head.clone());
        self.backend.linear_bwd_weight(shape, dlogits, acts.last.y.all(), dhead, None, acc)?;
        let dx = self.activation(dy.len())?;
        let added = self.layout.blocks.last().map(|block| &block.out);
        self.norm_bwd(rows, &acts.last, &self.layout.lnf, &dy, &dx, false, added, grads, acc)?;
        Ok(dx)
    }

    /// `dx` is the gradient of the residual stream after the block, and is updated to that before it. `below` is the
    /// block whose output is added there.
    #[expect(
        clippy::too_many_arguments,
        reason = "a backward takes the inputs and outputs of its forward, and their gradients"
    )]
    fn block_bwd(
        &self,
        rows: Rows,
        block: Block,
        params: &layout::Block,
        below: Option<&layout::Block>,
        dx: &Tensor,
        grads: &Tensor,
        acc: Accumulate,
    ) -> Result<()> {
        let (n, shape) = (rows.count(), &self.shape);
        let (h, dh) = (block.h.all(), self.activation(block.h.len())?);
        match (shape.arch, bias_in(grads, &params.fc)) {
            (Arch::Gpt2, Some(dbias)) => {
                let out = Self::linear_shape(rows, shape.ffn, shape.dim);
                let (w, dw) = (self.param(&params.out.weight), grads.slice(params.out.weight.clone()));
                self.backend.linear_bwd_weight(out, dx.all(), block.a.all(), dw, None, acc)?;
                self.backend.gelu_linear_bwd(out, dx.all(), w, h, dh.all(), dbias, acc)?;
            }
            _ => {
                let sizes = (shape.ffn, shape.dim);
                let da = self.linear_bwd(rows, dx, &block.a, &params.out, sizes, None, grads, acc)?;
                self.backend.swiglu_bwd(n, shape.ffn, h, da.all(), dh.all())?;
            }
        }
        let hidden = block.h.len() / n;
        let dy =
            self.linear_bwd(rows, &dh, &block.ln2.y, &params.fc, (shape.dim, hidden), None, grads, acc)?;
        drop(dh);
        self.norm_bwd(rows, &block.ln2, &params.ln2, &dy, dx, true, Some(&params.proj), grads, acc)?;

        let sizes = (shape.dim, shape.dim);
        let datt = self.linear_bwd(rows, dx, &block.att, &params.proj, sizes, None, grads, acc)?;
        let dqkv = self.activation(block.qkv.len())?;
        let attention = self.attention_shape(rows);
        let (qkv, att, lse) = (block.qkv.all(), block.att.all(), block.lse.all());
        self.backend.attention_bwd(attention, qkv, self.rope(rows), att, datt.all(), lse, dqkv.all())?;
        let (sizes, dbias) = ((shape.dim, shape.qkv_width()), bias_in(grads, &params.qkv));
        let dy = self.linear_bwd(rows, &dqkv, &block.ln1.y, &params.qkv, sizes, dbias, grads, acc)?;
        let added = below.map(|block| &block.out);
        self.norm_bwd(rows, &block.ln1, &params.ln1, &dy, dx, true, added, grads, acc)
    }

    fn embed_bwd(
        &self,
        rows: Rows,
        tokens: Slice<'_>,
        dx: &Tensor,
        grads: &Tensor,
        acc: Accumulate,
    ) -> Result<()> {
        let dwte = grads.slice(self.layout.wte.clone());
        let dwpe = self.layout.wpe.as_ref().map(|wpe| grads.slice(wpe.clone()));
        if acc == Accumulate::Overwrite {
            // A tied table already contains the head's gradient. Others start from zero, as embed_bwd only adds.
            for table in dwpe.into_iter().chain((!self.shape.tied).then_some(dwte)) {
                self.backend.zero(table)?;
            }
        }
        self.backend.embed_bwd(self.embed_shape(rows), tokens, dx.all(), dwte, dwpe)
    }

    /// Gradients of a matrix, of its bias unless another kernel computes it (`dbias`), and of its input, which is
    /// returned. `sizes` are the numbers of inputs and outputs.
    #[expect(
        clippy::too_many_arguments,
        reason = "a backward takes the inputs and outputs of its forward, and their gradients"
    )]
    fn linear_bwd(
        &self,
        rows: Rows,
        dy: &Tensor,
        x: &Tensor,
        params: &Linear,
        sizes: (usize, usize),
        dbias: Option<Slice<'_>>,
        grads: &Tensor,
        acc: Accumulate,
    ) -> Result<Tensor> {
        let shape = Self::linear_shape(rows, sizes.0, sizes.1);
        let dweight = grads.slice(params.weight.clone());
        self.backend.linear_bwd_weight(shape, dy.all(), x.all(), dweight, dbias, acc)?;
        let dx = self.activation(x.len())?;
        self.backend.linear_bwd_input(shape, dy.all(), self.param(&params.weight), dx.all())?;
        Ok(dx)
    }

    /// `added` is the layer whose output was added to the residual stream before this norm: its bias gradient is
    /// computed here.
    #[expect(
        clippy::too_many_arguments,
        reason = "a backward takes the inputs and outputs of its forward, and their gradients"
    )]
    fn norm_bwd(
        &self,
        rows: Rows,
        normed: &Normed,
        params: &layout::Norm,
        dy: &Tensor,
        dx: &Tensor,
        add: bool,
        added: Option<&Linear>,
        grads: &Tensor,
        acc: Accumulate,
    ) -> Result<()> {
        let (x, stats) = (normed.x.all(), normed.stats.all());
        let dgamma = grads.slice(params.weight.clone());
        let dbeta = params.bias.as_ref().map(|bias| grads.slice(bias.clone()));
        let gamma = self.param(&params.weight);
        self.backend.norm_bwd(
            self.norm_shape(rows),
            x,
            gamma,
            stats,
            dy.all(),
            dx.all(),
            add,
            dgamma,
            dbeta,
            added.and_then(|layer| bias_in(grads, layer)),
            acc,
        )
    }
}

/// The gradient of a layer's bias, if it has one.
fn bias_in<'a>(grads: &'a Tensor, layer: &Linear) -> Option<Slice<'a>> {
    layer.bias.as_ref().map(|bias| grads.slice(bias.clone()))
}
