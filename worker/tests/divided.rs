//! What is divided among the ranks (`comm.shard`) changes memory, and nothing else: no bit with the optimizer sharded
//! or more. Without, the gradient norm is summed in another order, which can change its last bit.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;
use std::sync::Mutex;

use common::{Rank, on_ranks_with_shape, shape, spec};
use xlaunch_engine::Tensor;
use xlaunch_proto::model::{Arch, ModelShape};
use xlaunch_proto::spec::{JobSpec, Recompute, Shard};
use xlaunch_worker::train::Requests;

const STEPS: u64 = 4;

/// What one rank has found.
#[derive(Debug, Default, PartialEq)]
struct Trained {
    /// Losses, gradient norms and held-out losses, bit by bit.
    results: Vec<[u64; 3]>,
    state: Vec<u32>,
    /// Elements of the model's weights and of what is reduced.
    elements: usize,
}

fn train(rank: &mut Rank) -> Trained {
    let reduced = rank.stepper.reduce_buffers().map(Tensor::len).sum::<usize>();
    let mut trained = Trained { elements: rank.model.weights.len() + reduced, ..Trained::default() };
    let Rank { model, optimizer, stepper, evaluator, dataset, loader, collective, .. } = rank;
    for step in 0..STEPS {
        optimizer.prepare(step, 1e-2).unwrap();
        let result = stepper.step(model, optimizer, &mut **collective, loader, Requests::default()).unwrap();
        optimizer.gather(model, &mut **collective).unwrap();
        let val = dataset.val.as_ref().unwrap();
        let (held_out, _) = evaluator.evaluate(model, optimizer, &mut **collective, val).unwrap();
        let result = [f64::from(result.loss), f64::from(result.grad_norm), held_out];
        trained.results.push(result.map(f64::to_bits));
    }
    trained.state = rank.state();
    trained
}

/// What each of `world` ranks finds.
fn run(shape: &ModelShape, spec: &JobSpec, dir: &Path, world: usize) -> Vec<Trained> {
    let found = Mutex::new(Vec::new());
    on_ranks_with_shape(shape, spec, dir, world, |mut rank| {
        let trained = train(&mut rank);
        found.lock().unwrap().push((rank.collective.rank(), trained));
        rank.collective.finalize().unwrap();
    });
    let mut found = found.into_inner().unwrap();
    found.sort_by_key(|(rank, _)| *rank);
    found.into_iter().map(|(_, trained)| trained).collect()
}

#[test]
fn division_changes_memory_and_no_bit_of_the_training() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    spec.train.accumulate = 1;
    // An odd number of batches: not all ranks have as many.
    (spec.data.val_fraction, spec.train.eval_batches) = (0.2, 3);
    for (arch, tied) in [(Arch::Llama, false), (Arch::Llama, true), (Arch::Gpt2, true), (Arch::Gpt2, false)] {
        for (world, bucket_mb, overlap, recompute) in [
            (2, 0.002, true, Recompute::None),
            (4, 0.02, true, Recompute::Block),
            (2, 0.005, false, Recompute::Cheap),
            (2, 25.0, true, Recompute::None),
        ] {
            let shape = shape(arch, 6, tied);
            (spec.comm.bucket_mb, spec.comm.overlap, spec.train.recompute) = (bucket_mb, overlap, recompute);
            let [none, optimizer, gradients, parameters] =
                [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Parameters].map(|shard| {
                    spec.comm.shard = shard;
                    run(&shape, &spec, dir.path(), world)
                });
            let case = format!("{arch:?} {tied} on {world}, buckets of {bucket_mb} MiB");
            for rank in 0..world {
                for divided in [&gradients, &parameters] {
                    assert_eq!(divided[rank].results, optimizer[rank].results, "{case}, rank {rank}");
                    assert!(divided[rank].state == optimizer[rank].state, "{case}, rank {rank}");
                }
                let pairs = optimizer[rank].results.iter().zip(&none[rank].results);
                for (divided, whole) in pairs.flat_map(|(divided, whole)| divided.iter().zip(whole)) {
                    let [divided, whole] = [divided, whole].map(|bits| f64::from_bits(*bits));
                    assert!((divided - whole).abs() < 1e-5 * whole, "{case}, rank {rank}: {divided} {whole}");
                }
                if bucket_mb < 1.0 {
                    let elements = [&optimizer, &gradients, &parameters].map(|found| found[rank].elements);
                    assert!(elements.is_sorted_by(|more, less| more > less), "{case}: {elements:?}");
                }
            }
        }
    }
}
