//! The activations of a block that forward keeps, and how backward recomputes the others.
//!
//! Bytes per token and block of a llama with F = 4 C, without grouped heads, and with elements of two bytes: 40 C if
//! all activations are kept, 28 C without those that are cheap to compute, 2 C for the input alone.

use std::rc::Rc;

use xlaunch_engine::{EngineError, Tensor};
use xlaunch_spec::job::Recompute;
use xlaunch_spec::model::Parallel;

use super::experts::{CostlyExperts, Experts, Run};
use super::feed_forward::Dense;
use super::fp8::Use;
use super::linear::Operand;
use super::pass::OnProgress;
use super::shared_experts::{CostlyShared, SharedExperts};
use super::{Model, Rows};

/// A norm's input, output and statistics. Without a norm, the output is the input.
#[derive(Debug)]
pub(super) struct Normed {
    pub(super) x: Rc<Tensor>,
    pub(super) y: Rc<Tensor>,
    pub(super) stats: Option<Tensor>,
}

/// A norm's input and statistics.
#[derive(Debug)]
pub(super) struct Unnormed {
    pub(super) x: Rc<Tensor>,
    pub(super) stats: Option<Tensor>,
}

impl Normed {
    /// Separates the output from the rest.
    pub(super) fn split(self) -> (Rc<Tensor>, Unnormed) {
        let Self { x, y, stats } = self;
        (y, Unnormed { x, stats })
    }
}

/// One block's activations.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) index: usize,
    /// The residual stream before attention.
    pub(super) ln1: Unnormed,
    /// Inputs of attention's two linear layers.
    pub(super) inputs: Inputs,
    pub(super) heads: Heads,
    /// `[B, T, H D]`.
    pub(super) att: Rc<Tensor>,
    /// `[B, H, T]`.
    pub(super) lse: Tensor,
    /// Attention's projected output, if it is normalised.
    pub(super) post1: Option<Unnormed>,
    /// The residual stream that the feed-forward layers read.
    pub(super) ln2: Unnormed,
    pub(super) mlp: Mlp,
    /// The projected output of the feed-forward layers, if it is normalised.
    pub(super) post2: Option<Unnormed>,
}

/// Queries, keys and values, `[B, T, (H + 2 Hkv) D]`.
#[derive(Debug)]
pub(super) struct Heads {
    /// The projection's output. Without norms of queries and keys, attention may have rotated it in place.
    pub(super) qkv: Tensor,
    /// The same with queries and keys normalised and rotated, if the model does that.
    pub(super) normed: Option<Tensor>,
}

impl Heads {
    /// Returns what attention reads.
    pub(super) fn read(&self) -> &Tensor {
        self.normed.as_ref().unwrap_or(&self.qkv)
    }
}

/// Inputs of a block's layers.
#[derive(Debug)]
pub(super) struct Inputs {
    /// The first norm's output.
    pub(super) qkv: Operand,
    /// Attention's output.
    pub(super) proj: Operand,
}

/// The feed-forward layers of a block.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one value per block of the model")]
pub(super) enum Mlp {
    Dense(Dense),
    Experts {
        /// The second norm's output.
        x: Rc<Tensor>,
        experts: Experts,
        shared: Option<SharedExperts>,
    },
}

/// The feed-forward layers of a block without what is cheap to compute.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one value per block of the model")]
pub(super) enum CostlyMlp {
    Dense { h: Tensor },
    Experts(CostlyExperts, Option<CostlyShared>),
}

impl Mlp {
    /// Drops what only forward multiplies.
    fn kept(self) -> Self {
        match self {
            Self::Dense(dense) => Self::Dense(dense.kept()),
            Self::Experts { x, experts, shared } => {
                Self::Experts { x, experts, shared: shared.map(SharedExperts::kept) }
            }
        }
    }

    fn costly(self) -> CostlyMlp {
        match self {
            Self::Dense(Dense { h, .. }) => CostlyMlp::Dense { h },
            Self::Experts { experts, shared, .. } => {
                CostlyMlp::Experts(experts.costly(), shared.map(SharedExperts::costly))
            }
        }
    }
}

/// A block between forward and backward.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one value per block of the model")]
pub(super) enum SavedActivations {
    All(Block),
    /// All activations except the inputs of linear layers, which are outputs of norms and of the activation function,
    /// normalised queries and keys and, in FP8, the output of attention.
    Costly {
        ln1: Unnormed,
        qkv: Tensor,
        att: Rc<Tensor>,
        lse: Tensor,
        post1: Option<Unnormed>,
        ln2: Unnormed,
        mlp: CostlyMlp,
        post2: Option<Unnormed>,
    },
    /// The residual stream before the block, from which the whole block is recomputed.
    Input(Rc<Tensor>),
}

impl SavedActivations {
    /// Frees the activations that will be recomputed.
    pub(super) fn new(block: Block, recompute: Recompute) -> Self {
        match recompute {
            Recompute::None => {
                let mlp = block.mlp.kept();
                Self::All(Block { mlp, ..block })
            }
            Recompute::Cheap => {
                let Block { ln1, heads: Heads { qkv, .. }, att, lse, post1, ln2, mlp, post2, .. } = block;
                Self::Costly { ln1, qkv, att, lse, post1, ln2, mlp: mlp.costly(), post2 }
            }
            Recompute::Block => Self::Input(block.ln1.x),
        }
    }
}

impl Model {
    /// Restores the whole block with the same bits as in forward. The exception is GELU's output on GPUs, which forward
    /// may have computed from an `h` that was not rounded yet.
    pub(super) fn restore<E: From<EngineError>>(
        &self,
        rows: Rows<'_>,
        kept: SavedActivations,
        index: usize,
        progress: OnProgress<'_, E>,
    ) -> Result<Block, E> {
        let params = &self.layout.blocks[index];
        match kept {
            SavedActivations::All(block) => Ok(block),
            SavedActivations::Costly { ln1, qkv, att, lse, post1, ln2, mlp, post2 } => {
                // The inputs of norms are rounded sums, and forward normalised the same rounded values.
                let (y1, ln1) = self.norm_again(rows, ln1, params.ln1.as_ref())?.split();
                let (y2, ln2) = if self.shape.parallel == Parallel::SharedNorm {
                    (y1.clone(), ln2)
                } else {
                    self.norm_again(rows, ln2, params.ln2.as_ref())?.split()
                };
                let input = |x| self.input(rows.count(), x, Use::Columns);
                let inputs = Inputs { qkv: input(y1)?, proj: input(att.clone())? };
                let mlp = match mlp {
                    CostlyMlp::Dense { h } => {
                        Mlp::Dense(self.restored_dense(rows.count(), y2, h, self.shape.ffn)?)
                    }
                    CostlyMlp::Experts(kept, shared) => {
                        let experts = self.restored_experts(kept, &y2, progress)?;
                        let shared = shared.map(|kept| self.restored_shared(kept, &y2)).transpose()?;
                        Mlp::Experts { x: y2, experts, shared }
                    }
                };
                let heads = self.heads(rows, index, qkv)?;
                Ok(Block { index, ln1, inputs, heads, att, lse, post1, ln2, mlp, post2 })
            }
            SavedActivations::Input(x) => {
                let ln1 = self.norm(rows, x, params.ln1.as_ref())?;
                let (mut block, beside) = self.block(rows, index, ln1, Run::Again, progress)?;
                if params.post2.is_some() {
                    self.end_block(rows, &mut block, beside, None, progress)?;
                }
                Ok(block)
            }
        }
    }
}
