//! The GPT model, written once for every [`Backend`](xlaunch_engine::Backend): forward and a hand-written backward.
//! There is no autograd.
//!
//! - [`layout`]: offsets of each parameter in the flat arenas;
//! - [`init`]: initial weights;
//! - `rope`: the tables of rotary angles;
//! - `backend_handle`: the device, which all parts of a worker share;
//! - `forward` and `backward`: the operations of each block, in mirrored order;
//! - `adapters`: low-rank adapters of linear layers whose weights are frozen;
//! - `experts`, `experts_backward`, `expert_buffers` (in decoding): routers, and the feed-forward layers of blocks with
//!   experts; `expert_layers`: the linear layers of these, in the activations' type or in FP8; `routing`: loads and the
//!   losses that balance them;
//! - `feed_forward`: layers of blocks without experts, and of shared experts; `shared_experts`: these with their gate;
//! - `linear`: the linear layers of blocks, in the activations' type or in FP8; `fp8`: the rounding of their operands;
//! - `saved_activations`: activations of a block that forward keeps for backward, and their recomputation;
//! - `head`: logits, loss and their gradients;
//! - [`decode`]: forward for generation: new tokens over cached ones;
//! - this file: the model's data and helpers that both passes use.

mod adapters;
mod backend_handle;
mod backward;
pub mod decode;
mod expert_buffers;
mod expert_layers;
mod experts;
mod experts_backward;
mod feed_forward;
mod forward;
mod fp8;
mod gradient_arena;
mod head;
pub mod init;
pub mod layout;
mod linear;
mod pass;
mod rope;
mod routing;
mod saved_activations;
mod shared_experts;

use std::ops::Range;
use std::rc::Rc;

use xlaunch_comm::Slots;
use xlaunch_engine::{
    AttentionOptions, AttentionShape, Cast, DType, Documents, GluInputs, LinearShape, NormKind, NormShape,
    QkNorm, QkNorms, Result, Slice, Tensor,
};
use xlaunch_spec::job::{JobSpec, Precision, Recompute, TrainSection};
use xlaunch_spec::model::{self, ModelShape};

pub use backend_handle::BackendHandle;
pub use forward::{Activations, Output};
pub use gradient_arena::GradientArena;
pub use head::{LossGradients, SMALLEST_CHUNK};
pub use layout::Group;
use layout::Layout;
pub(crate) use linear::activation_function;
pub use pass::Progress;
use rope::Rope;
pub use routing::{ExpertLoad, Routing};

/// A model on a device.
#[derive(Debug)]
pub struct Model {
    /// Sizes of the model.
    pub shape: ModelShape,
    /// Offsets of each parameter.
    pub layout: Layout,
    /// The weights that forward and backward read: an arena of the layout in the element type of activations. The
    /// optimizer updates them; if they are Bf16, the optimizer has F32 master weights. With a sharded optimizer, the
    /// other ranks' updates of the last step are missing until they are gathered. With sharded parameters, only the
    /// most recently gathered buckets are present, in `slots`.
    pub weights: Rc<Tensor>,
    /// The adapters that are trained while `weights` stay unchanged, if the layout has any: their arena, in the same
    /// element type.
    adapters: Option<Tensor>,
    /// Positions of buckets of the weights; `None` if all buckets are at their position in the arena.
    pub slots: Option<Slots>,
    memory: MemoryUse,
    /// True if the linear layers of blocks use FP8.
    fp8: bool,
    rope: Rope,
    /// `None` without experts.
    pub routing: Option<Routing>,
    backend: BackendHandle,
}

/// Ways in which a pass saves memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryUse {
    /// Activations that backward recomputes.
    pub recompute: Recompute,
    /// Rows of logits in memory at a time; 0 means all.
    pub classifier_chunk: usize,
}

impl From<&TrainSection> for MemoryUse {
    fn from(train: &TrainSection) -> Self {
        Self { recompute: train.recompute, classifier_chunk: train.classifier_chunk }
    }
}

/// The shape of one pass: B sequences of T tokens each.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// B.
    pub batch: usize,
    /// T.
    pub seq: usize,
    /// Bounds of documents, if sequences hold several. Backward needs the same ones as forward.
    pub documents: Option<Documents<'a>>,
}

/// Returns the attention shape of a block in one pass.
pub fn attention_shape(shape: &ModelShape, rows: Rows<'_>, block: usize) -> AttentionShape {
    let options = attention_options(shape, block).for_length(rows.seq);
    AttentionShape {
        batch: rows.batch,
        seq: rows.seq,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        width: shape.head_width(),
        options: AttentionOptions { documents: rows.documents.is_some(), ..options },
    }
}

/// Returns how a block's scores become probabilities.
fn attention_options(shape: &ModelShape, block: usize) -> AttentionOptions {
    let softcap = shape.attention_softcap;
    AttentionOptions {
        scale: narrow(shape.score_factor()).into(),
        window: shape.window(block),
        softcap: (softcap != 0.0).then(|| narrow(softcap).into()),
        documents: false,
    }
}

/// Returns a factor in the precision in which operations compute.
#[expect(clippy::cast_possible_truncation, reason = "the operations compute in f32")]
fn narrow(factor: f64) -> f32 {
    factor as f32
}

impl Rows<'static> {
    /// Creates the shape of sequences that are one document each.
    pub fn new(batch: usize, seq: usize) -> Self {
        Self { batch, seq, documents: None }
    }
}

impl Rows<'_> {
    /// Returns N = B T.
    pub fn count(self) -> usize {
        self.batch * self.seq
    }
}

impl Model {
    /// Creates a model with the weights `values`, a whole arena.
    pub fn new(backend: &BackendHandle, shape: &ModelShape, values: &[f32]) -> Result<Self> {
        let model = Self::zeroed(backend, shape)?;
        model.write_weights(0, values)?;
        Ok(model)
    }

    /// Creates a model whose weights are zero until they are [written](Self::write_weights).
    pub fn zeroed(backend: &BackendHandle, shape: &ModelShape) -> Result<Self> {
        Self::with_slots(backend, shape, None)
    }

    /// Same as [`zeroed`](Self::zeroed); with `slots`, allocates memory for the weights in these slots only. Then
    /// gathering is the only way for weights to reach the model.
    pub fn with_slots(backend: &BackendHandle, shape: &ModelShape, slots: Option<Slots>) -> Result<Self> {
        Self::of_layout(backend, shape, Layout::new(shape), slots)
    }

    /// Same as [`with_slots`](Self::with_slots), with the given layout of the model's parameters.
    pub fn of_layout(
        backend: &BackendHandle,
        shape: &ModelShape,
        layout: Layout,
        slots: Option<Slots>,
    ) -> Result<Self> {
        Self::with_weights(backend, shape, layout, slots, None)
    }

    fn with_weights(
        backend: &BackendHandle,
        shape: &ModelShape,
        layout: Layout,
        slots: Option<Slots>,
        weights: Option<Rc<Tensor>>,
    ) -> Result<Self> {
        let dtype = backend.activation_dtype();
        let weights = if let Some(weights) = weights {
            weights
        } else {
            let len = slots.as_ref().map_or(layout.len, Slots::len);
            let weights = backend.alloc_collective(dtype, len)?;
            backend.zero(weights.all())?;
            Rc::new(weights)
        };
        let adapters = layout.is_frozen().then_some(layout.trained().len);
        let adapters = adapters.map(|len| backend.alloc_persistent(dtype, len)).transpose()?;
        if let Some(adapters) = &adapters {
            backend.zero(adapters.all())?;
        }
        let rope = Rope::new(backend, shape, shape.seq)?;
        let memory = MemoryUse::default();
        Ok(Self {
            shape: shape.clone(),
            layout,
            weights,
            adapters,
            slots,
            memory,
            fp8: false,
            rope,
            routing: Routing::new(backend, shape)?,
            backend: backend.clone(),
        })
    }

    /// Returns a model that shares the frozen weights of this one, if it has any, and whose trained parameters are its
    /// own. They are whole, and zero until they are [written](Self::write_trained).
    pub fn twin(&self) -> Result<Self> {
        let layout = if self.layout.is_frozen() { self.layout.clone() } else { Layout::new(&self.shape) };
        let shared = self.layout.is_frozen().then(|| self.weights.clone());
        let twin = Self::with_weights(&self.backend, &self.shape, layout, None, shared)?;
        Ok(twin.with_memory_use(self.memory).with_fp8(self.fp8))
    }

    /// Applies a job's settings for how passes compute on this number of ranks.
    #[must_use]
    pub fn with_job(self, spec: &JobSpec, ranks: usize) -> Self {
        let fp8 = spec.engine.precision == Some(Precision::Fp8);
        self.with_memory_use((&spec.train).into()).with_fp8(fp8).with_routing(&spec.train, ranks)
    }

    /// Sets how passes save memory. By default they do not.
    #[must_use]
    pub fn with_memory_use(mut self, memory: MemoryUse) -> Self {
        self.memory = memory;
        self
    }

    /// Sets whether the linear layers of blocks use FP8, which their sizes and the back end must support. Default:
    /// false.
    #[must_use]
    pub fn with_fp8(self, fp8: bool) -> Self {
        Self { fp8, ..self }
    }

    /// Sets the weights starting at element `at` of the arena. With sharded parameters, only biases of routers are set:
    /// the others are gathered from the optimizer's masters.
    pub fn write_weights(&self, at: usize, values: &[f32]) -> Result<()> {
        self.write_router_biases(at, values)?;
        if self.slots.is_some() {
            return Ok(());
        }
        self.write(&self.weights, at, values)
    }

    /// Sets trained parameters starting at element `at` of their arena: the weights, or adapters.
    pub fn write_trained(&self, at: usize, values: &[f32]) -> Result<()> {
        match &self.adapters {
            Some(adapters) => self.write(adapters, at, values),
            None => self.write_weights(at, values),
        }
    }

    /// Returns the parameters that the optimizer updates: the weights, or adapters.
    pub fn trained(&self) -> &Tensor {
        self.adapters.as_ref().unwrap_or(&self.weights)
    }

    fn write(&self, tensor: &Tensor, at: usize, values: &[f32]) -> Result<()> {
        let range = tensor.slice(at..at + values.len());
        if tensor.dtype() == DType::F32 {
            return self.backend.write_f32(range, values);
        }
        let staging = self.backend.alloc(DType::F32, values.len())?;
        self.backend.write_f32(staging.all(), values)?;
        self.backend.run(Cast { x: staging.all(), y: range })
    }

    /// Returns a parameter in the element type of the activations.
    fn param(&self, range: &Range<usize>) -> Slice<'_> {
        self.weights.slice(self.place(range))
    }

    /// Returns a parameter of an adapter. Panics without adapters, which only layers of a layout with adapters have.
    #[expect(clippy::expect_used, reason = "the layout and the tensor are created together")]
    fn adapter_param(&self, range: &Range<usize>) -> Slice<'_> {
        self.adapters.as_ref().expect("the layout has adapters").slice(range.clone())
    }

    /// Returns the range of `weights` that holds these elements, which belong to one parameter or bucket.
    pub(crate) fn place(&self, elements: &Range<usize>) -> Range<usize> {
        self.slots.as_ref().map_or(elements.clone(), |slots| slots.place(elements))
    }

    /// Allocates a tensor in the element type of the activations.
    #[track_caller]
    fn activation(&self, len: usize) -> Result<Tensor> {
        self.backend.alloc(self.backend.activation_dtype(), len)
    }

    fn norm_shape(&self, rows: Rows<'_>) -> NormShape {
        let kind = match self.shape.norm {
            model::NormKind::Layer => NormKind::Layer,
            model::NormKind::Rms => NormKind::Rms,
        };
        let (eps, offset) = (narrow(self.shape.norm_eps), self.norm_offset());
        NormShape { rows: rows.count(), cols: self.shape.dim, kind, eps, offset }
    }

    fn norm_offset(&self) -> f32 {
        if self.shape.norm_offset { 1.0 } else { 0.0 }
    }

    /// Returns a block's part of the rotary table for these positions, if it rotates.
    fn rope(&self, rows: Rows<'_>, block: usize) -> Option<Slice<'_>> {
        let table = self.rope.of_block(&self.shape, block);
        table.map(|table| table.slice(0..rows.seq * self.shape.head_width()))
    }

    /// Returns the norms of a block's queries and keys, if it has them.
    fn qk_norms<'a>(&'a self, rows: Rows<'a>, block: usize) -> Option<QkNorms<'a>> {
        let kind = match self.shape.qk_norm {
            model::QkNorm::None => return None,
            model::QkNorm::Head => QkNorm::Head,
            model::QkNorm::Full => QkNorm::Full,
        };
        let [q, k] = self.layout.blocks[block].qk_norm.as_ref()?;
        Some(QkNorms {
            shape: attention_shape(&self.shape, rows, block),
            kind,
            eps: narrow(self.shape.norm_eps),
            offset: self.norm_offset(),
            q_gamma: self.param(q),
            k_gamma: self.param(k),
            rope: self.rope(rows, block),
            documents: rows.documents,
        })
    }

    /// Returns the factor of embeddings. Models that derive it from their width round it to the embeddings' type.
    fn embedding_factor(&self) -> f32 {
        let factor = narrow(self.shape.embedding_factor());
        if self.shape.embedding_scale == 0.0 && self.backend.activation_dtype() == DType::Bf16 {
            return half::bf16::from_f32(factor).to_f32();
        }
        factor
    }

    /// Returns what gated activations do with their inputs.
    fn glu_inputs(&self) -> GluInputs {
        let ModelShape { glu_limit, glu_offset, .. } = self.shape;
        let limit = if glu_limit == 0.0 { GluInputs::PLAIN.limit } else { narrow(glu_limit) };
        GluInputs { limit, offset: narrow(glu_offset) }
    }

    /// Returns the bound of the logits, if there is one.
    fn logit_softcap(&self) -> Option<f32> {
        let cap = self.shape.logit_softcap;
        (cap != 0.0).then(|| narrow(cap))
    }

    fn linear_shape(rows: Rows<'_>, inputs: usize, outputs: usize) -> LinearShape {
        LinearShape { rows: rows.count(), inputs, outputs }
    }
}

/// Returns the arithmetic of a GPU. With FP8, the model requests it at each use.
pub(crate) fn engine_precision(precision: Precision) -> xlaunch_engine::Precision {
    match precision {
        Precision::Fp32 => xlaunch_engine::Precision::Fp32,
        Precision::Tf32 => xlaunch_engine::Precision::Tf32,
        Precision::Bf16 | Precision::Fp8 => xlaunch_engine::Precision::Bf16,
    }
}
