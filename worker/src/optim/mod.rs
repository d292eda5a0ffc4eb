//! AdamW with decoupled weight decay and global-norm clipping, over the flat arenas, in one launch.
//!
//! ```text
//!                        every rank updates all            each rank updates its share
//! model in F32:          model's weights                   masters -----------> model's weights, gathered
//! model in Bf16:         masters -> model's weights        masters -> rounded -> model's weights, gathered
//! ```
//! Masters (F32) and the two moments (F32) are of this rank's share. So a share of 1/n in Bf16 saves each rank 12 (n-1)/n
//! bytes a parameter, less 4/n for gradients and weights on their way.
//!
//! Everything that changes from step to step is read from device memory (`scalars`), so that a captured step can be
//! replayed.

pub mod schedule;

use xlaunch_comm::{Collective, Sharding};
use xlaunch_engine::{AdamWConfig, AdamWStep, DECAY_CHUNK, DType, Result, Slice, Tensor, scalar};
use xlaunch_proto::spec::TrainSection;

use crate::model::{BackendHandle, Model};

/// Optimizer state and constants.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    sharding: Sharding,
    /// Where they are not the model's weights themselves.
    masters: Option<Tensor>,
    /// Masters in the model's element type, where others wait for them.
    rounded: Option<Tensor>,
    m: Tensor,
    v: Tensor,
    decay: Tensor,
    scalars: Tensor,
    backend: BackendHandle,
}

impl AdamW {
    /// Zero moments for this rank's share of `params`, the arena that `model` was made from.
    #[expect(clippy::cast_possible_truncation, reason = "constants are meant in f32")]
    pub fn new(
        backend: &BackendHandle,
        model: &Model,
        params: &[f32],
        sharding: &Sharding,
        train: &TrainSection,
    ) -> Result<Self> {
        let (exact, shared) = (model.weights.dtype() == DType::F32, !sharding.is_whole());
        let share = |dtype| backend.alloc_persistent(dtype, sharding.len());
        let sent = |dtype| backend.alloc_collective(dtype, sharding.len());
        let flags = sharding.share_of(&model.layout.decay_flags(), DECAY_CHUNK);
        let optimizer = Self {
            config: AdamWConfig {
                beta1: train.beta1 as f32,
                beta2: train.beta2 as f32,
                eps: train.eps as f32,
                weight_decay: train.weight_decay as f32,
                clip: train.clip as f32,
            },
            masters: match (shared, exact) {
                (true, true) => Some(sent(DType::F32)?),
                (_, false) => Some(share(DType::F32)?),
                (false, true) => None,
            },
            rounded: (shared && !exact).then(|| sent(model.weights.dtype())).transpose()?,
            m: share(DType::F32)?,
            v: share(DType::F32)?,
            decay: backend.alloc_persistent(DType::U8, flags.len())?,
            scalars: backend.alloc_persistent(DType::F32, scalar::COUNT)?,
            sharding: sharding.clone(),
            backend: backend.clone(),
        };
        if let Some(masters) = &optimizer.masters {
            backend.write_f32(masters.all(), &sharding.share_of(params, 1))?;
            if let Some(rounded) = &optimizer.rounded {
                backend.cast(masters.all(), rounded.all())?;
            }
        }
        backend.zero(optimizer.m.all())?;
        backend.zero(optimizer.v.all())?;
        backend.write_u8(optimizer.decay.all(), &flags)?;
        Ok(optimizer)
    }

    /// Goes on with the moments of an earlier run: whole arenas.
    pub fn set_moments(&self, m: &[f32], v: &[f32]) -> Result<()> {
        self.backend.write_f32(self.m.all(), &self.sharding.share_of(m, 1))?;
        self.backend.write_f32(self.v.all(), &self.sharding.share_of(v, 1))
    }

    /// What this rank updates.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// This rank's share of master weights, first and second moments: what a checkpoint holds.
    pub fn state<'a>(&'a self, model: &'a Model) -> [&'a Tensor; 3] {
        [self.masters.as_ref().unwrap_or(&model.weights), &self.m, &self.v]
    }

    /// The most exact parameters of which every rank has all.
    pub fn replica<'a>(&'a self, model: &'a Model) -> &'a Tensor {
        if self.sharding.is_whole() { self.state(model)[0] } else { &model.weights }
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
        scalars[scalar::CORRECTION1] = correction(self.config.beta1);
        scalars[scalar::CORRECTION2] = correction(self.config.beta2);
        self.backend.write_f32(self.scalars.all(), &scalars)
    }

    /// The step on this rank's share: `grads` are its summed gradients, `grad_norm_sq` F32 `[1]` is the squared norm of all
    /// ranks' gradients. The model gets other ranks' shares when they are gathered.
    pub fn step(&self, model: &Model, grads: Slice<'_>, grad_norm_sq: Slice<'_>) -> Result<()> {
        let [params, m, v] = self.state(model);
        let exact = model.weights.dtype() == DType::F32;
        let work = (!exact).then(|| self.rounded.as_ref().unwrap_or(&model.weights).all());
        self.backend.adamw(AdamWStep {
            config: self.config,
            params: params.all(),
            grads,
            m: m.all(),
            v: v.all(),
            work,
            decay: self.decay.all(),
            scalars: self.scalars.all(),
            grad_norm_sq,
        })
    }

    /// From which and to which tensor shares are gathered, where ranks have shares.
    pub fn gathered<'a>(&'a self, model: &'a Model) -> Option<[&'a Tensor; 2]> {
        let [masters, ..] = self.state(model);
        let share = self.rounded.as_ref().unwrap_or(masters);
        (!self.sharding.is_whole()).then_some([share, &model.weights])
    }

    /// Brings every rank's share to the model of all: what a step left there is complete. Every rank calls it, any number
    /// of times.
    pub fn gather(&self, model: &Model, collective: &mut dyn Collective) -> xlaunch_comm::Result<()> {
        self.start_gather(model, collective)?;
        // A wait for nothing cannot be captured.
        if self.sharding.is_whole() { Ok(()) } else { collective.finish() }
    }

    /// Starts it, bucket by bucket from the last one down, as forward reads them.
    pub fn start_gather(&self, model: &Model, collective: &mut dyn Collective) -> xlaunch_comm::Result<()> {
        let Some([share, weights]) = self.gathered(model) else { return Ok(()) };
        for bucket in self.sharding.plan().buckets().iter().rev() {
            let part = share.lend(self.sharding.in_share(bucket));
            collective.all_gather(part, weights.lend(bucket.clone()))?;
        }
        Ok(())
    }
}
