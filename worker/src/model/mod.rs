//! The GPT model, written once for every [`Backend`]: forward and a hand-written backward. There is no autograd.
//!
//! - [`layout`]: offsets of each parameter in the flat arenas;
//! - [`init`]: initial weights;
//! - `rope`: the table of rotary angles;
//! - `forward` and `backward`: the operations of each block, in mirrored order;
//! - `linear`: the linear layers of blocks, in the activations' type or in FP8;
//! - `kept`: activations of a block that forward keeps for backward, and their recomputation;
//! - `head`: logits, loss and their gradients;
//! - [`decode`]: forward for generation: new tokens over cached ones;
//! - this file: the model's data and helpers that both passes use.

mod backward;
pub mod decode;
mod forward;
mod head;
pub mod init;
pub mod layout;
mod linear;
mod rope;
mod saved_activations;

use std::ops::Range;
use std::rc::Rc;

use xlaunch_comm::Slots;
use xlaunch_engine::{
    AttentionOptions, AttentionShape, Backend, Cast, DType, LinearShape, NormKind, NormShape, Result, Slice,
    Tensor,
};
use xlaunch_spec::job::{JobSpec, Precision, Recompute, TrainSection};
use xlaunch_spec::model::{self, ModelShape, Positions};

pub use backward::{GradientArena, Progress};
pub use forward::Activations;
pub use head::LossGradients;
use layout::Layout;

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
    pub weights: Tensor,
    /// Positions of buckets of the weights; `None` if all buckets are at their position in the arena.
    pub slots: Option<Slots>,
    memory: MemoryUse,
    /// True if the linear layers of blocks use FP8.
    fp8: bool,
    /// Cosines and sines of the rotary angles, F32 `[T, D]`; llama only.
    rope: Option<Tensor>,
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

/// Handle to the back end, shared by all parts of one worker.
#[derive(Clone)]
pub struct BackendHandle {
    backend: Rc<Backend>,
    windows: bool,
}

impl BackendHandle {
    /// Creates the first handle to `backend`.
    pub fn new(backend: Backend) -> Self {
        Self { backend: Rc::new(backend), windows: false }
    }

    /// Sets whether tensors for collectives should become NCCL windows: see [`crate::nccl_windows`]. Default: false.
    #[must_use]
    pub fn with_windows(mut self, windows: bool) -> Self {
        self.windows = windows;
        self
    }

    /// Returns whether tensors of [`alloc_collective`](Self::alloc_collective) should be registered as windows.
    pub fn has_windows(&self) -> bool {
        self.windows
    }

    /// Allocates a long-lived tensor with unspecified contents. The pool keeps it apart from short-lived ones.
    #[track_caller]
    pub fn alloc_persistent(&self, dtype: DType, len: usize) -> Result<Tensor> {
        Tensor::new(&self.pool().persistent(), dtype, len)
    }

    /// Allocates a long-lived tensor for collectives, with unspecified contents. With windows, it is placed in a
    /// segment that can be registered.
    #[track_caller]
    pub fn alloc_collective(&self, dtype: DType, len: usize) -> Result<Tensor> {
        if self.windows {
            Tensor::new(&self.pool().registered(), dtype, len)
        } else {
            self.alloc_persistent(dtype, len)
        }
    }
}

impl std::fmt::Debug for BackendHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BackendHandle({})", self.backend.device().name)
    }
}

impl std::ops::Deref for BackendHandle {
    type Target = Backend;

    fn deref(&self) -> &Self::Target {
        &self.backend
    }
}

/// The shape of one pass: B sequences of T tokens each.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// B.
    pub batch: usize,
    /// T.
    pub seq: usize,
}

/// Returns the attention shape of a model in one pass.
pub fn attention_shape(shape: &ModelShape, rows: Rows) -> AttentionShape {
    AttentionShape {
        batch: rows.batch,
        seq: rows.seq,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        width: shape.head_width(),
        options: AttentionOptions::new(shape.head_width()),
    }
}

impl Rows {
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
        let layout = Layout::new(shape);
        let len = slots.as_ref().map_or(layout.len, Slots::len);
        let weights = backend.alloc_collective(backend.activation_dtype(), len)?;
        backend.zero(weights.all())?;
        let rope = match shape.positions {
            Positions::Learned => None,
            Positions::Rotary => {
                let table = rope::table(shape, false);
                let rope = backend.alloc_persistent(DType::F32, table.len())?;
                backend.write_f32(rope.all(), &table)?;
                Some(rope)
            }
        };
        let memory = MemoryUse::default();
        Ok(Self {
            shape: shape.clone(),
            layout,
            weights,
            slots,
            memory,
            fp8: false,
            rope,
            backend: backend.clone(),
        })
    }

    /// Applies a job's settings for how passes compute.
    #[must_use]
    pub fn with_job(self, spec: &JobSpec) -> Self {
        let fp8 = spec.engine.precision == Some(Precision::Fp8);
        self.with_memory_use((&spec.train).into()).with_fp8(fp8)
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

    /// Sets the weights starting at element `at` of the arena. Does nothing with sharded parameters, which are gathered
    /// from the optimizer's masters.
    pub fn write_weights(&self, at: usize, values: &[f32]) -> Result<()> {
        if self.slots.is_some() {
            return Ok(());
        }
        let range = self.weights.slice(at..at + values.len());
        if self.weights.dtype() == DType::F32 {
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

    /// Returns the range of `weights` that holds these elements, which belong to one parameter or bucket.
    pub(crate) fn place(&self, elements: &Range<usize>) -> Range<usize> {
        self.slots.as_ref().map_or(elements.clone(), |slots| slots.place(elements))
    }

    /// Allocates a tensor in the element type of the activations.
    #[track_caller]
    fn activation(&self, len: usize) -> Result<Tensor> {
        self.backend.alloc(self.backend.activation_dtype(), len)
    }

    fn norm_shape(&self, rows: Rows) -> NormShape {
        let kind = match self.shape.norm {
            model::NormKind::Layer => NormKind::Layer,
            model::NormKind::Rms => NormKind::Rms,
        };
        #[expect(clippy::cast_possible_truncation, reason = "norms compute in f32")]
        let eps = self.shape.norm_eps as f32;
        NormShape { rows: rows.count(), cols: self.shape.dim, kind, eps, offset: 0.0 }
    }

    /// Returns the part of the rotary table for these positions.
    fn rope(&self, rows: Rows) -> Option<Slice<'_>> {
        self.rope.as_ref().map(|table| table.slice(0..rows.seq * self.shape.head_width()))
    }

    fn linear_shape(rows: Rows, inputs: usize, outputs: usize) -> LinearShape {
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
