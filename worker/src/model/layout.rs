//! Offsets of the parameters in the flat arenas of parameters, gradients and optimizer state.
//!
//! Parameters are in the order in which backward finishes their gradients: head, final norm, blocks from last to first,
//! embeddings. So "all gradients below this offset are written" is a single number, and a bucket is a contiguous range.
//! Every parameter starts at a multiple of `ALIGN` elements; gaps stay zero in every arena.
//!
//! If low-rank adapters are trained, the model's parameters are frozen. Gradients, optimizer state and checkpoints then
//! have the layout of a second arena, that of the adapters, which is in the same order of blocks.
//!
//! If ranks divide experts among themselves (`comm.experts`), the arenas of a rank have those of its experts only.
//! Checkpoints have the whole arena, with all experts.

use std::ops::{Deref, Range};

use xlaunch_comm::{Among, Groups};
use xlaunch_engine::{GROUP_CHUNK, GROUPS};
use xlaunch_spec::job::{EQUAL_SHARDS, Invalid, JobSpec, Layer, LoraSection, Module};
use xlaunch_spec::model::{ModelShape, NormKind, NormPlace, Parallel, Positions, QkNorm};

/// Alignment, in elements, of parameters and of the buckets into which large ones are cut. It aligns rows for tensor
/// cores in both element types, keeps parameters of two groups apart, and makes every shard of a bucket a whole number
/// of group chunks on 2, 4 and 8 ranks. A gap is shorter than this and ends where a parameter starts, so it is never in
/// two buckets.
pub const ALIGN: usize = GROUP_CHUNK * EQUAL_SHARDS;

/// Maximum number of elements in a [`Part`]: at least a millisecond of work; even, as normal numbers are drawn in
/// pairs.
const PART_LEN: usize = 1 << 18;

/// GPT-2's initial values.
const NORMAL: Init = Init::Normal(0.02);

/// Distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// Uniform between the negative and the positive value of this bound.
    Uniform(f32),
}

/// Group of parameters with a learning rate of its own. Weight decay applies to all except vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Group {
    /// Matrices of blocks, A of adapters.
    Matrices,
    /// Scales and shifts of norms, biases.
    Vectors,
    /// Tables of tokens and positions. The first is also the head if it is tied.
    Embeddings,
    /// An untied head's table.
    Head,
    /// B of adapters.
    LoraB,
}

impl Group {
    /// All groups, in the order of their numbers.
    pub const ALL: [Self; GROUPS] =
        [Self::Matrices, Self::Vectors, Self::Embeddings, Self::Head, Self::LoraB];

    /// Returns the group's learning rate relative to the schedule's, and its weight decay.
    pub fn rates(self, spec: &JobSpec) -> (f64, f64) {
        let (scale, decay) = (&spec.lr_scale, spec.train.weight_decay);
        match self {
            Self::Matrices => (1.0, decay),
            Self::Vectors => (scale.vectors, 0.0),
            Self::Embeddings => (scale.embeddings, decay),
            Self::Head => (scale.head, decay),
            Self::LoraB => (scale.lora_b, decay),
        }
    }
}

/// One named parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Name in checkpoints, such as `blocks.3.qkv.weight`.
    pub name: String,
    /// Shape in checkpoints: `[rows, cols]` for a matrix, `[experts, rows, cols]` for one per expert, `[len]` for a
    /// vector.
    pub shape: Vec<usize>,
    /// Range in the arenas. It is longer than the shape if rows are padded; the padding stays zero.
    pub range: Range<usize>,
    /// Its group, which decides about its learning rate and weight decay.
    pub group: Group,
    /// Initial values.
    pub init: Init,
}

impl Param {
    /// Returns the part of the range that checkpoints contain: all except the padding at its end.
    pub fn stored(&self) -> Range<usize> {
        self.range.start..self.range.start + self.shape.iter().product::<usize>()
    }

    /// Returns whether it has a matrix of each expert.
    fn is_of_experts(&self) -> bool {
        self.shape.len() == 3
    }
}

/// A matrix and, in some architectures, its bias.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the fields are named after the parameters")]
pub struct Linear {
    pub weight: Range<usize>,
    pub bias: Option<Range<usize>>,
    pub adapter: Option<Adapter>,
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
    /// Projection of attention's output.
    pub proj: Linear,
    /// Norm of the projected output.
    pub post1: Option<Norm>,
    /// Norm of the feed-forward layers' input.
    pub ln2: Option<Norm>,
    /// Router of a block with experts, `[E, C]`.
    pub router: Option<Range<usize>>,
    /// Biases of the choice of experts, `[E]`. The model has a copy in F32, which [`Routing`](super::Routing) updates.
    pub router_bias: Option<Range<usize>>,
    /// Projection to the activation function's input; with experts, those of all of them, `[E, 2 F, C]`.
    pub fc: Linear,
    /// Projection of its output; with experts, `[E, C, F]`.
    pub out: Linear,
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

/// The parameters of an arena.
#[derive(Clone, Debug, Default)]
pub struct Parameters {
    /// All parameters, in order of offset.
    pub params: Vec<Param>,
    /// Number of elements of the arena.
    pub len: usize,
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

/// A part of one parameter's stored values: the unit in which threads compute them.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The parameter.
    pub param: &'a Param,
    /// Index of the first value among the parameter's stored values; always even.
    pub first: usize,
    /// Number of values, at most `PART_LEN`.
    pub len: usize,
}

impl Parameters {
    /// Returns the stored values of all parameters, in parts. No part contains gaps or padding.
    pub fn parts(&self) -> Vec<Part<'_>> {
        let parts = self.params.iter().flat_map(|param| {
            let stored = param.stored().len();
            let starts = (0..stored).step_by(PART_LEN);
            starts.map(move |first| Part { param, first, len: PART_LEN.min(stored - first) })
        });
        parts.collect()
    }

    /// Returns the gaps between the parameters.
    pub fn gaps(&self) -> Vec<Range<usize>> {
        let gaps = self.params.iter().zip(self.ends()).map(|(param, end)| param.range.end..end);
        gaps.filter(|gap| !gap.is_empty()).collect()
    }

    /// Returns the end offset of each parameter including the gap after it, for the bucket planner.
    pub fn ends(&self) -> Vec<usize> {
        let starts = self.params.iter().skip(1).map(|param| param.range.start);
        starts.chain([self.len]).collect()
    }

    /// Returns the number of parameters, without padding and gaps.
    pub fn parameters(&self) -> usize {
        self.params.iter().map(|param| param.stored().len()).sum()
    }

    /// Returns the group of each [`GROUP_CHUNK`] elements of an arena.
    pub fn groups(&self) -> Vec<u8> {
        let mut groups = vec![Group::Vectors as u8; self.len / GROUP_CHUNK];
        for param in &self.params {
            let chunks = param.range.start / GROUP_CHUNK..param.range.end.div_ceil(GROUP_CHUNK);
            groups[chunks].fill(param.group as u8);
        }
        groups
    }

    /// Returns bytes that are equal if and only if two arenas are. The rendezvous compares their digest.
    pub fn fingerprint(&self) -> Vec<u8> {
        let lines =
            self.params.iter().map(|param| format!("{} {:?} {:?}\n", param.name, param.shape, param.range));
        lines.collect::<String>().into_bytes()
    }

    /// Adds a parameter.
    fn place(
        &mut self,
        name: String,
        shape: Vec<usize>,
        len: usize,
        group: Group,
        init: Init,
    ) -> Range<usize> {
        let range = self.len..self.len + len;
        self.len = range.end.next_multiple_of(ALIGN);
        self.params.push(Param { name, shape, range: range.clone(), group, init });
        range
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

    /// Computes the layout of a job's model: with adapters, if it trains them.
    pub fn of_job(spec: &JobSpec, shape: &ModelShape) -> Result<Self, Invalid> {
        if spec.lora.is_on() {
            Self::new(shape).with_adapters(shape, &spec.lora)
        } else {
            Ok(Self::new(shape))
        }
    }

    /// Computes the layout of a rank of a job: with its share of the experts.
    pub fn of_rank(spec: &JobSpec, shape: &ModelShape, rank: usize, world: usize) -> Result<Self, Invalid> {
        let groups = Groups { rank, world, size: spec.comm.experts };
        if groups.size == 1 { Self::of_job(spec, shape) } else { Ok(Self::in_groups(shape, groups)) }
    }

    /// Freezes all parameters, and adds adapters.
    pub fn with_adapters(mut self, shape: &ModelShape, lora: &LoraSection) -> Result<Self, Invalid> {
        let modules = lora.modules(shape)?;
        let mut arena = Parameters::default();
        let mut ends = vec![0; self.blocks.len()];
        for (index, block) in self.blocks.iter_mut().enumerate().rev() {
            // The order in which backward computes the gradients of the layers.
            for layer in [Layer::Out, Layer::Fc, Layer::Proj, Layer::Qkv] {
                let modules: Vec<&Module> = modules.iter().filter(|module| module.layer == layer).collect();
                if !modules.is_empty() {
                    let (linear, inputs) = block.layer(layer, shape);
                    linear.adapter = Some(arena.adapter(index, &modules, inputs, lora.rank));
                }
            }
            ends[index] = arena.len;
        }
        #[expect(clippy::cast_possible_truncation, reason = "the operations compute in f32")]
        let scale = lora.scale() as f32;
        self.adapters = Some(Adapters { arena, ends, rank: lora.rank, scale });
        Ok(self)
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

    /// Computes the layout of a model.
    pub fn new(shape: &ModelShape) -> Self {
        Self::with_experts(shape, shape.experts)
    }

    /// Computes the layout of a rank, with its share of the experts of a model.
    pub fn in_groups(shape: &ModelShape, groups: Groups) -> Self {
        let (whole, (position, ranks)) = (Self::new(shape), groups.member(Among::Group));
        let mut own = Self::with_experts(shape, shape.experts / ranks);
        let segment = |(whole, own): (&Param, &Param)| {
            let first = if own.is_of_experts() { position * own.range.len() } else { 0 };
            let start = whole.range.start + first;
            Segment { whole: start..start + own.range.len(), own: own.range.clone() }
        };
        if ranks > 1 {
            let segments = whole.arena.params.iter().zip(&own.arena.params).map(segment).collect();
            own.whole = Some((whole.arena, segments));
        }
        Self { expert_groups: groups, ..own }
    }

    /// Computes the layout of a model with this number of experts.
    fn with_experts(shape: &ModelShape, experts: usize) -> Self {
        let (dim, padded) = (shape.dim, shape.padded_vocab());
        let learned = shape.positions == Positions::Learned;
        // As in GPT-2, projections into the residual stream are scaled down by its depth.
        #[expect(clippy::cast_precision_loss, reason = "a count of layers is small")]
        let residual = Init::Normal(0.02 / ((2 * shape.layers) as f32).sqrt());
        let scale = if shape.norm_offset { Init::Zeros } else { Init::Ones };
        let mut arena = Builder { arena: Parameters::default(), norm: shape.norm, scale };

        let vocab = [shape.vocab, padded, dim];
        let untied_head = (!shape.tied).then(|| arena.table("head.weight", vocab, Group::Head));
        let head_bias = shape.head_bias.then(|| arena.padded("head.bias", shape.vocab, padded));
        let lnf = arena.norm("lnf", dim);
        let top_end = arena.arena.len;
        let pre = shape.norm_place != NormPlace::Post;
        let post = shape.norm_place != NormPlace::Pre;
        let mut blocks: Vec<Block> = (0..shape.layers)
            .rev()
            .map(|index| {
                let name = |part: &str| format!("blocks.{index}.{part}");
                let post2 = post.then(|| arena.norm(&name("post2"), dim));
                let (out, fc, router, router_bias, shared) = if shape.has_experts(index) {
                    let (width, inputs) = (shape.expert_width(), shape.expert_inputs());
                    let out = arena.experts(&name("out"), [experts, dim, width], residual);
                    let fc = arena.experts(&name("fc"), [experts, inputs, dim], NORMAL);
                    let router = arena.matrix(&name("router.weight"), shape.experts, dim, NORMAL);
                    let bias = shape
                        .router_bias
                        .then(|| arena.vector(name("router_bias"), shape.experts, Init::Zeros));
                    let shared = (shape.shared_experts > 0).then(|| arena.shared(&name, shape, residual));
                    (out, fc, Some(router), bias, shared)
                } else {
                    let out = arena.linear(&name("out"), [dim, shape.ffn], residual, shape.mlp_bias);
                    let fc = arena.linear(&name("fc"), [shape.ffn_inputs(), dim], NORMAL, shape.mlp_bias);
                    (out, fc, None, None, None)
                };
                let own_norm = pre && shape.parallel != Parallel::SharedNorm;
                let ln2 = own_norm.then(|| arena.norm(&name("ln2"), dim));
                let post1 = post.then(|| arena.norm(&name("post1"), dim));
                let sizes = [dim, shape.attention_width()];
                let proj = arena.linear(&name("proj"), sizes, residual, shape.attention_bias);
                let qk_norm = qk_norm_sizes(shape)
                    .map(|[q, k]| [arena.scale(&name("q_norm"), q), arena.scale(&name("k_norm"), k)]);
                let qkv = arena.linear(&name("qkv"), [shape.qkv_width(), dim], NORMAL, shape.qkv_bias);
                let ln1 = pre.then(|| arena.norm(&name("ln1"), dim));
                let end = arena.arena.len;
                Block {
                    ln1,
                    qkv,
                    qk_norm,
                    proj,
                    post1,
                    ln2,
                    router,
                    router_bias,
                    fc,
                    out,
                    shared,
                    post2,
                    end,
                }
            })
            .collect();
        blocks.reverse();
        let wpe = learned.then(|| arena.table("wpe.weight", [shape.seq, shape.seq, dim], Group::Embeddings));
        let wte = arena.table("wte.weight", vocab, Group::Embeddings);
        let head = untied_head.unwrap_or_else(|| wte.clone());
        let (expert_groups, arena) = (Groups::single(0, 1), arena.arena);
        let (whole, adapters) = (None, None);
        Self { wte, wpe, blocks, lnf, head, head_bias, top_end, expert_groups, arena, whole, adapters }
    }
}

impl Parameters {
    /// Adds the adapter of a layer of a block. A is drawn from PyTorch's default distribution of linear layers, as in
    /// PEFT: uniform up to the inverse root of the number of inputs. B is zero, so the adapter has no effect at first.
    fn adapter(&mut self, block: usize, modules: &[&Module], inputs: usize, rank: usize) -> Adapter {
        let names: Vec<&str> = modules.iter().map(|module| module.name).collect();
        let rows = modules.len() * rank;
        #[expect(clippy::cast_precision_loss, reason = "a width is small")]
        let init = Init::Uniform(1.0 / (inputs as f32).sqrt());
        let name = format!("blocks.{block}.{}.lora_a", names.join("_"));
        let a = self.place(name, vec![rows, inputs], rows * inputs, Group::Matrices, init);
        let b = modules.iter().map(|module| {
            let (name, outputs) = (format!("blocks.{block}.{}.lora_b", module.name), module.outputs.len());
            let b = self.place(name, vec![outputs, rank], outputs * rank, Group::LoraB, Init::Zeros);
            AdaptedModule { outputs: module.outputs.clone(), b }
        });
        let modules = b.collect();
        Adapter { a, modules }
    }
}

/// Returns the numbers of scales of the norms of queries and keys.
fn qk_norm_sizes(shape: &ModelShape) -> Option<[usize; 2]> {
    match shape.qk_norm {
        QkNorm::None => None,
        QkNorm::Head => Some([shape.head_dim; 2]),
        QkNorm::Full => Some([shape.attention_width(), shape.kv_heads * shape.head_dim]),
    }
}

struct Builder {
    arena: Parameters,
    norm: NormKind,
    /// Initial scale of norms: 0 if they add 1 to it.
    scale: Init,
}

impl Builder {
    fn norm(&mut self, name: &str, dim: usize) -> Norm {
        let weight = self.scale(name, dim);
        let has_bias = self.norm == NormKind::Layer;
        Norm { weight, bias: has_bias.then(|| self.vector(format!("{name}.bias"), dim, Init::Zeros)) }
    }

    fn scale(&mut self, name: &str, len: usize) -> Range<usize> {
        self.vector(format!("{name}.weight"), len, self.scale)
    }

    fn padded(&mut self, name: &str, len: usize, padded: usize) -> Range<usize> {
        self.arena.place(name.into(), vec![len], padded, Group::Vectors, Init::Zeros)
    }

    fn linear(&mut self, name: &str, [outputs, inputs]: [usize; 2], init: Init, bias: bool) -> Linear {
        Linear {
            weight: self.matrix(&format!("{name}.weight"), outputs, inputs, init),
            bias: bias.then(|| self.vector(format!("{name}.bias"), outputs, Init::Zeros)),
            adapter: None,
        }
    }

    /// Adds a layer of each expert, without biases.
    fn experts(&mut self, name: &str, [experts, outputs, inputs]: [usize; 3], init: Init) -> Linear {
        let (name, shape) = (format!("{name}.weight"), vec![experts, outputs, inputs]);
        let weight = self.arena.place(name, shape, experts * outputs * inputs, Group::Matrices, init);
        Linear { weight, bias: None, adapter: None }
    }

    /// Adds the shared experts of a block, in the order in which backward computes their gradients.
    fn shared(&mut self, name: &dyn Fn(&str) -> String, shape: &ModelShape, residual: Init) -> Shared {
        let (dim, width) = (shape.dim, shape.shared_width());
        let inputs = shape.shared_inputs();
        let gate = shape.shared_gate.then(|| self.matrix(&name("shared_gate.weight"), 1, dim, NORMAL));
        let out = self.linear(&name("shared_out"), [dim, width], residual, false);
        let fc = self.linear(&name("shared_fc"), [inputs, dim], NORMAL, false);
        Shared { fc, out, gate }
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize, init: Init) -> Range<usize> {
        self.arena.place(name.into(), vec![rows, cols], rows * cols, Group::Matrices, init)
    }

    /// Adds a table of embeddings or of the head, whose rows are padded to this number.
    fn table(&mut self, name: &str, [rows, padded, cols]: [usize; 3], group: Group) -> Range<usize> {
        self.arena.place(name.into(), vec![rows, cols], padded * cols, group, NORMAL)
    }

    fn vector(&mut self, name: String, len: usize, init: Init) -> Range<usize> {
        self.arena.place(name, vec![len], len, Group::Vectors, init)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlaunch_spec::model::{Arch, PRESETS};

    /// Returns all presets and a model of each family.
    fn shapes() -> Vec<(String, ModelShape)> {
        let presets = PRESETS.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone()));
        presets.chain(Arch::ALL.map(|arch| (format!("{arch:?}"), arch.base()))).collect()
    }

    #[test]
    fn parameters_follow_each_other_aligned_and_in_backward_order() {
        for (name, shape) in &shapes() {
            let layout = Layout::new(shape);
            let mut end = 0;
            for param in &layout.params {
                assert!(param.range.start >= end && param.range.start - end < ALIGN, "{name} {}", param.name);
                assert_eq!(param.range.start % ALIGN, 0);
                end = param.range.end;
            }
            assert!(layout.len >= end);
            assert!(layout.blocks.windows(2).all(|pair| pair[0].qkv.weight.start > pair[1].qkv.weight.start));
            assert_eq!(layout.params.last().map(|param| param.name.as_str()), Some("wte.weight"));
        }
    }

    #[test]
    fn presets_have_their_published_sizes() {
        let size = |index: usize| Layout::new(&PRESETS[index].1).parameters();
        // GPT-2 124M has 124,439,808 parameters by the paper's sizes. llama-28m has 28.3M in blocks, and two 50257 x
        // 384 tables. Others: as in the model cards, or the sum over the files.
        assert_eq!(size(2), 124_439_808);
        let of = |name: &str| size(PRESETS.iter().position(|(preset, _)| *preset == name).unwrap());
        for (name, parameters) in [
            ("llama-1b", 1_235_814_400),
            ("llama-3b", 3_212_749_824),
            ("llama-8b", 8_030_261_248),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-7b", 7_615_616_512),
            ("mistral-7b", 7_248_023_552),
            ("smollm3-3b", 3_075_098_624),
            ("olmo2-1b", 1_484_916_736),
            ("gemma3-1b", 999_885_952),
            ("pythia-160m", 162_322_944),
            ("mixtral-8x7b", 46_702_792_704),
            ("olmoe-1b-7b", 6_919_161_856),
            ("qwen3-30b-a3b", 30_532_122_624),
        ] {
            assert_eq!(of(name), parameters, "{name}");
        }
        assert_eq!(size(1), 12 * (4 * 384 * 384 + 3 * 384 * 1536 + 2 * 384) + 384 + 2 * 50257 * 384);
    }

    #[test]
    fn parts_cover_what_passes_use_and_neighbours_touch() {
        for (name, shape) in &shapes() {
            let layout = Layout::new(shape);
            let (forward, backward) = (layout.forward_parts(), layout.backward_parts());
            assert_eq!((forward.len(), backward.len()), (shape.layers + 2, shape.layers + 1), "{name}");
            let covers = |parts: &[Range<usize>], range: &Range<usize>| {
                parts.iter().any(|part| part.start <= range.start && range.end <= part.end)
            };
            for param in &layout.params {
                assert!(covers(&forward, &param.range), "{name} {}", param.name);
                let kept = covers(&layout.kept(), &param.range);
                assert!(kept || covers(&backward, &param.range), "{name} {}", param.name);
            }
            assert!(
                backward.windows(2).all(|pair| pair[0].end >= pair[1].start && pair[0].start < pair[1].start)
            );
        }
    }

    #[test]
    fn chunks_have_the_groups_of_their_parameters() {
        for layout in [&PRESETS[2].1, &Arch::Mixtral.base()].map(Layout::new) {
            let groups = layout.groups();
            for param in &layout.params {
                let group = match param.name.as_str() {
                    "wte.weight" | "wpe.weight" => Group::Embeddings,
                    "head.weight" => Group::Head,
                    _ if param.shape.len() == 1 => Group::Vectors,
                    _ => Group::Matrices,
                };
                let chunks = param.range.start / GROUP_CHUNK..param.range.end.div_ceil(GROUP_CHUNK);
                assert!(groups[chunks].iter().all(|byte| *byte == group as u8), "{}", param.name);
            }
        }
        assert!(Group::ALL.iter().enumerate().all(|(number, group)| *group as usize == number));
    }
}
