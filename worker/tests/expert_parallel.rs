//! Dividing experts among ranks (`comm.experts`) changes where experts are computed, and results only by the order in
//! which sums are rounded.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use common::{Rank, on_ranks_with_shape, shape, spec};
use xlaunch_engine::Tensor;
use xlaunch_spec::job::{JobSpec, Optimizer, Precision, Recompute, Shard};
use xlaunch_spec::model::{Arch, ModelShape, Router};
use xlaunch_worker::checkpoint::Portion;
use xlaunch_worker::model::layout::Layout;
use xlaunch_worker::train::{Requests, compare_replicas, max_difference_to_rank_0};

const RANKS: usize = 4;

/// Results of all ranks.
#[derive(Debug, Default)]
struct Trained {
    /// Values of each step: loss, gradient norm, balance loss, busiest share, entropy, held-out loss.
    numbers: Vec<[f64; 6]>,
    /// Weights and moments of the whole model, put together from the portions that ranks save.
    state: [Vec<f32>; 3],
    /// Elements of weights and moments on the rank that has the most.
    elements: usize,
}

fn read(rank: &Rank, tensor: &Tensor, range: Range<usize>) -> Vec<f32> {
    let mut values = vec![0.0; range.len()];
    rank.backend.read_f32(tensor.slice(range), &mut values).unwrap();
    values
}

/// Trains `steps` steps on four ranks, after `prepare`.
fn train(
    shape: &ModelShape,
    spec: &JobSpec,
    dir: &Path,
    steps: u64,
    prepare: impl Fn(&Rank) + Sync,
) -> Trained {
    let whole = Layout::new(shape).len;
    let found = Mutex::new(Trained { state: [(); 3].map(|()| vec![f32::NAN; whole]), ..Trained::default() });
    on_ranks_with_shape(shape, spec, dir, RANKS, |mut rank| {
        prepare(&rank);
        let mut numbers = Vec::new();
        for step in 0..steps {
            let Rank { model, optimizer, stepper, evaluator, dataset, loader, collective, .. } = &mut rank;
            optimizer.prepare(step, 2e-3).unwrap();
            let result =
                stepper.step(model, optimizer, &mut **collective, loader, Requests::default()).unwrap();
            optimizer.gather(model, &mut **collective).unwrap();
            let val = dataset.held_out().unwrap();
            let held_out = evaluator.evaluate(model, optimizer, &mut **collective, val).unwrap().loss;
            let load = result.experts.unwrap();
            let others = [result.grad_norm, load.balance, load.busiest, load.entropy].map(f64::from);
            let [norm, balance, busiest, entropy] = others;
            numbers.push([f64::from(result.loss), norm, balance, busiest, entropy, held_out]);
        }
        let Rank { backend, model, optimizer, collective, .. } = &mut rank;
        compare_replicas(backend, model, optimizer, &mut **collective, steps).unwrap();
        let (sharding, replica) = (optimizer.sharding(), optimizer.replica(model));
        let apart = max_difference_to_rank_0(backend, sharding, replica, &mut **collective).unwrap();
        assert_eq!(apart, 0.0);
        let number = rank.collective.rank();
        let portion = Portion::new(&rank.model.layout, rank.optimizer.sharding(), number, RANKS);
        let arenas = rank.optimizer.state(&rank.model);
        {
            let mut found = found.lock().unwrap();
            for (tensor, state) in arenas.into_iter().zip(&mut found.state) {
                for owned in portion.ranges() {
                    state[owned.arena.clone()].copy_from_slice(&read(&rank, tensor, owned.stored.clone()));
                }
            }
            let elements = arenas.iter().map(|tensor| tensor.len()).sum();
            found.elements = found.elements.max(elements);
            if number == 0 {
                found.numbers = numbers;
            }
        }
        rank.collective.finalize().unwrap();
    });
    found.into_inner().unwrap()
}

/// Returns the largest difference of stored parameters, relative to the largest value.
fn distance(shape: &ModelShape, a: &[f32], b: &[f32]) -> f32 {
    let layout = Layout::new(shape);
    let stored = || layout.params.iter().flat_map(|param| param.stored());
    let largest = stored().map(|i| a[i].abs()).fold(0.0, f32::max);
    assert!(stored().all(|i| a[i].is_finite() && b[i].is_finite()), "every element is on some rank");
    stored().map(|i| (a[i] - b[i]).abs()).fold(0.0, f32::max) / largest
}

fn close(found: &Trained, expected: &Trained, tolerances: [f64; 6], case: &str) {
    for (step, (found, expected)) in found.numbers.iter().zip(&expected.numbers).enumerate() {
        for (index, tolerance) in tolerances.into_iter().enumerate() {
            let (found, expected) = (found[index], expected[index]);
            assert!(
                (found - expected).abs() <= tolerance * expected.abs(),
                "{case}: number {index} of step {step}: {found} instead of {expected}"
            );
        }
    }
}

/// A model whose first block is dense, and whose others have shared experts.
fn mixed() -> ModelShape {
    let sizes = ModelShape { expert_ffn: 24, shared_experts: 2, ..shape(Arch::Qwen3Moe, 3, false) };
    ModelShape { dense_layers: 1, experts: 8, experts_per_token: 3, router: Router::Sigmoid, ..sizes }
}

/// A model whose experts and routers have biases, with attention sinks.
fn with_biases() -> ModelShape {
    let sizes = ModelShape { experts: 8, experts_per_token: 3, ..shape(Arch::GptOss, 3, false) };
    ModelShape { window: 7, dense_layers: 1, expert_ffn: 24, glu_limit: 0.4, ..sizes }
}

fn job(dir: &Path) -> JobSpec {
    let mut spec = spec(dir, false);
    (spec.train.router_aux_loss_coef, spec.train.router_z_loss_coef) = (0.1, 0.01);
    (spec.data.val_fraction, spec.train.eval_batches) = (0.2, 3);
    // The clip is in effect.
    (spec.comm.bucket_mb, spec.train.clip) = (0.005, 0.5);
    spec
}

#[test]
fn twenty_steps_have_the_same_losses_for_any_division_of_experts() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = job(dir.path());
    for (shape, optimizer) in
        [(mixed(), Optimizer::AdamW), (mixed(), Optimizer::Muon), (with_biases(), Optimizer::AdamW)]
    {
        spec.train.optimizer = optimizer;
        // Orthogonal updates enlarge differences of rounding, which change choices of experts if steps are large.
        (spec.muon.normuon, spec.muon.lr) = (true, 0.1 * spec.train.lr);
        let mut run = |experts, shard| {
            (spec.comm.experts, spec.comm.shard) = (experts, shard);
            train(&shape, &spec, dir.path(), 20, |_| {})
        };
        let whole = run(1, Shard::None);
        assert!(whole.numbers[19][0] < whole.numbers[0][0], "{:?}", whole.numbers);
        for (experts, shard) in
            [(2, Shard::None), (2, Shard::Optimizer), (4, Shard::None), (4, Shard::Optimizer)]
        {
            let case = format!("{optimizer:?} with {experts} ranks in a group, {shard:?}");
            let divided = run(experts, shard);
            close(&divided, &whole, [1e-6, 2e-5, 1e-5, 0.0, 1e-6, 1e-6], &case);
            for (arena, (divided, whole)) in divided.state.iter().zip(&whole.state).enumerate() {
                let distance = distance(&shape, whole, divided);
                assert!(distance < 1e-4, "{case}: arena {arena} is {distance} apart");
            }
            assert!(divided.elements < whole.elements, "{case}");
        }
    }
}

/// Most scales are those of a rank's own rows and weights, so that the rounding depends on the division.
#[test]
fn divided_experts_in_fp8_are_near_those_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = job(dir.path());
    let shape = ModelShape { expert_ffn: 32, ..mixed() };
    let mut run = |precision, experts| {
        (spec.engine.precision, spec.comm.experts) = (precision, experts);
        train(&shape, &spec, dir.path(), 3, |_| {})
    };
    let [plain, whole] = [None, Some(Precision::Fp8)].map(|precision| run(precision, 1));
    assert!((whole.numbers[0][0] - plain.numbers[0][0]).abs() > 1e-6, "nothing was rounded");
    for experts in [2, 4] {
        let divided = run(Some(Precision::Fp8), experts);
        close(&divided, &whole, [1e-3, 2e-2, 5e-2, 5e-2, 5e-2, 1e-3], &format!("{experts} ranks"));
    }
}

#[test]
fn all_tokens_may_choose_the_experts_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = job(dir.path());
    let shape = ModelShape { experts_per_token: 2, expert_ffn: 0, shared_experts: 0, ..mixed() };
    // Of equal logits, the first ones count as the highest.
    let clear_routers = |rank: &Rank| {
        for router in rank.model.layout.blocks.iter().filter_map(|block| block.router.as_ref()) {
            rank.model.write_weights(router.start, &vec![0.0; router.len()]).unwrap();
        }
    };
    let mut run = |experts| {
        spec.comm.experts = experts;
        train(&shape, &spec, dir.path(), 2, clear_routers)
    };
    let whole = run(1);
    assert_eq!(whole.numbers[0][3], 0.5, "two experts have all choices");
    for experts in [2, 4] {
        close(&run(experts), &whole, [1e-6, 1e-5, 1e-5, 0.0, 1e-6, 1e-6], &format!("{experts} ranks"));
    }
}

#[test]
fn recomputation_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = job(dir.path());
    (spec.comm.experts, spec.comm.shard) = (2, Shard::Optimizer);
    let shape = mixed();
    let mut run = |recompute| {
        spec.train.recompute = recompute;
        let trained = train(&shape, &spec, dir.path(), 3, |_| {});
        (
            trained.numbers,
            trained.state.map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>()),
        )
    };
    let whole = run(Recompute::None);
    for recompute in [Recompute::Cheap, Recompute::Block] {
        assert!(run(recompute) == whole, "{recompute:?}");
    }
}

/// Flips a bit of a weight, and returns the ranks that are said to differ.
fn differing(experts_matrix: bool, flipped: usize) -> Vec<u32> {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = job(dir.path());
    spec.comm.experts = 2;
    let found = Mutex::new(Vec::new());
    on_ranks_with_shape(&mixed(), &spec, dir.path(), RANKS, |mut rank| {
        let block = &rank.model.layout.blocks[2];
        let at = if experts_matrix { block.fc.weight.start } else { block.qkv.weight.start };
        if rank.collective.rank() == flipped {
            rank.backend.write_f32(rank.model.weights.slice(at..at + 1), &[9.0]).unwrap();
        }
        let Rank { backend, model, optimizer, collective, .. } = &mut rank;
        let error = compare_replicas(backend, model, optimizer, &mut **collective, 1).unwrap_err();
        *found.lock().unwrap() = error.differing_ranks();
        rank.collective.finalize().unwrap();
    });
    found.into_inner().unwrap()
}

#[test]
fn damaged_replicas_are_told_apart_from_experts_of_other_ranks() {
    assert_eq!(differing(false, 3), [3]);
    // Only ranks 1 and 3 have these experts, so either may be the damaged one.
    assert_eq!(differing(true, 3), [1, 3]);
}
