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

    /// Where elements of one parameter or bucket are in the tensor.
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
        let dy = self.mlp_backward(pass, &block, params, dx)?;
        let residual = Residual { dx, add: true, added: Some(&params.proj) };
        self.norm_backward(pass, &block.ln2, &params.ln2, &dy, residual)?;

        let proj = Self::layer_backward(pass, dx, &block.att, &params.proj, None);
        let datt = self.input_backward(proj, &params.proj)?;
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
        let qkv = Self::layer_backward(pass, &dqkv, &block.ln1.y, &params.qkv, pass.bias(&params.qkv));
        self.backend.linear_backward_weights([proj, qkv])?;
        let dy = self.input_backward(qkv, &params.qkv)?;
        let added = below.map(|block| &block.out);
        self.norm_backward(pass, &block.ln1, &params.ln1, &dy, Residual { dx, add: true, added })
    }

    /// The gradient of the norm's output before `fc`, from that of the block's output.
    fn mlp_backward(
        &self,
        pass: Pass<'_>,
        block: &Block,
        params: &layout::Block,
        dx: &Tensor,
    ) -> Result<Tensor> {
        let (h, dh) = (block.h.all(), self.activation(block.h.len())?);
        let out = Self::layer_backward(pass, dx, &block.a, &params.out, None);
        let (shape, dy, w, acc) = (out.shape, out.dy, self.param(&params.out.weight), out.acc);
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
        let fc = Self::layer_backward(pass, &dh, &block.ln2.y, &params.fc, None);
        self.backend.linear_backward_weights([out, fc])?;
        self.input_backward(fc, &params.fc)
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

    /// The gradients of a layer's matrix and, unless another kernel computes it, of its bias (`dbias`).
    fn layer_backward<'a>(
        pass: Pass<'a>,
        dy: &'a Tensor,
        x: &'a Tensor,
        params: &Linear,
        dbias: Option<Slice<'a>>,
    ) -> LinearBackwardWeight<'a> {
        let n = pass.rows.count();
        let shape = Self::linear_shape(pass.rows, x.len() / n, dy.len() / n);
        let dw = pass.grads.slice(params.weight.clone());
        LinearBackwardWeight { shape, dy: dy.all(), x: x.all(), dw, dbias, acc: pass.acc }
    }

    /// The gradient of a layer's input.
    fn input_backward(&self, layer: LinearBackwardWeight<'_>, params: &Linear) -> Result<Tensor> {
        let LinearBackwardWeight { shape, dy, .. } = layer;
        let (dx, w) = (self.activation(shape.rows * shape.inputs)?, self.param(&params.weight));
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
