//! Backward: from gradients of the logits to gradients of every parameter, in the order of the arena.
//!
//! The gradient of a bias is the column sum of its output's gradient. The kernel that writes that gradient computes the
//! sum too where this saves another pass over it: GELU's backward for `fc`, a norm's backward for `out` and `proj`,
//! whose outputs were added to the residual stream that the norm reads.

use std::ops::Range;

use xlaunch_comm::Slots;
use xlaunch_engine::{
    Accumulate, AttentionBackward, EmbedBackward, GeluLinearBackward, LinearBackwardInput,
    LinearBackwardWeight, NormBackward, Result, Slice, SwigluLinearBackward, Tensor,
};
use xlaunch_proto::model::Arch;

use super::forward::{Activations, Block, Normed};
use super::layout::{self, Linear};
use super::{Model, Rows, attention_shape};

/// What every part of one backward pass works with.
#[derive(Clone, Copy)]
struct Pass<'a> {
    rows: Rows,
    grads: GradientArena<'a>,
    acc: Accumulate,
}

/// Where the gradients of all parameters are: an arena of the layout (F32 or Bf16), or slots of its buckets.
#[derive(Clone, Copy, Debug)]
pub struct GradientArena<'a> {
    /// Their memory.
    pub tensor: &'a Tensor,
    /// Where buckets are in it; `None` if all of them are at their place in the arena.
    pub slots: Option<&'a Slots>,
}

impl<'a> GradientArena<'a> {
    /// The gradient of a parameter.
    pub(crate) fn slice(self, param: Range<usize>) -> Slice<'a> {
        self.tensor.slice(self.place(&param))
    }

    /// Where elements of one bucket of the arena are in the tensor.
    pub(crate) fn place(self, elements: &Range<usize>) -> Range<usize> {
        self.slots.map_or(elements.clone(), |slots| slots.place(elements))
    }
}

/// How far a backward pass is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The next of the layout's [`backward_parts`](layout::Layout::backward_parts) is about to be computed.
    NextPart,
    /// All gradients below this offset of the arena have been enqueued.
    Finished(usize),
}

impl<'a> Pass<'a> {
    /// The gradient of a layer's bias, if it has one.
    fn bias(self, layer: &Linear) -> Option<Slice<'a>> {
        layer.bias.as_ref().map(|bias| self.grads.slice(bias.clone()))
    }
}

/// The gradient of the residual stream, which a norm's backward writes.
#[derive(Clone, Copy)]
struct Residual<'a> {
    dx: &'a Tensor,
    /// Whether `dx` already holds the gradient of the residual path.
    add: bool,
    /// The layer whose output was added to the stream just before the norm.
    added: Option<&'a Linear>,
}

impl Model {
    /// Writes (or adds, by `acc`) the gradients of all parameters but the head's to `grads`, of which the gaps were
    /// zeroed. The head's are there already: `dy` is what [`loss_and_gradients`](Self::loss_and_gradients) returned.
    pub fn backward<E: From<xlaunch_engine::EngineError>>(
        &self,
        mut acts: Activations,
        dy: Tensor,
        tokens: Slice<'_>,
        grads: GradientArena<'_>,
        acc: Accumulate,
        mut progress: impl FnMut(Progress) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let _tag = xlaunch_pool::tag("backward");
        let pass = Pass { rows: acts.rows, grads, acc };
        progress(Progress::NextPart)?;
        let dx = self.top_backward(pass, &acts.last, dy)?;
        if !self.shape.tied {
            progress(Progress::Finished(self.layout.top_end))?;
        }
        while let Some(kept) = acts.blocks.pop() {
            let index = acts.blocks.len();
            let params = &self.layout.blocks[index];
            progress(Progress::NextPart)?;
            let block = self.restore(pass.rows, kept, params)?;
            let below = index.checked_sub(1).map(|below| &self.layout.blocks[below]);
            self.block_backward(pass, block, params, below, &dx)?;
            progress(Progress::Finished(params.end))?;
        }
        self.embed_backward(pass, tokens, &dx)?;
        progress(Progress::Finished(self.layout.len))
    }

    /// Final norm. Returns the gradient of the residual stream.
    fn top_backward(&self, pass: Pass<'_>, last: &Normed, dy: Tensor) -> Result<Tensor> {
        let dx = self.activation(dy.len())?;
        let added = self.layout.blocks.last().map(|block| &block.out);
        let residual = Residual { dx: &dx, add: false, added };
        self.norm_backward(pass, last, &self.layout.lnf, &dy, residual)?;
        Ok(dx)
    }

    /// `dx` is the gradient of the residual stream after the block, and is updated to that before it. `below` is the
    /// block whose output is added there.
    fn block_backward(
        &self,
        pass: Pass<'_>,
        block: Block,
        params: &layout::Block,
        below: Option<&layout::Block>,
        dx: &Tensor,
    ) -> Result<()> {
        let (n, shape) = (pass.rows.count(), &self.shape);
        let dh = self.mlp_backward(pass, &block, params, dx)?;
        let sizes = (shape.dim, block.h.len() / n);
        let dy = self.linear_backward(pass, &dh, &block.ln2.y, &params.fc, sizes, None)?;
        drop(dh);
        let residual = Residual { dx, add: true, added: Some(&params.proj) };
        self.norm_backward(pass, &block.ln2, &params.ln2, &dy, residual)?;

        let sizes = (shape.attention_width(), shape.dim);
        let datt = self.linear_backward(pass, dx, &block.att, &params.proj, sizes, None)?;
        let dqkv = self.activation(block.qkv.len())?;
        self.backend.attention_backward(AttentionBackward {
            shape: attention_shape(&self.shape, pass.rows),
            qkv: block.qkv.all(),
            rope: self.rope(pass.rows),
            out: block.att.all(),
            dout: datt.all(),
            lse: block.lse.all(),
            dqkv: dqkv.all(),
        })?;
        let (sizes, dbias) = ((shape.dim, shape.qkv_width()), pass.bias(&params.qkv));
        let dy = self.linear_backward(pass, &dqkv, &block.ln1.y, &params.qkv, sizes, dbias)?;
        let added = below.map(|block| &block.out);
        self.norm_backward(pass, &block.ln1, &params.ln1, &dy, Residual { dx, add: true, added })
    }

    /// The gradient of `fc`'s output from that of the block's output, with the gradients of `out`.
    fn mlp_backward(
        &self,
        pass: Pass<'_>,
        block: &Block,
        params: &layout::Block,
        dx: &Tensor,
    ) -> Result<Tensor> {
        let acc = pass.acc;
        let shape = Self::linear_shape(pass.rows, self.shape.ffn, self.shape.dim);
        let (dy, w) = (dx.all(), self.param(&params.out.weight));
        let (h, dh) = (block.h.all(), self.activation(block.h.len())?);
        let (x, dw) = (block.a.all(), pass.grads.slice(params.out.weight.clone()));
        let args = LinearBackwardWeight { shape, dy, x, dw, dbias: None, acc };
        self.backend.linear_backward_weight(args)?;
        match (self.shape.arch, pass.bias(&params.fc)) {
            (Arch::Gpt2, Some(dbias)) => {
                let args = GeluLinearBackward { shape, dy, w, h, dh: dh.all(), dbias, acc };
                self.backend.gelu_linear_backward(args)?;
            }
            _ => {
                let da = self.activation(block.a.len())?;
                let args = SwigluLinearBackward { shape, dy, w, h, da: da.all(), dh: dh.all() };
                self.backend.swiglu_linear_backward(args)?;
            }
        }
        Ok(dh)
    }

    fn embed_backward(&self, pass: Pass<'_>, tokens: Slice<'_>, dx: &Tensor) -> Result<()> {
        let dwte = pass.grads.slice(self.layout.wte.clone());
        let dwpe = self.layout.wpe.as_ref().map(|wpe| pass.grads.slice(wpe.clone()));
        if pass.acc == Accumulate::Overwrite {
            // A tied table already contains the head's gradient. Others start from zero: the operation only adds.
            for table in dwpe.into_iter().chain((!self.shape.tied).then_some(dwte)) {
                self.backend.zero(table)?;
            }
        }
        let shape = self.embed_shape(pass.rows);
        self.backend.embed_backward(EmbedBackward { shape, tokens, dout: dx.all(), dwte, dwpe })
    }

    /// Gradients of a matrix, of its bias unless another kernel computes it (`dbias`), and of its input, which is
    /// returned. `sizes` are the numbers of inputs and outputs.
    fn linear_backward(
        &self,
        pass: Pass<'_>,
        dy: &Tensor,
        x: &Tensor,
        params: &Linear,
        sizes: (usize, usize),
        dbias: Option<Slice<'_>>,
    ) -> Result<Tensor> {
        let shape = Self::linear_shape(pass.rows, sizes.0, sizes.1);
        let (dy, dw) = (dy.all(), pass.grads.slice(params.weight.clone()));
        let args = LinearBackwardWeight { shape, dy, x: x.all(), dw, dbias, acc: pass.acc };
        self.backend.linear_backward_weight(args)?;
        let dx = self.activation(x.len())?;
        let w = self.param(&params.weight);
        self.backend.linear_backward_input(LinearBackwardInput { shape, dy, w, dx: dx.all() })?;
        Ok(dx)
    }

    fn norm_backward(
        &self,
        pass: Pass<'_>,
        normed: &Normed,
        params: &layout::Norm,
        dy: &Tensor,
        residual: Residual<'_>,
    ) -> Result<()> {
        self.backend.norm_backward(NormBackward {
            shape: self.norm_shape(pass.rows),
            x: normed.x.all(),
            gamma: self.param(&params.weight),
            stats: normed.stats.all(),
            dy: dy.all(),
            dx: residual.dx.all(),
            add_to_dx: residual.add,
            dgamma: pass.grads.slice(params.weight.clone()),
            dbeta: params.bias.as_ref().map(|bias| pass.grads.slice(bias.clone())),
            dsum: residual.added.and_then(|layer| pass.bias(layer)),
            acc: pass.acc,
        })
    }
}
