//! Training models with experts on the CPU: the results do not depend on how a global batch is divided among ranks, nor
//! on which activations are recomputed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use common::{Rank, on_ranks_with_shape, shape, spec};
use xlaunch_spec::job::{JobSpec, Optimizer, Recompute, Shard};
use xlaunch_spec::model::{Arch, ModelShape, Router};
use xlaunch_worker::model::layout::Layout;
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
        let load = result.experts.unwrap();
        [result.loss, result.grad_norm, load.balance, load.busiest, load.entropy]
    };
    results.iter().map(numbers).collect()
}

/// A model whose first block is dense.
fn mixed() -> ModelShape {
    let sizes = shape(Arch::Qwen3Moe, 3, false);
    ModelShape { dense_layers: 1, experts: 5, expert_ffn: 24, router: Router::Sigmoid, ..sizes }
}

#[test]
fn training_does_not_depend_on_the_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    (spec.train.router_aux_loss_coef, spec.train.router_z_loss_coef) = (0.1, 0.01);
    for shape in [shape(Arch::Mixtral, 2, false), mixed()] {
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
    for shape in [shape(Arch::Olmoe, 2, false), mixed()] {
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
    let shape = mixed();
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

/// The matrix of each expert is made orthogonal on its own, by every rank.
#[test]
fn muon_trains_experts_with_the_same_bits_for_any_division() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    // No clipping: it would depend on the order in which the gradient norm is summed.
    (spec.train.accumulate, spec.train.clip, spec.comm.bucket_mb) = (1, 0.0, 0.005);
    let shape = mixed();
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
fn muon_updates_the_matrices_of_all_experts_and_no_router() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    spec.train.optimizer = Optimizer::Muon;
    let shape = mixed();
    let (_, state) = train(&shape, &spec, dir.path(), 1);
    let moments = &state[2 * state.len() / 3..];
    for block in Layout::new(&shape).blocks {
        let used = |range: &Range<usize>| moments[range.clone()].iter().any(|bits| *bits != 0);
        assert!(!used(&block.fc.weight) && !used(&block.out.weight));
        assert!(block.router.iter().all(used));
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
