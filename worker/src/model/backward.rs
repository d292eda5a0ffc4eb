//! Backward: from gradients of the logits to the gradients of all parameters, in the order of the arena.
//!
//! The gradient of a bias is the column sum of its output's gradient. Where that saves a pass over the output's
//! gradient, the kernel that writes it also computes the sum: GELU's backward for `fc`, a norm's backward for `out` and
//! `proj`, whose outputs were added to the residual stream that the norm reads.

use std::ops::Range;
use std::rc::Rc;

use xlaunch_comm::Slots;
use xlaunch_engine::{
    Accumulate, AttentionBackward, ColumnSum, EmbedBackward, NormBackward, Result, Slice, Tensor,
};

use super::forward::Activations;
use super::layout::{self, Linear};
use super::linear::{LayerBackward, Operand};
use super::saved_activations::{Block, Unnormed};
use super::{Model, Rows, attention_shape};

/// Arguments shared by all parts of one backward pass.
#[derive(Clone, Copy)]
struct Pass<'a> {
    rows: Rows,
    grads: GradientArena<'a>,
    acc: Accumulate,
}

/// Memory for the gradients of all parameters: an arena of the layout (F32 or Bf16), or slots for its buckets.
#[derive(Clone, Copy, Debug)]
pub struct GradientArena<'a> {
    /// The arena, or the memory of the slots.
    pub tensor: &'a Tensor,
    /// Positions of buckets in the memory; `None` if all buckets are at their position in the arena.
    pub slots: Option<&'a Slots>,
}

impl<'a> GradientArena<'a> {
    /// Returns the gradient of a parameter.
    pub(crate) fn slice(self, param: Range<usize>) -> Slice<'a> {
        self.tensor.slice(self.place(&param))
    }

    /// Returns the range of the tensor that holds these elements, which belong to one parameter or bucket.
    pub(crate) fn place(self, elements: &Range<usize>) -> Range<usize> {
        self.slots.map_or(elements.clone(), |slots| slots.place(elements))
    }
}

/// Progress of a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The next of the layout's [`backward_parts`](layout::Layout::backward_parts) is about to be computed.
    NextPart,
    /// All gradients below this offset of the arena have been enqueued.
    Finished(usize),
}

impl<'a> Pass<'a> {
    /// Describes a layer with these numbers of inputs and outputs.
    fn layer(
        self,
        layer: &'a Linear,
        [inputs, outputs]: [usize; 2],
        x: &'a Operand,
        dy: &'a Operand,
    ) -> LayerBackward<'a> {
        let shape = Model::linear_shape(self.rows, inputs, outputs);
        let dw = self.grads.slice(layer.weight.clone());
        LayerBackward { shape, layer, x, dy, dw, acc: self.acc }
    }

    /// Returns the gradient of a layer's bias, if it has one.
    fn bias(self, layer: &Linear) -> Option<Slice<'a>> {
        layer.bias.as_ref().map(|bias| self.grads.slice(bias.clone()))
    }
}

/// The gradient of the residual stream, as written by the backward of a norm.
#[derive(Clone, Copy)]
struct Residual<'a> {
    dx: &'a Tensor,
    /// True if `dx` already holds the gradient of the residual path.
    add: bool,
    /// The layer whose output was added to the stream directly before the norm.
    added: Option<&'a Linear>,
}

impl Model {
    /// Writes (or adds, depending on `acc`) the gradients of all parameters except the head's to `grads`, whose gaps
    /// must be zero. The head's gradients are there already: `dy` is the result of
    /// [`loss_and_gradients`](Self::loss_and_gradients).
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
        let dx = Rc::new(self.top_backward(pass, acts.last.split().1, dy)?);
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

    /// Backward of the final norm. Returns the gradient of the residual stream.
    fn top_backward(&self, pass: Pass<'_>, last: Unnormed, dy: Tensor) -> Result<Tensor> {
        let dx = self.activation(dy.len())?;
        let added = self.layout.blocks.last().map(|block| &block.out);
        let residual = Residual { dx: &dx, add: false, added };
        self.norm_backward(pass, &last, &self.layout.lnf, &dy, residual)?;
        Ok(dx)
    }

    /// Backward of one block. `dx` is the gradient of the residual stream after the block, and is updated to the
    /// gradient before it. `below` is the block whose output is added there.
    fn block_backward(
        &self,
        pass: Pass<'_>,
        block: Block,
        params: &layout::Block,
        below: Option<&layout::Block>,
        dx: &Rc<Tensor>,
    ) -> Result<()> {
        let dy = self.mlp_backward(pass, &block, params, dx)?;
        let residual = Residual { dx, add: true, added: Some(&params.proj) };
        self.norm_backward(pass, &block.ln2, &params.ln2, &dy, residual)?;

        let n = pass.rows.count();
        let (dproj, inputs, shape) = (self.output_gradient(n, dx.clone())?, &block.inputs, &self.shape);
        let proj = pass.layer(&params.proj, [shape.attention_width(), shape.dim], &inputs.proj, &dproj);
        let datt = self.input_gradient(proj)?;
        let dqkv = Rc::new(self.activation(block.qkv.len())?);
        self.backend.run(AttentionBackward {
            shape: attention_shape(&self.shape, pass.rows),
            qkv: block.qkv.all(),
            rope: self.rope(pass.rows),
            out: block.att.all(),
            dout: datt.all(),
            lse: block.lse.all(),
            dqkv: dqkv.all(),
        })?;
        let dqkv_operand = self.output_gradient(n, dqkv.clone())?;
        let qkv = pass.layer(&params.qkv, [shape.dim, shape.qkv_width()], &inputs.qkv, &dqkv_operand);
        self.weight_gradients([proj, qkv])?;
        if let Some(out) = pass.bias(&params.qkv) {
            let (rows, cols, x, acc) = (n, shape.qkv_width(), dqkv.all(), pass.acc);
            self.backend.run(ColumnSum { rows, cols, x, out, acc })?;
        }
        let dy = self.input_gradient(qkv)?;
        let added = below.map(|block| &block.out);
        self.norm_backward(pass, &block.ln1, &params.ln1, &dy, Residual { dx, add: true, added })
    }

    /// Returns the gradient of the norm's output before `fc`, from the gradient of the block's output.
    fn mlp_backward(
        &self,
        pass: Pass<'_>,
        block: &Block,
        params: &layout::Block,
        dx: &Rc<Tensor>,
    ) -> Result<Tensor> {
        let (n, inputs, shape) = (pass.rows.count(), &block.inputs, &self.shape);
        let dout = self.output_gradient(n, dx.clone())?;
        let out = pass.layer(&params.out, [shape.ffn, shape.dim], &inputs.out, &dout);
        let dh = match (shape.gated, pass.bias(&params.fc)) {
            (false, Some(dbias)) => self.gelu_gradient(out, &block.h, dbias)?,
            _ => self.swiglu_gradient(out, &block.h)?,
        };
        let width = dh.len() / n;
        let dh = self.output_gradient(n, Rc::new(dh))?;
        let fc = pass.layer(&params.fc, [shape.dim, width], &inputs.fc, &dh);
        self.weight_gradients([out, fc])?;
        self.input_gradient(fc)
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
        let shape = self.embed_shape(pass.rows);
        self.backend.run(EmbedBackward { shape, tokens, dout: dx.all(), dwte, dwpe })
    }

    fn norm_backward(
        &self,
        pass: Pass<'_>,
        normed: &Unnormed,
        params: &layout::Norm,
        dy: &Tensor,
        residual: Residual<'_>,
    ) -> Result<()> {
        self.backend.run(NormBackward {
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
