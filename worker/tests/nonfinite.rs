//! A step whose loss or gradients are not finite on one rank changes the state of no rank, sharded or not, on CPU and
//! GPU, and neither does the step that was enqueued after it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use xlaunch_comm::{Collective, Local, Ring, RingListener};
use xlaunch_engine::testing::require_gpu;
use xlaunch_engine::{CpuBackend, CudaBackend, CudaOptions, PoolMode, Precision};
use xlaunch_proto::model::{Arch, ModelShape};
use xlaunch_proto::spec::{JobSpec, NonFinite};
use xlaunch_worker::data::{Dataset, Loader, Order, Schedule};
use xlaunch_worker::model::{BackendHandle, Model, init, layout::Layout};
use xlaunch_worker::optim::AdamW;
use xlaunch_worker::train::{PendingStep, Requests, Stepper, sharding};

xlaunch_harness::suite! {
    bad_step_on_one_rank_changes_the_state_of_no_rank;
    needs require_gpu: bad_step_in_a_graph_changes_nothing;
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Enough for the steps to be captured on a GPU.
const GOOD_STEPS: u64 = 4;

/// What trains on one rank.
struct Rank {
    backend: BackendHandle,
    model: Model,
    optimizer: AdamW,
    stepper: Stepper,
    loader: Loader,
    collective: Box<dyn Collective>,
}

fn spec(dir: &Path, sharded: bool, nonfinite: NonFinite) -> JobSpec {
    let text: String = (0..3000).map(|i| char::from(b'a' + (i * i % 23) as u8)).collect();
    std::fs::write(dir.join("text"), text).unwrap();
    let mut spec = JobSpec::default();
    spec.data.train = vec![dir.join("text").display().to_string()];
    (spec.train.batch, spec.train.accumulate, spec.train.nonfinite) = (2, 2, nonfinite);
    spec.comm.shard_optimizer = sharded;
    // Several buckets.
    spec.comm.bucket_mb = 0.02;
    spec
}

impl Rank {
    fn new(backend: BackendHandle, spec: &JobSpec, collective: Box<dyn Collective>) -> Self {
        let shape = ModelShape {
            arch: Arch::Llama,
            layers: 2,
            heads: 2,
            kv_heads: 2,
            dim: 32,
            ffn: 48,
            seq: 40,
            vocab: 256,
            tied: false,
        };
        let (rank, world) = (collective.rank(), collective.world_size());
        let dataset = Dataset::open(spec, &shape).unwrap();
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let weights = init::weights(&Layout::new(&shape), 7, &threads);
        let model = Model::new(&backend, &shape, &weights).unwrap();
        let sharding = sharding(spec, &model.layout, backend.activation_dtype(), rank, world).unwrap();
        let optimizer = AdamW::new(&backend, &model, &weights, &sharding, &spec.train).unwrap();
        let stepper = Stepper::new(&backend, &model, spec, &sharding, world).unwrap();
        let order = Order::new(dataset.train.len(), shape.seq, Some(7));
        let schedule = Schedule { first: 0, rank, world, batch: spec.train.batch, seq: shape.seq };
        let loader = Loader::start(dataset.train.clone(), order, schedule).unwrap();
        Self { backend, model, optimizer, stepper, loader, collective }
    }

    fn start(&mut self, step: u64) -> PendingStep {
        self.optimizer.prepare(step, 1e-3).unwrap();
        let (model, optimizer, loader) = (&self.model, &self.optimizer, &self.loader);
        self.stepper.start(model, optimizer, &mut *self.collective, loader, Requests::default()).unwrap()
    }

    /// Whether loss and gradient norm are finite.
    fn finish(&self, pending: PendingStep) -> bool {
        let result = self.stepper.finish(pending, &*self.collective).unwrap();
        result.loss.is_finite() && result.grad_norm.is_finite()
    }

    /// Sets the first weight of this rank's shard and returns the old value.
    fn set_first_weight(&self, value: f32) -> f32 {
        let weight = self.optimizer.state(&self.model)[0].slice(0..1);
        let mut old = [0.0];
        self.backend.read_f32(weight, &mut old).unwrap();
        self.backend.write_f32(weight, &[value]).unwrap();
        old[0]
    }

    /// Bits of this rank's weights and moments.
    fn state(&self) -> Vec<u32> {
        let read = |tensor: &xlaunch_engine::Tensor| {
            let mut values = vec![0.0; tensor.len()];
            self.backend.read_f32(tensor.all(), &mut values).unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        self.optimizer.state(&self.model).map(read).concat()
    }

    /// Two steps of which the first is bad as one weight of the last rank is `bad`, the second enqueued before the
    /// results of the first are read.
    fn check(mut self, nonfinite: NonFinite, bad: f32) {
        for step in 0..GOOD_STEPS {
            let pending = self.start(step);
            assert!(self.finish(pending));
        }
        let before = self.state();
        let is_last = self.collective.rank() + 1 == self.collective.world_size();
        let weight = is_last.then(|| self.set_first_weight(bad));
        let first = self.start(GOOD_STEPS);
        if let Some(weight) = weight {
            self.set_first_weight(weight);
        }
        let after_bad_step = self.state();
        let second = self.start(GOOD_STEPS + 1);
        assert!(!self.finish(first), "{bad} is noticed");
        assert!(self.finish(second));
        assert!(after_bad_step == before, "the bad step changed the state");
        assert_eq!(self.state() != before, nonfinite == NonFinite::Skip, "the step after it, {nonfinite:?}");
        self.stepper.drop_graphs();
        self.collective.finalize().unwrap();
    }
}

fn bad_step_on_one_rank_changes_the_state_of_no_rank() {
    for world in [1, 2, 4] {
        for sharded in [false, true] {
            for (nonfinite, bad) in [(NonFinite::Stop, f32::NAN), (NonFinite::Skip, 3e38)] {
                let dir = tempfile::tempdir().unwrap();
                let spec = spec(dir.path(), sharded, nonfinite);
                let listeners: Vec<_> =
                    (0..world).map(|rank| RingListener::bind(dir.path(), rank).unwrap()).collect();
                let addresses: Vec<_> =
                    listeners.iter().map(|listener| listener.address().to_owned()).collect();
                std::thread::scope(|scope| {
                    for (rank, listener) in listeners.into_iter().enumerate() {
                        let (spec, addresses) = (&spec, &addresses);
                        scope.spawn(move || {
                            let collective: Box<dyn Collective> = match world {
                                1 => Box::new(Local),
                                _ => Box::new(
                                    Ring::connect(listener, rank, addresses, CONNECT_TIMEOUT).unwrap(),
                                ),
                            };
                            let backend = BackendHandle::new(CpuBackend::new(1, PoolMode::On));
                            Rank::new(backend, spec, collective).check(nonfinite, bad);
                        });
                    }
                });
            }
        }
    }
}

fn bad_step_in_a_graph_changes_nothing() {
    for (nonfinite, bad) in [(NonFinite::Stop, f32::NAN), (NonFinite::Skip, 3e38)] {
        let dir = tempfile::tempdir().unwrap();
        let spec = spec(dir.path(), false, nonfinite);
        let options = CudaOptions::new(Precision::Fp32, PoolMode::Plan);
        let backend = BackendHandle::new(CudaBackend::open(0, options).unwrap());
        Rank::new(backend, &spec, Box::new(Local)).check(nonfinite, bad);
    }
}
