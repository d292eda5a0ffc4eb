//! Backward: from gradients of the logits to gradients of every parameter, in the order of the arena.

use xlaunch_engine::{Accumulate, Result, Slice, Tensor};
use xlaunch_proto::model::Arch;

use super::forward::{Activations, Block, Normed};
use super::layout::{self, Linear};
use super::{Model, Rows};

impl Model {
    /// Gradients of all parameters into `grads`, an arena of the layout (F32 or Bf16) that was zeroed once.
    ///
    /// `finished(end, grads)` is called whenever all gradients below offset `end` are written. `acc` says whether this
    /// is the first micro-step of a step.
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
            let params = &self.layout.blocks[acts.blocks.len()];
            self.block_bwd(rows, block, params, &dx, grads, acc)?;
            finished(params.end, grads)?;
        }
        self.embed_bwd(rows, tokens, &dx, grads, acc)?;
        finished(self.layout.len, grads)
    }

    /// Head and final norm: the gradient of the residual stream.
    fn top_bwd(&self, acts: &Activations, grads: &Tensor, acc: Accumulate) -> Result<Tensor> {
        let (rows, head) = (acts.rows, &self.layout.head);
        let shape = Self::linear_shape(rows, self.shape.dim, self.shape.padded_vocab());
        let dlogits = acts.logits.all();
        let dy = self.activation(rows.count() * self.shape.dim)?;
        self.backend.linear_bwd_input(shape, dlogits, self.param(head), dy.all())?;
        let dhead = grads.slice(head.clone());
        self.backend.linear_bwd_weight(shape, dlogits, acts.last.y.all(), dhead, None, acc)?;
        let dx = self.activation(dy.len())?;
        self.norm_bwd(rows, &acts.last, &self.layout.lnf, &dy, &dx, false, grads, acc)?;
        Ok(dx)
    }

    /// `dx` holds the gradient behind the block and becomes that before it.
    fn block_bwd(
        &self,
        rows: Rows,
        block: Block,
        params: &layout::Block,
        dx: &Tensor,
        grads: &Tensor,
        acc: Accumulate,
    ) -> Result<()> {
        let (n, shape) = (rows.count(), &self.shape);
        let da = self.linear_bwd(rows, dx, &block.a, &params.out, (shape.ffn, shape.dim), grads, acc)?;
        let dh = self.activation(block.h.len())?;
        match shape.arch {
            Arch::Gpt2 => self.backend.gelu_bwd(block.h.all(), da.all(), dh.all())?,
            Arch::Llama => self.backend.swiglu_bwd(n, shape.ffn, block.h.all(), da.all(), dh.all())?,
        }
        drop(da);
        let hidden = block.h.len() / n;
        let dy = self.linear_bwd(rows, &dh, &block.ln2.y, &params.fc, (shape.dim, hidden), grads, acc)?;
        drop(dh);
        self.norm_bwd(rows, &block.ln2, &params.ln2, &dy, dx, true, grads, acc)?;

        let datt = self.linear_bwd(rows, dx, &block.att, &params.proj, (shape.dim, shape.dim), grads, acc)?;
        let dqkv = self.activation(block.qkv.len())?;
        let attention = self.attention_shape(rows);
        let (qkv, att, lse) = (block.qkv.all(), block.att.all(), block.lse.all());
        self.backend.attention_bwd(attention, qkv, att, datt.all(), lse, dqkv.all())?;
        if let Some(table) = &self.rope {
            let table = table.slice(0..rows.seq * shape.head_width());
            self.backend.rope_bwd(attention, dqkv.all(), table)?;
        }
        let sizes = (shape.dim, shape.qkv_width());
        let dy = self.linear_bwd(rows, &dqkv, &block.ln1.y, &params.qkv, sizes, grads, acc)?;
        self.norm_bwd(rows, &block.ln1, &params.ln1, &dy, dx, true, grads, acc)
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
            // The tied table holds the head's gradient already; everything else starts from zero.
            for table in dwpe.into_iter().chain((!self.shape.tied).then_some(dwte)) {
                self.backend.zero(table)?;
            }
        }
        self.backend.embed_bwd(self.embed_shape(rows), tokens, dx.all(), dwte, dwpe)
    }

    /// Gradients of a matrix, its bias and its input, which is returned. `sizes` are inputs and outputs.
    #[expect(clippy::too_many_arguments, reason = "a backward takes what its forward took, made and gets")]
    fn linear_bwd(
        &self,
        rows: Rows,
        dy: &Tensor,
        x: &Tensor,
        params: &Linear,
        sizes: (usize, usize),
        grads: &Tensor,
        acc: Accumulate,
    ) -> Result<Tensor> {
        let shape = Self::linear_shape(rows, sizes.0, sizes.1);
        let dbias = params.bias.as_ref().map(|bias| grads.slice(bias.clone()));
        let dweight = grads.slice(params.weight.clone());
        self.backend.linear_bwd_weight(shape, dy.all(), x.all(), dweight, dbias, acc)?;
        let dx = self.activation(x.len())?;
        self.backend.linear_bwd_input(shape, dy.all(), self.param(&params.weight), dx.all())?;
        Ok(dx)
    }

    #[expect(clippy::too_many_arguments, reason = "a backward takes what its forward took, made and gets")]
    fn norm_bwd(
        &self,
        rows: Rows,
        normed: &Normed,
        params: &layout::Norm,
        dy: &Tensor,
        dx: &Tensor,
        add: bool,
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
            acc,
        )
    }
}
