//! The activations of a block that forward keeps, and how backward recomputes the others.
//!
//! Bytes per token and block of a llama with F = 4 C, without grouped heads, and with elements of two bytes: 40 C if
//! all activations are kept, 28 C without those that are cheap to compute, 2 C for the input alone.

use std::rc::Rc;

use xlaunch_engine::{Activation, ActivationForward, GluForward, Result, Tensor};
use xlaunch_spec::job::Recompute;

use super::linear::{Operand, Use};
use super::{Model, Rows, layout};

/// A norm's input (the residual stream at that point), output and statistics.
#[derive(Debug)]
pub(super) struct Normed {
    pub(super) x: Tensor,
    pub(super) y: Tensor,
    pub(super) stats: Tensor,
}

/// A norm's input and statistics.
#[derive(Debug)]
pub(super) struct Unnormed {
    pub(super) x: Tensor,
    pub(super) stats: Tensor,
}

impl Normed {
    /// Separates the output from the rest.
    pub(super) fn split(self) -> (Rc<Tensor>, Unnormed) {
        let Self { x, y, stats } = self;
        (Rc::new(y), Unnormed { x, stats })
    }
}

/// One block's activations.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) ln1: Unnormed,
    /// Inputs of the four linear layers.
    pub(super) inputs: Inputs,
    /// `[B, T, (H + 2 Hkv) D]`, after attention, which may have rotated it in place.
    pub(super) qkv: Tensor,
    /// `[B, T, H D]`.
    pub(super) att: Rc<Tensor>,
    /// `[B, H, T]`.
    pub(super) lse: Tensor,
    pub(super) ln2: Unnormed,
    /// `[N, F]`; with SwiGLU, whose gates are included, `[N, 2 F]`.
    pub(super) h: Tensor,
}

/// Inputs of a block's layers.
#[derive(Debug)]
pub(super) struct Inputs {
    /// The first norm's output.
    pub(super) qkv: Operand,
    /// Attention's output.
    pub(super) proj: Operand,
    /// The second norm's output.
    pub(super) fc: Operand,
    /// The activation function's output `[N, F]`.
    pub(super) out: Operand,
}

/// A block between forward and backward.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one value per block of the model")]
pub(super) enum SavedActivations {
    All(Block),
    /// All activations except the inputs of linear layers: outputs of norms and of the activation function; in FP8,
    /// also the output of attention.
    Costly {
        ln1: Unnormed,
        qkv: Tensor,
        att: Rc<Tensor>,
        lse: Tensor,
        ln2: Unnormed,
        h: Tensor,
    },
    /// The input of the first norm, from which the whole block is recomputed.
    Input(Tensor),
}

impl SavedActivations {
    /// Frees the activations that will be recomputed.
    pub(super) fn new(block: Block, recompute: Recompute) -> Self {
        match recompute {
            Recompute::None => {
                let Inputs { qkv, proj, fc, out } = block.inputs;
                Self::All(Block { inputs: Inputs { qkv, proj, fc, out: out.kept() }, ..block })
            }
            Recompute::Cheap => {
                let Block { ln1, qkv, att, lse, ln2, h, inputs: _ } = block;
                Self::Costly { ln1, qkv, att, lse, ln2, h }
            }
            Recompute::Block => Self::Input(block.ln1.x),
        }
    }
}

impl Model {
    /// Restores the whole block with the same bits as in forward. The exception is GELU's output on GPUs, which forward
    /// may have computed from an `h` that was not rounded yet.
    pub(super) fn restore(
        &self,
        rows: Rows,
        kept: SavedActivations,
        params: &layout::Block,
    ) -> Result<Block> {
        match kept {
            SavedActivations::All(block) => Ok(block),
            SavedActivations::Costly { ln1, qkv, att, lse, ln2, h } => {
                // The inputs of norms are rounded sums, and forward normalised the same rounded values.
                let (y1, ln1) = self.norm_with_stats(rows, ln1.x, ln1.stats, &params.ln1)?.split();
                let (y2, ln2) = self.norm_with_stats(rows, ln2.x, ln2.stats, &params.ln2)?.split();
                let input = |x| self.input(rows.count(), x, Use::Columns);
                let inputs = Inputs {
                    qkv: input(y1)?,
                    proj: input(att.clone())?,
                    fc: input(y2)?,
                    out: input(Rc::new(self.activated(rows, &h)?))?,
                };
                Ok(Block { ln1, inputs, qkv, att, lse, ln2, h })
            }
            SavedActivations::Input(x) => self.block(rows, self.norm(rows, x, &params.ln1)?, params),
        }
    }

    /// Computes the output of the activation function from its input.
    fn activated(&self, rows: Rows, h: &Tensor) -> Result<Tensor> {
        let (rows, ffn) = (rows.count(), self.shape.ffn);
        let a = self.activation(rows * ffn)?;
        let (h, a_slice) = (h.all(), a.all());
        if self.shape.gated {
            let activation = Activation::Silu;
            self.backend.run(GluForward { activation, rows, ffn, h, a: a_slice })?;
        } else {
            let activation = Activation::GeluTanh;
            self.backend.run(ActivationForward { activation, h, a: a_slice })?;
        }
        Ok(a)
    }
}
