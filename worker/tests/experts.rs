//! Training models with experts on the CPU: the results do not depend on how a global batch is divided among ranks, nor
//! on which activations are recomputed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use common::{Rank, on_ranks_with_shape, shape, spec};
use xlaunch_engine::{Accumulate, Backend, DType, EngineError, PoolMode, Tensor};
use xlaunch_spec::job::{JobSpec, NonFinite, Optimizer, Recompute, Shard};
use xlaunch_spec::model::{Arch, ModelShape, Router};
use xlaunch_worker::checkpoint::Portion;
use xlaunch_worker::model::layout::Layout;
use xlaunch_worker::model::{BackendHandle, GradientArena, LossGradients, Model, Rows, init};
use xlaunch_worker::train::{Requests, StepResult};

const STEPS: u64 = 5;

/// Trains on each of `world` ranks, and returns the results of rank 0 with the bits of its state.
fn train(shape: &ModelShape, spec: &JobSpec, dir: &Path, world: usize) -> (Vec<StepResult>, Vec<u32>) {
    let found = Mutex::new((Vec::new(), Vec::new()));
    on_ranks_with_shape(shape, spec, dir, world, |mut rank| {
        let Rank { model, optimizer, stepper, loader, collective, .. } = &mut rank;
        let step = |step| {
            optimizer.prepare(step, 1e-2).unwrap();
            stepper.step(model, optimizer, &mut **collective, loader, Requests::default()).unwrap()
        };
        let results: Vec<StepResult> = (0..STEPS).map(step).collect();
        if rank.collective.rank() == 0 {
            *found.lock().unwrap() = (results, rank.state());
        }
        rank.collective.finalize().unwrap();
    });
    found.into_inner().unwrap()
}

fn numbers(results: &[StepResult]) -> Vec<[f32; 5]> {
    let numbers = |result: &StepResult| {
        let load = result.experts.as_ref().unwrap();
        [result.loss, result.grad_norm, load.balance, load.busiest, load.entropy]
    };
    results.iter().map(numbers).collect()
}

/// A model whose first block is dense.
fn mixed() -> ModelShape {
    let sizes = shape(Arch::Qwen3Moe, 3, false);
    ModelShape { dense_layers: 1, experts: 5, expert_ffn: 24, router: Router::Sigmoid, ..sizes }
}

/// Returns [`mixed`] with shared experts.
fn shared(shared_gate: bool) -> ModelShape {
    ModelShape { shared_experts: 2, shared_gate, routed_scale: 1.5, ..mixed() }
}

/// Returns [`shared`] without a gate and with biases of routers.
fn biased() -> ModelShape {
    ModelShape { router_bias: true, ..shared(false) }
}

/// A model whose experts and routers have biases, with gates beyond their limit, and with attention sinks.
fn with_layer_biases() -> ModelShape {
    ModelShape { experts: 5, window: 7, glu_limit: 0.4, ..shape(Arch::GptOss, 3, false) }
}

/// Loads and biases of a step.
type Balance = [Vec<f32>; 2];

/// Trains on each of `world` ranks without a loss that balances experts. Returns loads and biases after each step, and
/// the biases in the arena that is saved, put together from all ranks.
fn train_biased(shape: &ModelShape, spec: &JobSpec, dir: &Path, world: usize) -> (Vec<Balance>, Vec<f32>) {
    let layout = Layout::new(shape);
    let found = Mutex::new((Vec::new(), vec![f32::NAN; layout.len]));
    on_ranks_with_shape(shape, spec, dir, world, |mut rank| {
        let read = |backend: &BackendHandle, tensor: &Tensor| {
            let mut values = vec![0.0; tensor.len()];
            backend.read_f32(tensor.all(), &mut values).unwrap();
            values
        };
        let Rank { backend, model, optimizer, stepper, loader, collective, .. } = &mut rank;
        let routing = model.routing.as_ref().unwrap();
        let step = |step| {
            optimizer.prepare(step, 1e-2).unwrap();
            stepper.step(model, optimizer, &mut **collective, loader, Requests::default()).unwrap();
            [&routing.loads, routing.biases().unwrap()].map(|tensor| read(backend, tensor))
        };
        let balances: Vec<Balance> = (0..STEPS).map(step).collect();
        // As after a start from snapshots.
        let biases = routing.biases().unwrap();
        backend.zero(biases.all()).unwrap();
        optimizer.gather_router_biases(model, &mut **collective).unwrap();
        assert_eq!(read(backend, biases), balances.last().unwrap()[1]);
        let number = collective.rank();
        let portion = Portion::new(&model.layout, optimizer.sharding(), number, world);
        let masters = read(backend, optimizer.state(model)[0]);
        let mut found = found.lock().unwrap();
        for owned in portion.ranges() {
            found.1[owned.arena.clone()].copy_from_slice(&masters[owned.stored.clone()]);
        }
        if number == 0 {
            found.0 = balances;
        }
        drop(found);
        rank.collective.finalize().unwrap();
    });
    let (balances, saved) = found.into_inner().unwrap();
    let saved = layout.router_biases().flat_map(|range| saved[range.clone()].to_vec()).collect();
    (balances, saved)
}

#[test]
fn biases_follow_the_loads_of_the_global_batch_and_are_saved() {
    const RATE: f32 = 0.02;
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    (spec.train.router_aux_loss_coef, spec.train.router_bias_rate) = (0.0, f64::from(RATE));
    spec.comm.bucket_mb = 0.002;
    let shape = biased();
    let mut run = |ranks: usize, accumulate, shard| {
        (spec.train.batch, spec.train.accumulate) = (8 / ranks / accumulate, accumulate);
        spec.comm.shard = shard;
        train_biased(&shape, &spec, dir.path(), ranks)
    };
    let (whole, saved) = run(1, 1, Shard::None);
    let mut biases = vec![0.0; 2 * shape.experts];
    for [loads, after] in &whole {
        for (biases, loads) in biases.chunks_mut(shape.experts).zip(loads.chunks(shape.experts)) {
            let mean = loads.iter().sum::<f32>() / shape.experts as f32;
            biases.iter_mut().zip(loads).filter(|(_, load)| **load != mean).for_each(|(bias, load)| {
                *bias += RATE * (mean - load).signum();
            });
        }
        assert_eq!(after, &biases);
    }
    assert_eq!(saved, biases);
    let bits = |balances: &[Balance]| -> Vec<u32> {
        balances.iter().flat_map(|[_, biases]| biases.iter().map(|bias| bias.to_bits())).collect()
    };
    for (ranks, accumulate, shard) in [
        (1, 4, Shard::None),
        (2, 1, Shard::None),
        (2, 2, Shard::Optimizer),
        (4, 1, Shard::Gradients),
        (4, 2, Shard::Parameters),
    ] {
        let (divided, saved) = run(ranks, accumulate, shard);
        let case = format!("{ranks} ranks, {accumulate} micro-steps, {shard:?}");
        assert_eq!(bits(&divided), bits(&whole), "{case}");
        assert_eq!(saved, biases, "{case}");
    }
}

#[test]
fn biases_make_the_load_more_even_without_a_loss() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    let shape = biased();
    let mut busiest = |rate| {
        (spec.train.router_aux_loss_coef, spec.train.router_bias_rate) = (0.0, rate);
        numbers(&train(&shape, &spec, dir.path(), 1).0).last().unwrap()[3]
    };
    let (without, with) = (busiest(0.0), busiest(0.01));
    assert!(with < without, "{with} {without}");
}

/// A step whose loss is not finite changes no bias.
#[test]
fn biases_of_a_skipped_step_stay() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    (spec.train.router_bias_rate, spec.train.nonfinite) = (0.02, NonFinite::Skip);
    on_ranks_with_shape(&biased(), &spec, dir.path(), 1, |mut rank| {
        let biases = |rank: &Rank| {
            let biases = rank.model.routing.as_ref().unwrap().biases().unwrap();
            let mut values = vec![0.0; biases.len()];
            rank.backend.read_f32(biases.all(), &mut values).unwrap();
            values
        };
        let pending = rank.start(0);
        assert!(rank.finish(pending));
        let before = biases(&rank);
        assert!(before.iter().any(|bias| *bias != 0.0));
        rank.set_first_weight(f32::NAN);
        let pending = rank.start(1);
        assert!(!rank.finish(pending));
        assert_eq!(biases(&rank), before);
    });
}

/// A pass over fixed tokens.
struct PassOver<'a> {
    backend: &'a BackendHandle,
    model: &'a Model,
    rows: Rows<'static>,
    tokens: Tensor,
    targets: Tensor,
    losses: Tensor,
}

impl<'a> PassOver<'a> {
    fn new(backend: &'a BackendHandle, model: &'a Model) -> Self {
        let rows = Rows::new(2, model.shape.seq);
        let ints = |factor: i32| {
            let values: Vec<i32> =
                (0..).map(|i: i32| (i * factor + i * i) % 256).take(rows.count()).collect();
            let tensor = backend.alloc(DType::I32, values.len()).unwrap();
            backend.write_i32(tensor.all(), &values).unwrap();
            tensor
        };
        let losses = backend.alloc(DType::F32, rows.count()).unwrap();
        Self { backend, model, rows, tokens: ints(7), targets: ints(11), losses }
    }

    fn loss(&self) -> f64 {
        let output = self.model.output(self.rows, self.tokens.all()).unwrap();
        self.model.loss(&output, self.targets.all(), self.losses.all()).unwrap();
        let mut losses = vec![0.0; self.losses.len()];
        self.backend.read_f32(self.losses.all(), &mut losses).unwrap();
        losses.into_iter().map(f64::from).sum()
    }

    fn gradients(&self) -> Vec<f32> {
        let (backend, model) = (self.backend, self.model);
        let (scale, grads) = [1, model.layout.len].map(|len| backend.alloc(DType::F32, len).unwrap()).into();
        backend.write_f32(scale.all(), &[1.0]).unwrap();
        backend.zero(grads.all()).unwrap();
        let arena = GradientArena { tensor: &grads, slots: None };
        let acts = model.forward(self.rows, self.tokens.all()).unwrap();
        let (scale, acc) = (scale.all(), Accumulate::Overwrite);
        let head = LossGradients { scale, grads: arena, acc, weights: None };
        let dy = model.loss_and_gradients(&acts, self.targets.all(), self.losses.all(), head).unwrap();
        let ignore = |_| Ok::<(), EngineError>(());
        model.backward(acts, dy, self.tokens.all(), arena, Accumulate::Overwrite, ignore).unwrap();
        let mut values = vec![0.0; grads.len()];
        backend.read_f32(grads.all(), &mut values).unwrap();
        values
    }
}

/// Moves each parameter of the last block and its norm along a direction that has a part of the gradient and a random
/// one.
#[test]
fn gradients_of_shared_experts_biases_and_sinks_are_slopes_of_the_loss() {
    let backend = BackendHandle::new(Backend::cpu(2, PoolMode::On));
    let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    // The slope changes at a limit of gates.
    let biased = ModelShape { glu_limit: 0.0, ..with_layer_biases() };
    for (shape, counted, expected) in [
        (shared(false), &["shared"][..], 2),
        (shared(true), &["shared"], 3),
        // Those of queries, keys and values, of the projection, of both layers of experts, and of routers; sinks.
        (biased, &[".bias", ".sinks"], 6),
    ] {
        // A token that moved to another expert would change the loss abruptly.
        let shape = ModelShape { experts_per_token: 5, ..shape };
        let layout = Layout::new(&shape);
        let weights: Vec<f32> = init::weights(&layout, 5, &threads).iter().map(|x| 4.0 * x).collect();
        let model = Model::new(&backend, &shape, &weights).unwrap();
        let pass = PassOver::new(&backend, &model);
        let grads = pass.gradients();
        let mut compared = 0;
        for param in layout.params.iter().filter(|param| param.name.starts_with("blocks.2.")) {
            let range = param.stored();
            let gradient = &grads[range.clone()];
            let norm = gradient.iter().map(|x| x * x).sum::<f32>().sqrt();
            let random = (0..range.len()).map(|i| ((i * 7919 + i * i * 31) % 1009) as f32 / 504.0 - 1.0);
            let sizes = (range.len() as f32 / 3.0).sqrt();
            let direction: Vec<f32> =
                gradient.iter().zip(random).map(|(g, random)| g / norm + random / sizes).collect();
            let at = |step: f32| {
                let moved: Vec<f32> =
                    weights[range.clone()].iter().zip(&direction).map(|(w, d)| w + step * d).collect();
                model.write_weights(range.start, &moved).unwrap();
                pass.loss()
            };
            // The loss changes by far more than its rounding, and nearly linearly.
            let step = (0.4 / norm).min(1e-2);
            let slope = (at(step) - at(-step)) / f64::from(2.0 * step);
            model.write_weights(range.start, &weights[range.clone()]).unwrap();
            let by_gradient = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum::<f64>();
            assert!(
                (slope - by_gradient).abs() < 5e-3 * f64::from(norm),
                "{}: {slope} for {by_gradient} of {norm}",
                param.name
            );
            compared += usize::from(counted.iter().any(|part| param.name.contains(part)));
        }
        assert_eq!(compared, expected);
    }
}

#[test]
fn training_does_not_depend_on_the_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    (spec.train.router_aux_loss_coef, spec.train.router_z_loss_coef) = (0.1, 0.01);
    for shape in [shape(Arch::Mixtral, 2, false), mixed(), shared(true), biased(), with_layer_biases()] {
        let mut run = |ranks: usize| {
            spec.train.batch = 4 / ranks;
            numbers(&train(&shape, &spec, dir.path(), ranks).0)
        };
        let whole = run(1);
        assert!(whole.last().unwrap()[0] < whole[0][0], "{whole:?}");
        for ranks in [2, 4] {
            for (step, (whole, divided)) in whole.iter().zip(run(ranks)).enumerate() {
                for (whole, divided) in whole.iter().zip(divided) {
                    let apart = (whole - divided).abs();
                    assert!(
                        apart <= 2e-5 * whole.abs(),
                        "step {step} on {ranks} ranks: {divided} for {whole}"
                    );
                }
            }
        }
    }
}

#[test]
fn recomputing_activations_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    for shape in [shape(Arch::Olmoe, 2, false), mixed(), shared(true), shared(false), with_layer_biases()] {
        let mut run = |recompute| {
            spec.train.recompute = recompute;
            let (results, state) = train(&shape, &spec, dir.path(), 2);
            (numbers(&results), state)
        };
        let whole = run(Recompute::None);
        for recompute in [Recompute::Cheap, Recompute::Block] {
            assert!(run(recompute) == whole, "{recompute:?}");
        }
    }
}

#[test]
fn sharding_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    (spec.train.accumulate, spec.comm.bucket_mb) = (1, 0.005);
    for shape in [shared(true), with_layer_biases()] {
        let mut run = |shard| {
            spec.comm.shard = shard;
            let (results, state) = train(&shape, &spec, dir.path(), 2);
            (numbers(&results), state)
        };
        let whole = run(Shard::Optimizer);
        for shard in [Shard::Gradients, Shard::Parameters] {
            assert!(run(shard) == whole, "{shard:?}");
        }
    }
}

/// The matrix of each expert is made orthogonal on its own, by every rank.
#[test]
fn muon_trains_experts_with_the_same_bits_for_any_division() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    // No clipping: it would depend on the order in which the gradient norm is summed.
    (spec.train.accumulate, spec.train.clip, spec.comm.bucket_mb) = (1, 0.0, 0.005);
    let shape = shared(true);
    let mut losses = |optimizer, shard| {
        (spec.train.optimizer, spec.comm.shard) = (optimizer, shard);
        let results = train(&shape, &spec, dir.path(), 2).0;
        results.iter().map(|result| result.loss.to_bits()).collect::<Vec<_>>()
    };
    let whole = losses(Optimizer::Muon, Shard::None);
    for shard in [Shard::Optimizer, Shard::Gradients, Shard::Parameters] {
        assert_eq!(losses(Optimizer::Muon, shard), whole, "{shard:?}");
    }
    let adamw = losses(Optimizer::AdamW, Shard::None);
    assert!(adamw[0] == whole[0] && adamw[1] != whole[1]);
}

/// Muon leaves the second moments of its elements 0.
#[test]
fn muon_updates_the_matrices_of_all_experts_and_no_router_and_no_vector() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    spec.train.optimizer = Optimizer::Muon;
    for shape in [shared(true), with_layer_biases()] {
        only_matrices_are_muons(&shape, &train(&shape, &spec, dir.path(), 1).1);
    }
}

fn only_matrices_are_muons(shape: &ModelShape, state: &[u32]) {
    let moments = &state[2 * state.len() / 3..];
    for block in Layout::new(shape).blocks {
        let used = |range: &Range<usize>| moments[range.clone()].iter().any(|bits| *bits != 0);
        assert!(!used(&block.fc.weight) && !used(&block.out.weight));
        assert!(block.router.iter().chain(&block.router_logit_bias).chain(&block.sinks).all(used));
        assert!(block.expert_biases.iter().flatten().all(used));
        if let Some(shared) = &block.shared {
            assert!(!used(&shared.fc.weight) && !used(&shared.out.weight));
            assert!(shared.gate.iter().all(used));
        }
    }
}

/// Without the losses of the router, its gradient is that of the weights of the choices alone.
#[test]
fn balance_loss_makes_the_load_more_even() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    let shape = shape(Arch::Mixtral, 2, false);
    let mut last = |balance| {
        (spec.train.router_aux_loss_coef, spec.train.router_z_loss_coef) = (balance, 0.0);
        *numbers(&train(&shape, &spec, dir.path(), 1).0).last().unwrap()
    };
    let ([_, _, without, ..], [_, _, with, ..]) = (last(0.0), last(1.0));
    assert!(with < without, "{with} {without}");
}
