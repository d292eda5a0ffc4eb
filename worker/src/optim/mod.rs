//! AdamW with decoupled weight decay and global-norm clipping, over the flat arenas, in one launch.
//!
//! Everything that changes from step to step is read from device memory (`scalars`), so that a captured step can be
//! replayed.

pub mod schedule;

use xlaunch_engine::{AdamWShape, DType, Result, Slice, Tensor, scalar};
use xlaunch_proto::spec::TrainSection;

use crate::model::{BackendHandle, Model};

/// Optimizer state and constants.
#[derive(Debug)]
pub struct AdamW {
    shape: AdamWShape,
    /// First moments, F32, an arena of the layout.
    pub m: Tensor,
    /// Second moments.
    pub v: Tensor,
    decay: Tensor,
    scalars: Tensor,
    backend: BackendHandle,
}

impl AdamW {
    /// Zero moments for the parameters of `model`.
    #[expect(clippy::cast_possible_truncation, reason = "constants are meant in f32")]
    pub fn new(backend: &BackendHandle, model: &Model, train: &TrainSection) -> Result<Self> {
        let flags = model.layout.decay_flags();
        let optimizer = Self {
            shape: AdamWShape {
                beta1: train.beta1 as f32,
                beta2: train.beta2 as f32,
                eps: train.eps as f32,
                weight_decay: train.weight_decay as f32,
                clip: train.clip as f32,
            },
            m: backend.alloc_persistent(DType::F32, model.layout.len)?,
            v: backend.alloc_persistent(DType::F32, model.layout.len)?,
            decay: backend.alloc_persistent(DType::U8, flags.len())?,
            scalars: backend.alloc_persistent(DType::F32, scalar::COUNT)?,
            backend: backend.clone(),
        };
        backend.zero(optimizer.m.all())?;
        backend.zero(optimizer.v.all())?;
        backend.write_u8(optimizer.decay.all(), &flags)?;
        Ok(optimizer)
    }

    /// Sends the scalars of step `step` (from 0) to the device.
    #[expect(clippy::cast_possible_truncation, reason = "scalars are meant in f32")]
    pub fn prepare(&self, step: u64, learning_rate: f64) -> Result<()> {
        let correction = |beta: f32| {
            let power = f64::from(beta).powf(step as f64 + 1.0);
            (1.0 / (1.0 - power)) as f32
        };
        let mut scalars = [0.0; scalar::COUNT];
        scalars[scalar::LEARNING_RATE] = learning_rate as f32;
        scalars[scalar::CORRECTION1] = correction(self.shape.beta1);
        scalars[scalar::CORRECTION2] = correction(self.shape.beta2);
        self.backend.write_f32(self.scalars.all(), &scalars)
    }

    /// Squared norm of `grads` into `square_sum` F32 `[1]`, then the step on the model's parameters.
    pub fn step(&self, model: &Model, grads: &Tensor, square_sum: Slice<'_>) -> Result<()> {
        self.backend.square_sum(grads.all(), square_sum)?;
        self.backend.adamw(
            self.shape,
            model.params.all(),
            grads.all(),
            self.m.all(),
            self.v.all(),
            model.work.as_ref().map(Tensor::all),
            self.decay.all(),
            self.scalars.all(),
            square_sum,
        )
    }
}
