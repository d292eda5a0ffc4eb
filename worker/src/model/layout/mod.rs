//! Offsets of the parameters in the flat arenas of parameters, gradients and optimizer state.
//!
//! Parameters are in the order in which backward finishes their gradients: head, final norm, blocks from last to first,
//! embeddings. So "all gradients below this offset are written" is a single number, and a bucket is a contiguous range.
//! Every parameter starts at a multiple of `ALIGN` elements; gaps stay zero in every arena.
//!
//! If low-rank adapters are trained, the model's parameters are frozen. Gradients, optimizer state and checkpoints then
//! have the layout of a second arena, that of the adapters, which has the same order of blocks.
//!
//! If ranks divide experts among themselves (`comm.experts`), the arenas of a rank have only the parameters of its own
//! experts. Checkpoints have the whole arena, with all experts.

mod arena;
mod build;
#[cfg(test)]
mod tests;

use std::ops::{Deref, Range};

use xlaunch_comm::{Among, Groups};
use xlaunch_spec::job::Layer;
use xlaunch_spec::model::ModelShape;

pub use arena::{ALIGN, Group, Init, Param, Parameters, Part};

/// A matrix and, in some architectures, its bias.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the fields are named after the parameters")]
pub struct Linear {
    pub weight: Range<usize>,
    pub bias: Option<Range<usize>>,
    pub adapter: Option<Adapter>,
}

impl Linear {
    /// Returns whether all of the layer's outputs have an adapter.
    pub(crate) fn is_adapted(&self, outputs: usize) -> bool {
        let modules = self.adapter.iter().flat_map(|adapter| &adapter.modules);
        modules.map(|module| module.outputs.len()).sum::<usize>() == outputs
    }
}

/// The adapter of a layer, in the arena of adapters. Its modules share the input, so their A are rows of one matrix.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// A of all modules, `[modules R, I]`.
    pub a: Range<usize>,
    /// B of each module.
    pub modules: Vec<AdaptedModule>,
}

/// A part of a layer's outputs with an adapter of its own.
#[derive(Clone, Debug)]
pub struct AdaptedModule {
    /// The outputs, in the layer's.
    pub outputs: Range<usize>,
    /// B, `[outputs, R]`.
    pub b: Range<usize>,
}

/// A module with an adapter.
#[derive(Clone, Debug)]
pub struct ModuleRanges {
    /// Its rows of the layer's weights, in the arena of the model.
    pub weight: Range<usize>,
    /// Number of inputs.
    pub inputs: usize,
    /// A, `[R, inputs]`, in the arena of adapters.
    pub a: Range<usize>,
    /// B, `[outputs, R]`, in the arena of adapters.
    pub b: Range<usize>,
}

/// A scale and, for LayerNorm, a shift.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the fields are named after the parameters")]
pub struct Norm {
    pub weight: Range<usize>,
    pub bias: Option<Range<usize>>,
}

/// The feed-forward layers that the shared experts of a block are together.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Projection to the activation function's input.
    pub fc: Linear,
    /// Projection of its output.
    pub out: Linear,
    /// Projection to the logit of a sigmoid that multiplies the output, `[1, C]`.
    pub gate: Option<Range<usize>>,
}

/// The parameters of one transformer block.
#[derive(Clone, Debug)]
pub struct Block {
    /// Norm of attention's input.
    pub ln1: Option<Norm>,
    /// Projection to queries, keys and values.
    pub qkv: Linear,
    /// Scales of the norms of queries and keys.
    pub qk_norm: Option<[Range<usize>; 2]>,
    /// Learned score of each head, `[H]`.
    pub sinks: Option<Range<usize>>,
    /// Projection of attention's output.
    pub proj: Linear,
    /// Norm of the projected output.
    pub post1: Option<Norm>,
    /// Norm of the feed-forward layers' input.
    pub ln2: Option<Norm>,
    /// Router of a block with experts, `[E, C]`.
    pub router: Option<Range<usize>>,
    /// Bias of the router's logits, `[E]`.
    pub router_logit_bias: Option<Range<usize>>,
    /// Biases of the choice of experts, `[E]`. The model has a copy in F32, which [`Routing`](super::Routing) updates.
    pub router_bias: Option<Range<usize>>,
    /// Projection to the activation function's input; with experts, those of all of them, `[E, 2 F, C]`.
    pub fc: Linear,
    /// Projection of its output; with experts, `[E, C, F]`.
    pub out: Linear,
    /// Biases of the experts' first layers, `[E, 2 F]`, and of their second ones, `[E, C]`.
    pub expert_biases: Option<[Range<usize>; 2]>,
    /// Experts that all tokens use.
    pub shared: Option<Shared>,
    /// Norm of the projected output.
    pub post2: Option<Norm>,
    /// End of the block's range: after the block's backward, all gradients below it are written.
    pub end: usize,
}

impl Block {
    /// Returns the start of the block's range.
    fn start(&self) -> usize {
        self.post2.as_ref().map_or(&self.out.weight, |norm| &norm.weight).start
    }

    /// Returns a layer and its number of inputs.
    fn layer(&mut self, layer: Layer, shape: &ModelShape) -> (&mut Linear, usize) {
        match layer {
            Layer::Qkv => (&mut self.qkv, shape.dim),
            Layer::Proj => (&mut self.proj, shape.attention_width()),
            Layer::Fc => (&mut self.fc, shape.dim),
            Layer::Out => (&mut self.out, shape.ffn),
        }
    }
}

/// Adapters of a frozen model: their own arena, in the order of the model's blocks.
#[derive(Clone, Debug)]
struct Adapters {
    arena: Parameters,
    /// End of each block's range.
    ends: Vec<usize>,
    rank: usize,
    scale: f32,
}

/// Offsets of the parameters of a model. It is also the list of all of them.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the fields are named after the parameters")]
pub struct Layout {
    pub wte: Range<usize>,
    pub wpe: Option<Range<usize>>,
    pub blocks: Vec<Block>,
    pub lnf: Norm,
    /// Range of the head's table; equal to `wte` if the head is tied.
    pub head: Range<usize>,
    /// Range of the bias of an untied head.
    pub head_bias: Option<Range<usize>>,
    /// End of the untied head and the final norm, which precede the blocks.
    pub top_end: usize,
    /// The ranks that divide the experts among themselves.
    pub expert_groups: Groups,
    arena: Parameters,
    /// The parameters of all ranks, and the segments of their arena that this one has; `None` if it has all.
    whole: Option<(Parameters, Vec<Segment>)>,
    /// The parameters that are trained instead.
    adapters: Option<Adapters>,
}

/// A range of the whole arena that this rank has, and its place in the rank's own arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Range in the whole arena.
    pub whole: Range<usize>,
    /// Range in the arena of the rank, of the same length.
    pub own: Range<usize>,
}

impl Segment {
    /// Returns the part of the segment that `range` says of the given one of its two ranges.
    fn part(&self, of: fn(&Self) -> &Range<usize>, range: &Range<usize>) -> Option<Self> {
        let own = of(self);
        let (start, end) = (range.start.max(own.start), range.end.min(own.end));
        let cut = |all: &Range<usize>| all.start + start - own.start..all.start + end - own.start;
        (start < end).then(|| Self { whole: cut(&self.whole), own: cut(&self.own) })
    }
}

impl Deref for Layout {
    type Target = Parameters;

    fn deref(&self) -> &Parameters {
        &self.arena
    }
}

impl Layout {
    /// Returns the parameters that are trained: all of them, or adapters.
    pub fn trained(&self) -> &Parameters {
        self.adapters.as_ref().map_or(&self.arena, |adapters| &adapters.arena)
    }

    /// Returns the trained parameters of all ranks together.
    pub fn whole(&self) -> &Parameters {
        self.whole.as_ref().map_or(self.trained(), |(whole, _)| whole)
    }

    /// Returns the number of parameters of the model.
    pub fn parameters_of_all(&self) -> usize {
        self.whole.as_ref().map_or(&self.arena, |(whole, _)| whole).parameters()
    }

    /// Returns the parts of a range of the whole arena that this rank has.
    pub fn own_parts(&self, whole: &Range<usize>) -> Vec<Segment> {
        self.parts_by(|segment| &segment.whole, whole)
    }

    /// Returns the parts of a range of this rank's arena, with their places in the whole one. Without groups of ranks,
    /// it is one part; otherwise gaps belong to none.
    pub fn whole_parts(&self, own: &Range<usize>) -> Vec<Segment> {
        self.parts_by(|segment| &segment.own, own)
    }

    fn parts_by(&self, of: fn(&Segment) -> &Range<usize>, range: &Range<usize>) -> Vec<Segment> {
        match &self.whole {
            None => vec![Segment { whole: range.clone(), own: range.clone() }],
            Some((_, segments)) => segments.iter().filter_map(|segment| segment.part(of, range)).collect(),
        }
    }

    /// Returns the end of each trained parameter, and the ranks that have it, for the bucket planner.
    pub fn ends_among(&self) -> impl Iterator<Item = (usize, Among)> {
        let among = |param: &Param| match &self.whole {
            Some(_) if param.is_of_experts() => Among::Peers,
            _ => Among::All,
        };
        self.trained().ends().into_iter().zip(self.trained().params.iter().map(among))
    }

    /// Returns whether the parameters of the model itself are frozen.
    pub fn is_frozen(&self) -> bool {
        self.adapters.is_some()
    }

    /// Returns the rank of the adapters, and the factor of their outputs. Without adapters, the rank is 0.
    pub fn rank_and_scale(&self) -> (usize, f32) {
        self.adapters.as_ref().map_or((0, 0.0), |adapters| (adapters.rank, adapters.scale))
    }

    /// Returns all modules that have adapters.
    pub fn adapted_modules(&self) -> Vec<ModuleRanges> {
        let layers = self.blocks.iter().flat_map(|block| [&block.qkv, &block.proj, &block.fc, &block.out]);
        let rank = self.rank_and_scale().0;
        let modules =
            layers.filter_map(|layer| Some((layer, layer.adapter.as_ref()?))).flat_map(|(layer, adapter)| {
                let len = adapter.a.len() / adapter.modules.len();
                let inputs = len / rank;
                adapter.modules.iter().enumerate().map(move |(index, module)| {
                    let (a, first) = (adapter.a.start + index * len, layer.weight.start);
                    let weight = first + module.outputs.start * inputs..first + module.outputs.end * inputs;
                    ModuleRanges { weight, inputs, a: a..a + len, b: module.b.clone() }
                })
            });
        modules.collect()
    }

    /// Returns the end of the range of trained parameters whose gradients are written after a block's backward.
    pub fn trained_end(&self, block: usize) -> usize {
        self.adapters.as_ref().map_or(self.blocks[block].end, |adapters| adapters.ends[block])
    }

    /// Returns the biases of all routers, in the order of blocks.
    pub fn router_biases(&self) -> impl Iterator<Item = &Range<usize>> {
        self.blocks.iter().filter_map(|block| block.router_bias.as_ref())
    }

    /// Returns the ranges that forward reads, one per part: the embeddings, each block, and the head. The norm after a
    /// part belongs to that part.
    pub fn forward_parts(&self) -> Vec<Range<usize>> {
        let embeddings = self.first_norm(0)..self.len;
        let blocks = self.blocks.iter().enumerate();
        let blocks = blocks.map(|(index, block)| self.first_norm(index + 1)..block.end);
        let head = self.head.start..self.head_bias.as_ref().unwrap_or(&self.head).end;
        [embeddings].into_iter().chain(blocks).chain([head]).collect()
    }

    /// Returns the ranges that backward reads and writes, one per part, without the head and the embeddings: the final
    /// norm, then the blocks from last to first. The bias of the layer before a part belongs to that part, because the
    /// part's backward sums its gradient.
    pub fn backward_parts(&self) -> Vec<Range<usize>> {
        let front = |index: usize| index.checked_sub(1).map(|index| &self.blocks[index].out);
        let end = |index: usize, end: usize| match front(index).and_then(|layer| layer.bias.as_ref()) {
            Some(bias) => bias.end,
            None => end,
        };
        let count = self.blocks.len();
        let top = self.lnf.weight.start..end(count, self.top_end);
        let blocks = (0..count).rev();
        let blocks = blocks.map(|index| {
            let block = &self.blocks[index];
            block.start()..end(index, block.end)
        });
        [top].into_iter().chain(blocks).collect()
    }

    /// Returns the ranges that passes need throughout: the embeddings and the head.
    pub fn kept(&self) -> Vec<Range<usize>> {
        let kept = [Some(&self.wte), self.wpe.as_ref(), Some(&self.head), self.head_bias.as_ref()];
        kept.into_iter().flatten().cloned().collect()
    }

    /// Returns the start of the norm in front of a block, or of the final norm after the last block; without a norm,
    /// the end of the block's range.
    fn first_norm(&self, block: usize) -> usize {
        match self.blocks.get(block) {
            Some(block) => block.ln1.as_ref().map_or(block.end, |norm| norm.weight.start),
            None => self.lnf.weight.start,
        }
    }

    /// Returns the norm of the residual stream after a block, if there is one: that of the next block's attention, or
    /// the final norm.
    pub fn norm_after(&self, block: usize) -> Option<&Norm> {
        self.blocks.get(block + 1).map_or(Some(&self.lnf), |next| next.ln1.as_ref())
    }
}
