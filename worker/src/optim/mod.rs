//! AdamW with decoupled weight decay and global-norm clipping, over the flat arenas, in one kernel launch; before it,
//! [`muon`] for the matrices of blocks if the job uses it.
//!
//! ```text
//!                        replicated                        sharded (`comm.shard`)
//! model in F32:          model's weights                   masters ------------> all-gather -> model's weights
//! model in Bf16:         masters -> model's weights        masters -> rounded -> all-gather -> model's weights
//! ```
//! Master weights (F32) and the two moments (F32) cover this rank's shard only. With n ranks and a Bf16 model, sharding
//! saves each rank 12 (n-1)/n bytes per parameter, minus 4/n for its shards of the gradients and of the rounded
//! weights.
//!
//! A step whose loss or gradient norm is not finite changes nothing (see `ops/adamw` in the engine). The bias
//! correction also counts such steps, so that it depends on the step alone and a resumed run repeats it exactly.
//!
//! All values that change from step to step are read from device memory (`scalars`), so that a captured step can be
//! replayed.

mod muon;
mod owners;

use std::ops::Range;

use xlaunch_comm::{Collective, Operation, Sharding, Wait};
use xlaunch_engine::{
    AdamWConfig, AdamWStep, Cast, DType, GROUP_CHUNK, GROUPS, Result, Slice, StepConditions, Tensor, scalar,
};
use xlaunch_spec::job::JobSpec;

use crate::model::{BackendHandle, Group, Model, Routing};
use muon::Muon;

/// The optimizer's state and hyperparameters.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    /// One for the matrices that all ranks have, one for those of experts. Empty if AdamW updates everything.
    muon: Vec<Muon>,
    sharding: Sharding,
    /// `None` if the model's F32 weights are the master weights.
    masters: Option<Tensor>,
    /// The masters in the model's element type, for the all-gather. Sharded Bf16 models only.
    rounded: Option<Tensor>,
    m: Tensor,
    v: Tensor,
    /// Group of each chunk of this rank's shard.
    groups: Tensor,
    /// Learning rate of each group relative to the schedule's, and its weight decay.
    rates: [(f64, f64); GROUPS],
    /// Ranges of the biases of routers, and their places in this rank's shard.
    router_biases: Vec<[Range<usize>; 2]>,
    scalars: Tensor,
    /// Number of consecutive skipped steps, counted on the device.
    skipped: Tensor,
    backend: BackendHandle,
}

/// A part of the state that checkpoints contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Master weights.
    Masters,
    /// First moment.
    M,
    /// Second moment.
    V,
}

impl AdamW {
    /// Creates zero moments, and masters from this rank's shard of `params`, the arena that `model` was created from.
    pub fn new(
        backend: &BackendHandle,
        model: &Model,
        params: &[f32],
        sharding: &Sharding,
        spec: &JobSpec,
    ) -> Result<Self> {
        let optimizer = Self::zeroed(backend, model, sharding, spec)?;
        optimizer.write(Part::Masters, 0, params)?;
        optimizer.round()?;
        Ok(optimizer)
    }

    /// Creates masters and moments that are zero until they are [written](Self::write).
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "the kernel computes in f32"
    )]
    pub fn zeroed(
        backend: &BackendHandle,
        model: &Model,
        sharding: &Sharding,
        spec: &JobSpec,
    ) -> Result<Self> {
        let train = &spec.train;
        let (f32_model, sharded) = (model.trained().dtype() == DType::F32, sharding.is_sharded());
        let shard = |dtype| backend.alloc_persistent(dtype, sharding.len());
        let gathered_shard = |dtype| backend.alloc_collective(dtype, sharding.len());
        let muon = Muon::new(backend, spec, (&model.shape, &model.layout), sharding)?;
        let mut groups = model.layout.trained().groups();
        muon.iter().for_each(|muon| muon.mark(&mut groups));
        let groups = sharding.shard_of(&groups, GROUP_CHUNK);
        let optimizer = Self {
            config: AdamWConfig {
                beta1: train.beta1 as f32,
                beta2: train.beta2 as f32,
                eps: train.eps as f32,
                clip: train.clip as f32,
                skip_limit: train.nonfinite.limit() as f32,
            },
            muon,
            masters: match (sharded, f32_model) {
                (true, true) => Some(gathered_shard(DType::F32)?),
                (_, false) => Some(shard(DType::F32)?),
                (false, true) => None,
            },
            rounded: (sharded && !f32_model).then(|| gathered_shard(model.trained().dtype())).transpose()?,
            m: shard(DType::F32)?,
            v: shard(DType::F32)?,
            groups: backend.alloc_persistent(DType::U8, groups.len())?,
            rates: Group::ALL.map(|group| group.rates(spec)),
            router_biases: own_router_biases(model, sharding),
            scalars: backend.alloc_persistent(DType::F32, scalar::COUNT)?,
            skipped: backend.alloc_persistent(DType::F32, 1)?,
            sharding: sharding.clone(),
            backend: backend.clone(),
        };
        for tensor in
            [optimizer.masters.as_ref(), Some(&optimizer.m), Some(&optimizer.v)].into_iter().flatten()
        {
            backend.zero(tensor.all())?;
        }
        backend.zero(optimizer.skipped.all())?;
        backend.write_u8(optimizer.groups.all(), &groups)?;
        Ok(optimizer)
    }

    /// Writes the part of `values` that belongs to this rank. They start at element `at` of the whole arena. After
    /// writing the last masters, [`round`](Self::round) them.
    pub fn write(&self, part: Part, at: usize, values: &[f32]) -> Result<()> {
        let tensor = match part {
            Part::Masters => self.masters.as_ref(),
            Part::M => Some(&self.m),
            Part::V => Some(&self.v),
        };
        // Without masters, the model's weights are the only copy.
        let Some(tensor) = tensor else { return Ok(()) };
        for bucket in self.sharding.plan().buckets() {
            let (own, stored) = (self.sharding.in_arena(bucket), self.sharding.in_shard(bucket));
            let (start, end) = (own.start.max(at), own.end.min(at + values.len()));
            if start < end {
                let to = stored.start + start - own.start;
                self.backend.write_f32(tensor.slice(to..to + end - start), &values[start - at..end - at])?;
            }
        }
        Ok(())
    }

    /// Rounds the masters to the model's element type, for gathering.
    pub fn round(&self) -> Result<()> {
        match (&self.masters, &self.rounded) {
            (Some(masters), Some(rounded)) => self.backend.run(Cast { x: masters.all(), y: rounded.all() }),
            _ => Ok(()),
        }
    }

    /// Sets the model's weights to the masters, in the model's element type. Requires masters of all parameters.
    pub fn copy_masters_to(&self, model: &Model) -> Result<()> {
        match &self.masters {
            Some(masters) => self.backend.run(Cast { x: masters.all(), y: model.trained().all() }),
            None => Ok(()),
        }
    }

    /// Returns the sharding, which says which parameters this rank updates.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Returns this rank's shard of the state in checkpoints: master weights, first and second moments.
    pub fn state<'a>(&'a self, model: &'a Model) -> [&'a Tensor; 3] {
        [self.masters.as_ref().unwrap_or(model.trained()), &self.m, &self.v]
    }

    /// Returns the most precise copy of parameters that every rank has: of all parameters, or of those gathered last.
    pub fn replica<'a>(&'a self, model: &'a Model) -> &'a Tensor {
        if self.sharding.is_sharded() { model.trained() } else { self.state(model)[0] }
    }

    /// Flips bit `bit % 32` of element `bit / 32` (modulo the number of elements) of this rank's fp32 parameters, as
    /// faulty memory does. Used by fail points.
    pub(crate) fn flip_bit(&self, model: &Model, bit: u64) -> Result<()> {
        let [parameters, ..] = self.state(model);
        let element = usize::try_from(bit / 32).unwrap_or(usize::MAX) % parameters.len().max(1);
        let slice = parameters.slice(element..element + 1);
        let mut value = [0.0];
        self.backend.read_f32(slice, &mut value)?;
        self.backend.write_f32(slice, &[f32::from_bits(value[0].to_bits() ^ 1 << (bit % 32))])
    }

    /// Copies the scalars of step `step` (from 0) to the device.
    #[expect(clippy::cast_possible_truncation, reason = "the kernel computes in f32")]
    pub fn prepare(&self, step: u64, learning_rate: f64) -> Result<()> {
        // Bias correction: 1 / (1 - beta^t), with t counted from 1.
        let correction = |beta: f32| {
            let power = f64::from(beta).powf(step as f64 + 1.0);
            (1.0 / (1.0 - power)) as f32
        };
        let mut scalars = [0.0; scalar::COUNT];
        for (group, (scale, decay)) in self.rates.into_iter().enumerate() {
            let rate = (learning_rate * scale) as f32;
            scalars[scalar::LEARNING_RATES + group] = rate;
            scalars[scalar::DECAYS + group] = rate * decay as f32;
        }
        if let Some(muon) = self.muon.first() {
            scalars[scalar::MUON_LEARNING_RATE] = (learning_rate * muon.rate) as f32;
        }
        scalars[scalar::CORRECTION1] = correction(self.config.beta1);
        scalars[scalar::CORRECTION2] = correction(self.config.beta2);
        self.backend.write_f32(self.scalars.all(), &scalars)
    }

    /// Updates this rank's shard from its reduced gradients `grads`, if `loss` and `grad_norm_sq` are finite. These are
    /// F32 `[1]`: the loss of the global batch and the squared norm of all gradients. The shards of other ranks reach
    /// the model in [`gather`](Self::gather).
    pub fn step(
        &self,
        model: &Model,
        grads: Slice<'_>,
        grad_norm_sq: Slice<'_>,
        loss: Slice<'_>,
        collective: &mut dyn Collective,
    ) -> crate::error::Result<()> {
        let [params, m, v] = self.state(model);
        let f32_model = model.trained().dtype() == DType::F32;
        let work = (!f32_model).then(|| self.rounded.as_ref().unwrap_or(model.trained()).all());
        let (scalars, skipped) = (&self.scalars, self.skipped.all());
        let skip_limit = self.config.skip_limit;
        let conditions = StepConditions { grad_norm_sq, loss, skipped, skip_limit };
        if let Some(routing) = &model.routing
            && let Some(biases) = routing.update_biases(&self.backend, conditions)?
        {
            for [own, stored] in &self.router_biases {
                let (x, y) = (biases.slice(own.clone()), params.slice(stored.clone()));
                self.backend.run(Cast { x, y })?;
            }
        }
        for muon in &self.muon {
            let step = muon::Step { grads, m, v, params, work, scalars, conditions };
            muon.step(&self.backend, &self.sharding, &step, collective)?;
        }
        self.backend.run(AdamWStep {
            config: self.config,
            params: params.all(),
            grads,
            m: m.all(),
            v: v.all(),
            work,
            groups: self.groups.all(),
            scalars: scalars.all(),
            grad_norm_sq,
            loss,
            skipped,
        })?;
        Ok(())
    }

    /// Returns the sources and destinations of all-gathers: of [`gather`](Self::gather), and of Muon's updates.
    pub fn gather_buffers<'a>(&'a self, model: &'a Model) -> impl Iterator<Item = &'a Tensor> {
        let updates = self.muon.iter().flat_map(Muon::gather_buffers);
        self.gather_pair(model).into_iter().flatten().chain(updates)
    }

    fn gather_pair<'a>(&'a self, model: &'a Model) -> Option<[&'a Tensor; 2]> {
        let [masters, ..] = self.state(model);
        let shard = self.rounded.as_ref().unwrap_or(masters);
        self.sharding.is_sharded().then_some([shard, model.trained()])
    }

    /// All-gathers the shards that the last step updated, so that the model's weights are complete; with sharded
    /// parameters, only those that are kept throughout a step. Every rank calls it; calling it again is harmless.
    pub fn gather(&self, model: &Model, collective: &mut dyn Collective) -> xlaunch_comm::Result<()> {
        // Without a collective in flight, this would wait for an event outside the capture, which CUDA refuses.
        if !self.sharding.is_sharded() {
            return Ok(());
        }
        match &model.slots {
            Some(slots) => self.start_gather(model, slots.kept(), collective)?,
            None => self.start_gather(model, self.sharding.plan().buckets(), collective)?,
        }
        collective.wait(Wait::All)
    }

    /// Sets the biases of the model's routers to those in the masters of all ranks, unless they are frozen. Every rank
    /// calls it.
    pub fn gather_router_biases(
        &self,
        model: &Model,
        collective: &mut dyn Collective,
    ) -> crate::error::Result<()> {
        let trained = model.routing.as_ref().filter(|_| !model.layout.is_frozen());
        let Some(biases) = trained.and_then(Routing::biases) else { return Ok(()) };
        let [masters, ..] = self.state(model);
        self.backend.zero(biases.all())?;
        for [own, stored] in &self.router_biases {
            let (x, y) = (masters.slice(stored.clone()), biases.slice(own.clone()));
            self.backend.run(Cast { x, y })?;
        }
        if self.sharding.is_sharded() {
            // The sums are exact: each bias comes from one rank, and all others contribute 0.
            let buckets = vec![biases.lend(0..biases.len())];
            collective.run(Operation::AllReduce { buckets, dtype: DType::F32 })?;
        }
        Ok(())
    }

    /// Starts to gather several buckets together.
    pub fn start_gather<'a>(
        &self,
        model: &Model,
        buckets: impl IntoIterator<Item = &'a Range<usize>>,
        collective: &mut dyn Collective,
    ) -> xlaunch_comm::Result<()> {
        let Some([shard, weights]) = self.gather_pair(model) else { return Ok(()) };
        let leases = |bucket: &Range<usize>| {
            [shard.lend(self.sharding.in_shard(bucket)), weights.lend(model.place(bucket))]
        };
        let buckets: Vec<_> = buckets.into_iter().cloned().collect();
        // One run after another: they are waited for in the order of the buckets.
        self.sharding.plan().runs(&buckets).try_for_each(|(among, buckets)| {
            let buckets = buckets.iter().map(leases).collect();
            collective.start_among(among, Operation::AllGather { buckets })
        })
    }
}

/// Returns the ranges of the biases of routers that are in this rank's shard, and their places there; nothing if they
/// are frozen.
fn own_router_biases(model: &Model, sharding: &Sharding) -> Vec<[Range<usize>; 2]> {
    if model.layout.is_frozen() {
        return Vec::new();
    }
    let parts = |(layer, bias): (usize, &Range<usize>)| {
        let (first, bias) = (layer * model.shape.experts, bias.clone());
        let part = move |bucket: &Range<usize>| {
            let (own, stored) = (sharding.in_arena(bucket), sharding.in_shard(bucket));
            let (start, end) = (own.start.max(bias.start), own.end.min(bias.end));
            let from = |at: usize| at + start..at + end;
            let moved = |range: Range<usize>, by: usize| range.start - by..range.end - by;
            (start < end).then(|| [moved(from(first), bias.start), moved(from(stored.start), own.start)])
        };
        sharding.plan().buckets().iter().filter_map(part)
    };
    model.layout.router_biases().enumerate().flat_map(parts).collect()
}
