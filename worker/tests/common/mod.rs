//! Helpers that train a tiny model on one rank, or on several ranks as threads.

#![allow(dead_code, clippy::unwrap_used, reason = "helpers of several tests")]

use std::path::Path;
use std::time::Duration;

use xlaunch_comm::{Collective, Local, Ring, RingListener, RingPlace};
use xlaunch_engine::{Backend, PoolMode, Tensor};
use xlaunch_spec::job::{JobSpec, Shard};
use xlaunch_spec::model::{Arch, ModelShape};
use xlaunch_worker::data::{Dataset, Loader, Schedule};
use xlaunch_worker::model::{BackendHandle, Model, init, layout::Layout};
use xlaunch_worker::optim::AdamW;
use xlaunch_worker::train::{Division, Evaluator, PendingStep, Requests, Stepper};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Training state of one rank.
pub(crate) struct Rank {
    pub(crate) backend: BackendHandle,
    pub(crate) model: Model,
    pub(crate) optimizer: AdamW,
    pub(crate) stepper: Stepper,
    pub(crate) evaluator: Evaluator,
    pub(crate) dataset: Dataset,
    pub(crate) loader: Loader,
    pub(crate) collective: Box<dyn Collective>,
}

/// Returns a job with text in `dir`.
pub(crate) fn spec(dir: &Path, sharded: bool) -> JobSpec {
    let text: String = (0..3000).map(|i| char::from(b'a' + (i * i % 23) as u8)).collect();
    std::fs::write(dir.join("text"), text).unwrap();
    let mut spec = JobSpec::default();
    spec.data.train = vec![dir.join("text").display().to_string().into()];
    (spec.train.batch, spec.train.accumulate) = (2, 2);
    spec.comm.shard = if sharded { Shard::Optimizer } else { Shard::None };
    // The model has several buckets.
    spec.comm.bucket_mb = 0.02;
    spec
}

/// Returns the shape of a tiny model.
pub(crate) fn shape(arch: Arch, layers: usize, tied: bool) -> ModelShape {
    ModelShape {
        arch,
        layers,
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        dim: 32,
        ffn: 48,
        seq: 40,
        vocab: 256,
        tied,
        ..arch.base()
    }
}

impl Rank {
    pub(crate) fn new(backend: BackendHandle, spec: &JobSpec, collective: Box<dyn Collective>) -> Self {
        Self::with_shape(shape(Arch::Llama, 2, false), backend, spec, collective)
    }

    pub(crate) fn with_shape(
        shape: ModelShape,
        backend: BackendHandle,
        spec: &JobSpec,
        mut collective: Box<dyn Collective>,
    ) -> Self {
        let (rank, world) = (collective.rank(), collective.world_size());
        if spec.comm.experts > 1 {
            collective.divide(spec.comm.experts).unwrap();
        }
        let dataset = Dataset::open(spec, &shape).unwrap();
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let layout = Layout::of_rank(spec, &shape, rank, world).unwrap();
        let weights = of_rank(&layout, &init::weights(&Layout::new(&shape), 7, &threads));
        let shard = spec.shard(world, false, true);
        let division = Division::new(spec, &layout, backend.activation_dtype(), rank, world, shard);
        let model = Model::of_layout(&backend, &shape, layout, division.weights.clone()).unwrap();
        let model = model.with_job(spec, world);
        model.write_weights(0, &weights).unwrap();
        let optimizer = AdamW::new(&backend, &model, &weights, &division.sharding, spec).unwrap();
        let stepper = Stepper::new(&backend, &model, spec, &division, world, None).unwrap();
        let evaluator = Evaluator::new(&backend, &model, spec, &division, None).unwrap();
        let schedule = Schedule {
            first: 0,
            rank,
            world,
            batch: spec.train.batch,
            accumulate: spec.train.accumulate,
            seq: shape.seq,
        };
        let loader = Loader::start(dataset.train.clone(), schedule).unwrap();
        Self { backend, model, optimizer, stepper, evaluator, dataset, loader, collective }
    }

    /// Enqueues a step, numbered from 0.
    pub(crate) fn start(&mut self, step: u64) -> PendingStep {
        self.optimizer.prepare(step, 1e-3).unwrap();
        let (model, optimizer, loader) = (&self.model, &self.optimizer, &self.loader);
        self.stepper.start(model, optimizer, &mut *self.collective, loader, Requests::default()).unwrap()
    }

    /// Returns whether loss and gradient norm are finite.
    pub(crate) fn finish(&self, pending: PendingStep) -> bool {
        let result = self.stepper.finish(&self.model, pending, &*self.collective).unwrap();
        result.loss.is_finite() && result.grad_norm.is_finite()
    }

    /// Sets the first weight of this rank's shard and returns the old value.
    pub(crate) fn set_first_weight(&self, value: f32) -> f32 {
        let weight = self.optimizer.state(&self.model)[0].slice(0..1);
        let mut old = [0.0];
        self.backend.read_f32(weight, &mut old).unwrap();
        self.backend.write_f32(weight, &[value]).unwrap();
        old[0]
    }

    /// Returns the bits of this rank's weights and moments.
    pub(crate) fn state(&self) -> Vec<u32> {
        let read = |tensor: &Tensor| {
            let mut values = vec![0.0; tensor.len()];
            self.backend.read_f32(tensor.all(), &mut values).unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        self.optimizer.state(&self.model).map(read).concat()
    }
}

/// Returns a rank's part of the weights of a whole model.
fn of_rank(layout: &Layout, whole: &[f32]) -> Vec<f32> {
    let mut own = vec![0.0; layout.len];
    for segment in layout.own_parts(&(0..whole.len())) {
        own[segment.own].copy_from_slice(&whole[segment.whole]);
    }
    own
}

/// Calls `f` on threads, with the training state of each of `world` ranks.
pub(crate) fn on_ranks(spec: &JobSpec, dir: &Path, world: usize, f: impl Fn(Rank) + Sync) {
    on_ranks_with_shape(&shape(Arch::Llama, 2, false), spec, dir, world, f);
}

/// Same as [`on_ranks`], with a model of this shape.
pub(crate) fn on_ranks_with_shape(
    shape: &ModelShape,
    spec: &JobSpec,
    dir: &Path,
    world: usize,
    f: impl Fn(Rank) + Sync,
) {
    let listeners: Vec<_> = (0..world).map(|rank| RingListener::bind(dir, rank).unwrap()).collect();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().to_owned()).collect();
    std::thread::scope(|scope| {
        for (rank, listener) in listeners.into_iter().enumerate() {
            let (addresses, f) = (&addresses, &f);
            scope.spawn(move || {
                let next_address = &addresses[(rank + 1) % world];
                let place = RingPlace { rank, world, next_address, key: &[7; 32] };
                let collective: Box<dyn Collective> = match world {
                    1 => Box::new(Local),
                    _ => Box::new(Ring::connect(listener, &place, CONNECT_TIMEOUT).unwrap()),
                };
                let backend = BackendHandle::new(Backend::cpu(1, PoolMode::On));
                f(Rank::with_shape(shape.clone(), backend, spec, collective));
            });
        }
    });
}
