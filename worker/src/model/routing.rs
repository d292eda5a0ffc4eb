//! The loads of experts, and the losses that balance them.
//!
//! The number of choices of each expert is all-reduced between forward and backward, because the balance loss is that
//! of the global batch. Biases of the choice of experts, if the model has any, are updated from the loads of a step,
//! which are the same on every rank. Every rank has all biases in F32; the arena has a copy, which checkpoints contain.

use std::ops::Range;

use xlaunch_engine::{
    Accumulate, AddTo, Cast, DType, PendingRead, Result, Scale, Slice, StepConditions, Sum, Tensor,
    UpdateRouterBias,
};
use xlaunch_spec::job::TrainSection;
use xlaunch_spec::model::ModelShape;

use super::{BackendHandle, Model, narrow};

/// State shared by the routers of a model: the loads of a micro-step, and the losses that balance them.
#[derive(Debug)]
pub struct Routing {
    /// Number of choices of each expert in each layer with experts, F32 `[L, E]`. Forward writes those of this rank.
    pub loads: Tensor,
    /// Sum of the loads of a step's micro-steps.
    total: Tensor,
    /// Biases of the choice of experts, F32 `[L, E]`.
    biases: Option<Tensor>,
    /// Sum over layers of the mean balance loss, F32 `[1]`. Backward adds this rank's part of it.
    balance: Tensor,
    /// Number of experts.
    experts: usize,
    /// Factors of the losses.
    pub(super) factors: Factors,
    /// Change of a bias per step.
    bias_rate: f32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Factors {
    pub(super) balance: f32,
    pub(super) z: f32,
    /// Ranks, and micro-steps of a step.
    pub(super) ranks: usize,
    pub(super) micro_steps: usize,
}

/// How evenly the experts of a model were used in a step.
#[derive(Clone, Debug)]
pub struct ExpertLoad {
    /// Mean balance loss of the layers, without its factor: 1 for a balanced load.
    pub balance: f32,
    /// Largest share of a layer's choices that one expert has.
    pub busiest: f32,
    /// Entropy of a layer's loads relative to that of equal loads, mean over layers.
    pub entropy: f32,
    /// Number of choices of each expert, layer by layer.
    loads: Vec<f32>,
    /// Number of experts.
    experts: usize,
}

impl Routing {
    /// Creates it for a model with experts.
    pub(super) fn new(backend: &BackendHandle, shape: &ModelShape) -> Result<Option<Self>> {
        if shape.experts == 0 {
            return Ok(None);
        }
        let per_expert = || backend.alloc_persistent(DType::F32, shape.expert_layers() * shape.experts);
        let routing = Self {
            loads: per_expert()?,
            total: per_expert()?,
            biases: shape.router_bias.then(per_expert).transpose()?,
            balance: backend.alloc_persistent(DType::F32, 1)?,
            experts: shape.experts,
            factors: Factors { ranks: 1, micro_steps: 1, ..Factors::default() },
            bias_rate: 0.0,
        };
        for tensor in [&routing.loads, &routing.total, &routing.balance].into_iter().chain(&routing.biases) {
            backend.zero(tensor.all())?;
        }
        Ok(Some(routing))
    }

    /// Starts the losses of a step.
    pub fn begin_step(&self, backend: &BackendHandle) -> Result<()> {
        backend.zero(self.balance.all())
    }

    /// Adds the loads of a micro-step to those of the step, or begins with them.
    pub fn add_loads(&self, backend: &BackendHandle, acc: Accumulate) -> Result<()> {
        let (x, y) = (self.loads.all(), self.total.all());
        match acc {
            Accumulate::Overwrite => backend.run(Cast { x, y }),
            Accumulate::Add => backend.run(AddTo { x, y }),
        }
    }

    /// Writes this rank's part of the balance loss of the step, summed over layers, to `out`.
    pub fn write_balance(&self, backend: &BackendHandle, out: Slice<'_>) -> Result<()> {
        let (x, scale, acc) = (self.balance.all(), Scale::Constant(1.0), Accumulate::Overwrite);
        backend.run(Sum { x, scale, out, acc })
    }

    /// Adds a part of a balance loss: `losses` times `part`.
    pub(super) fn add_balance(&self, backend: &BackendHandle, losses: Slice<'_>, part: f32) -> Result<()> {
        let (scale, out) = (Scale::Constant(part), self.balance.all());
        backend.run(Sum { x: losses, scale, out, acc: Accumulate::Add })
    }

    /// Returns the biases of all layers, if the model has any.
    pub fn biases(&self) -> Option<&Tensor> {
        self.biases.as_ref()
    }

    /// Updates the biases from the loads of a step that is applied under these conditions. Returns the biases if they
    /// may have changed.
    pub fn update_biases(
        &self,
        backend: &BackendHandle,
        conditions: StepConditions<'_>,
    ) -> Result<Option<&Tensor>> {
        let Some(biases) = self.biases.as_ref().filter(|_| self.bias_rate > 0.0) else { return Ok(None) };
        let (loads, bias) = (self.total.all(), biases.all());
        let (experts, rate) = (self.experts, self.bias_rate);
        backend.run(UpdateRouterBias { experts, rate, loads, bias, conditions })?;
        Ok(Some(biases))
    }

    /// Starts to read the loads of the step.
    pub fn begin_read(&self, backend: &BackendHandle) -> Result<PendingRead> {
        backend.begin_read(self.total.all())
    }

    /// Waits for the loads of a step, and describes them. `balance` is the sum of its balance losses.
    pub fn load(&self, read: PendingRead, balance: f32) -> Result<ExpertLoad> {
        let mut loads = vec![0.0; self.total.len()];
        read.wait(&mut loads)?;
        Ok(ExpertLoad::new(loads, self.experts, balance))
    }

    /// Returns the loads of a block.
    pub(super) fn loads(&self, shape: &ModelShape, block: usize) -> Slice<'_> {
        self.loads.slice(Self::of_block(shape, block))
    }

    /// Returns the range of a block's experts among those of all layers.
    fn of_block(shape: &ModelShape, block: usize) -> Range<usize> {
        let first = (block - shape.dense_layers) * shape.experts;
        first..first + shape.experts
    }
}

impl ExpertLoad {
    /// Describes the loads of several layers.
    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "for display only")]
    fn new(loads: Vec<f32>, experts: usize, balance: f32) -> Self {
        let layers = loads.len() / experts;
        let (mut busiest, mut entropy) = (0.0_f64, 0.0);
        for loads in loads.chunks_exact(experts) {
            for share in shares(loads).filter(|share| *share > 0.0) {
                busiest = busiest.max(share);
                entropy -= share * share.ln();
            }
        }
        // The entropy of a single expert is that of equal loads.
        let most = layers as f64 * (experts as f64).ln();
        let entropy = if most > 0.0 { entropy / most } else { 1.0 };
        let (balance, busiest, entropy) = (balance / layers as f32, busiest as f32, entropy as f32);
        Self { balance, busiest, entropy, loads, experts }
    }

    /// Returns the share of a layer's choices that each expert has, layer by layer.
    #[expect(clippy::cast_possible_truncation, reason = "for display only")]
    pub fn shares(&self) -> impl Iterator<Item = Vec<f32>> {
        self.loads.chunks_exact(self.experts).map(|loads| shares(loads).map(|share| share as f32).collect())
    }
}

/// Returns the share of a layer's choices that each expert has.
fn shares(loads: &[f32]) -> impl Iterator<Item = f64> {
    let total = loads.iter().map(|load| f64::from(*load)).sum::<f64>().max(1.0);
    loads.iter().map(move |load| f64::from(*load) / total)
}

impl Model {
    /// Sets the losses that balance the experts in steps of this job on this number of ranks, and the rate of their
    /// biases. Without this call, and for routers that are frozen, there are no losses, and biases stay constant.
    #[must_use]
    pub fn with_routing(mut self, train: &TrainSection, ranks: usize) -> Self {
        if let Some(routing) = self.routing.as_mut().filter(|_| !self.layout.is_frozen()) {
            let (balance, z) = (narrow(train.router_aux_loss_coef), narrow(train.router_z_loss_coef));
            routing.factors = Factors { balance, z, ranks, micro_steps: train.accumulate };
            routing.bias_rate = narrow(train.router_bias_rate);
        }
        self
    }

    /// Returns the biases of a block's router, if it has any.
    pub(super) fn router_bias(&self, block: usize) -> Option<Slice<'_>> {
        let biases = self.routing.as_ref()?.biases.as_ref()?;
        Some(biases.slice(Routing::of_block(&self.shape, block)))
    }

    /// Sets the biases that are among `values`, which start at element `at` of the arena.
    pub(super) fn write_router_biases(&self, at: usize, values: &[f32]) -> Result<()> {
        let Some(biases) = self.routing.as_ref().and_then(Routing::biases) else { return Ok(()) };
        for (layer, bias) in self.layout.router_biases().enumerate() {
            let (start, end) = (bias.start.max(at), bias.end.min(at + values.len()));
            if start < end {
                let first = layer * self.shape.experts + start - bias.start;
                let to = biases.slice(first..first + end - start);
                self.backend.write_f32(to, &values[start - at..end - at])?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_described_by_the_busiest_expert_and_the_entropy() {
        let even = ExpertLoad::new(vec![5.0; 8], 4, 2.0);
        assert_eq!((even.balance, even.busiest, even.entropy), (1.0, 0.25, 1.0));
        let one = ExpertLoad::new(vec![0.0, 8.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0], 4, 5.0);
        assert_eq!((one.balance, one.busiest, one.entropy), (2.5, 1.0, 0.5));
        assert_eq!(one.shares().collect::<Vec<_>>(), [[0.0, 1.0, 0.0, 0.0], [0.25; 4]]);
        assert_eq!(ExpertLoad::new(vec![7.0], 1, 1.0).entropy, 1.0);
    }
}
