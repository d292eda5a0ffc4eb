//! Dividing state among the ranks (`comm.shard`) changes only memory use, and no bit of the results, between sharding
//! the optimizer and sharding more. Without sharding, the gradient norm is summed in another order, which can change
//! its last bit. Splitting parameters into several buckets changes nothing either.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;

use common::{Rank, on_ranks_with_shape, shape, spec};
use xlaunch_comm::bucket::Plan;
use xlaunch_engine::{DType, Tensor};
use xlaunch_spec::job::{JobSpec, Optimizer, Owners, Recompute, Shard};
use xlaunch_spec::model::{Arch, ModelShape};
use xlaunch_worker::model::layout::Layout;
use xlaunch_worker::train::{Division, Requests};

const STEPS: u64 = 4;

/// Results of one rank.
#[derive(Debug, Default, PartialEq)]
struct Trained {
    /// Losses, gradient norms and held-out losses, bit by bit.
    results: Vec<[u64; 3]>,
    /// Weights and moments, with their ranges of the arena.
    state: Vec<u32>,
    ranges: Vec<Range<usize>>,
    /// Number of elements of the model's weights and of the reduced buffers.
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
        let val = dataset.held_out().unwrap();
        let held_out = evaluator.evaluate(model, optimizer, &mut **collective, val).unwrap().loss;
        let result = [f64::from(result.loss), f64::from(result.grad_norm), held_out];
        trained.results.push(result.map(f64::to_bits));
    }
    trained.state = rank.state();
    let sharding = rank.optimizer.sharding();
    trained.ranges = sharding.plan().buckets().iter().map(|bucket| sharding.in_arena(bucket)).collect();
    trained
}

/// Trains and returns the results of each of `world` ranks.
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
    // With an odd number of batches, not all ranks have the same number.
    (spec.data.val_fraction, spec.train.eval_batches) = (0.2, 3);
    let (llama, gpt2) = (Arch::Llama, Arch::Gpt2);
    let others = [Arch::Qwen3, Arch::Olmo2, Arch::Gemma2, Arch::Phi, Arch::GptNeoX, Arch::Granite];
    let others = others.map(|arch| (arch, arch.base().tied));
    for (arch, tied) in [(llama, false), (llama, true), (gpt2, true), (gpt2, false)].into_iter().chain(others)
    {
        for (world, bucket_mb, overlap, recompute) in [
            (2, 0.002, true, Recompute::None),
            (4, 0.02, true, Recompute::Block),
            (2, 0.005, false, Recompute::Cheap),
            (2, 25.0, true, Recompute::None),
            (3, 0.005, true, Recompute::None),
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
                    assert!((divided - whole).abs() < 5e-5 * whole, "{case}, rank {rank}: {divided} {whole}");
                }
                if bucket_mb < 1.0 {
                    let elements = [&optimizer, &gradients, &parameters].map(|found| found[rank].elements);
                    assert!(elements.is_sorted_by(|more, less| more > less), "{case}: {elements:?}");
                }
            }
        }
    }
}

/// Gradients in slots are reduced in every micro-step, so sums have another order.
#[test]
fn micro_steps_of_divided_gradients_add_up_to_those_of_whole_ones() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    spec.train.accumulate = 3;
    for (world, arch, tied) in [(2, Arch::Llama, true), (3, Arch::Gpt2, false), (5, Arch::Qwen3, true)] {
        let shape = shape(arch, 4, tied);
        for bucket_mb in [0.005, 25.0] {
            let [none, gradients, parameters] =
                [Shard::None, Shard::Gradients, Shard::Parameters].map(|shard| {
                    (spec.comm.shard, spec.comm.bucket_mb) = (shard, bucket_mb);
                    run(&shape, &spec, dir.path(), world)
                });
            let case = format!("{arch:?} on {world} ranks, buckets of {bucket_mb} MiB");
            for (gradients, parameters) in gradients.iter().zip(&parameters) {
                assert!(
                    gradients.results == parameters.results && gradients.state == parameters.state,
                    "{case}"
                );
            }
            for (divided, whole) in losses(&gradients).iter().flatten().zip(losses(&none).iter().flatten()) {
                assert!((divided - whole).abs() < 1e-6 * whole, "{case}: {divided} {whole}");
            }
        }
    }
}

/// Assembles the arenas of weights and moments from the parts of all ranks.
fn arenas(ranks: &[Trained]) -> Vec<u32> {
    let len = ranks.iter().flat_map(|rank| &rank.ranges).map(|range| range.end).max().unwrap();
    let mut arenas = vec![0; 3 * len];
    for Trained { state, ranges, .. } in ranks {
        for (own, arena) in state.chunks_exact(state.len() / 3).zip(arenas.chunks_exact_mut(len)) {
            let mut at = 0;
            for range in ranges {
                arena[range.clone()].copy_from_slice(&own[at..at + range.len()]);
                at += range.len();
            }
        }
    }
    arenas
}

fn plan(spec: &JobSpec, shape: &ModelShape) -> Plan {
    let division = Division::new(spec, &Layout::new(shape), DType::F32, 0, 1, Shard::None);
    division.sharding.plan().clone()
}

/// Returns losses and held-out losses, whose bits do not depend on the order in which the gradient norm is summed.
fn losses(ranks: &[Trained]) -> Vec<[f64; 2]> {
    let [first, others @ ..] = ranks else { panic!("no ranks") };
    assert!(others.iter().all(|rank| rank.results == first.results));
    first.results.iter().map(|[loss, _, held_out]| [*loss, *held_out].map(f64::from_bits)).collect()
}

#[test]
fn parameters_in_several_buckets_train_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    // No clipping: it would depend on the order in which the gradient norm is summed.
    (spec.train.accumulate, spec.train.clip) = (1, 0.0);
    (spec.data.val_fraction, spec.train.eval_batches) = (0.2, 2);
    for (arch, tied) in [(Arch::Llama, false), (Arch::Gpt2, true), (Arch::Gemma3, true), (Arch::Phi, false)] {
        // Matrices that are cut and followed by a gap.
        let shape = ModelShape { ffn: 50, ..shape(arch, 3, tied) };
        let layout = Layout::new(&shape);
        for world in [2, 4] {
            let mut run = |bucket_mb, shard| {
                (spec.comm.bucket_mb, spec.comm.shard) = (bucket_mb, shard);
                let trained = run(&shape, &spec, dir.path(), world);
                (losses(&trained), arenas(&trained), plan(&spec, &shape))
            };
            let (whole_losses, whole_state, whole) = run(25.0, Shard::None);
            let is_cut = |plan: &Plan, range: &Range<usize>| {
                plan.buckets().iter().any(|bucket| range.start < bucket.end && bucket.end < range.end)
            };
            assert!(layout.params.iter().all(|param| !is_cut(&whole, &param.range)));
            for bucket_mb in [0.002, 0.005] {
                let (cut_losses, cut_state, cut) = run(bucket_mb, Shard::None);
                let block = &layout.blocks[1];
                let cuts = [&layout.wte, &layout.head, &block.qkv.weight, &block.out.weight];
                assert!(layout.gaps().iter().any(|gap| gap.start == block.out.weight.end));
                assert!(cuts.into_iter().all(|param| is_cut(&cut, param)), "{cut:?}");
                let case = format!("{arch:?} on {world} ranks, buckets of {bucket_mb} MiB");
                for shard in [Shard::Optimizer, Shard::Gradients, Shard::Parameters] {
                    let (losses, state, _) = run(bucket_mb, shard);
                    assert_eq!(losses, cut_losses, "{case}, {shard:?}");
                    assert!(state == cut_state, "{case}, {shard:?}");
                }
                if world == 2 {
                    // A sum of two gradients has only one order.
                    assert_eq!(cut_losses, whole_losses, "{case}");
                    assert!(cut_state == whole_state, "{case}");
                }
                for (cut, whole) in cut_losses.iter().flatten().zip(whole_losses.iter().flatten()) {
                    assert!((cut - whole).abs() < 5e-5 * whole, "{case}: {cut} {whole}");
                }
            }
        }
    }
}

/// A matrix goes through the same operations, whichever ranks make it orthogonal and whichever elements they update.
#[test]
fn muon_trains_with_the_same_bits_for_any_division() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path(), false);
    // No clipping: it would depend on the order in which the gradient norm is summed.
    (spec.train.accumulate, spec.train.clip) = (1, 0.0);
    (spec.data.val_fraction, spec.train.eval_batches) = (0.2, 2);
    for (arch, tied, normuon) in [(Arch::Llama, false, true), (Arch::Gpt2, true, false)] {
        let shape = shape(arch, 3, tied);
        let mut run = |world, bucket_mb, optimizer, shard, owners| {
            (spec.comm.bucket_mb, spec.comm.shard, spec.train.optimizer) = (bucket_mb, shard, optimizer);
            (spec.muon.owners, spec.muon.normuon) = (owners, normuon);
            let trained = run(&shape, &spec, dir.path(), world);
            (losses(&trained), arenas(&trained))
        };
        for (world, bucket_mb) in [(2, 25.0), (2, 0.002), (3, 0.005), (4, 0.002)] {
            let case = format!("{arch:?} on {world} ranks, buckets of {bucket_mb} MiB");
            let whole = run(world, bucket_mb, Optimizer::Muon, Shard::None, Owners::Never);
            // Unequal shards of three ranks are not the parts in which an all-reduce adds gradients.
            let sharded = run(world, bucket_mb, Optimizer::Muon, Shard::Optimizer, Owners::Never);
            assert!(world == 3 || sharded == whole, "{case}");
            for shard in [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Parameters] {
                for owners in [Owners::Always, Owners::Never] {
                    let found = run(world, bucket_mb, Optimizer::Muon, shard, owners);
                    let expected = if shard == Shard::None { &whole } else { &sharded };
                    assert!(found == *expected, "{case}, {shard:?}, {owners:?}");
                }
            }
            let adamw = run(world, bucket_mb, Optimizer::AdamW, Shard::None, Owners::Auto);
            assert_eq!(adamw.0[0][0], whole.0[0][0], "{case}: the first loss");
            assert_ne!(adamw.0[1], whole.0[1], "{case}");
        }
    }
}
