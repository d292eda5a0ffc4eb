//! Training gives the same bits regardless of how memory is allocated and work is launched: with the pool, with a plan,
//! with a driver allocation per buffer, with any initial contents of new buffers, and from captured graphs.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints what it compared"
)]

mod common;

use common::shape;
use xlaunch_comm::Local;
use xlaunch_engine::cuda::default_mempool_high;
use xlaunch_engine::testing::require_gpu;
use xlaunch_engine::{Backend, CudaOptions, PoolMode, PoolOptions, PoolStats, Precision};
use xlaunch_spec::job::{Exec, JobSpec, Shard};
use xlaunch_spec::model::{Arch, ModelShape};
use xlaunch_worker::data::{Dataset, Loader, Order, Schedule};
use xlaunch_worker::model::layout::Layout;
use xlaunch_worker::model::{BackendHandle, Model, init};
use xlaunch_worker::optim::AdamW;
use xlaunch_worker::train::{Division, Evaluator, Requests, Stepper};

xlaunch_harness::suite! {
    pool_modes_and_graphs_train_bit_identically_on_cpu;
    needs require_gpu: pool_modes_and_graphs_train_bit_identically_on_gpu;
}

const STEPS: u64 = 6;

struct Trained {
    /// Bits of losses and gradient norms.
    bits: Vec<(u32, u32)>,
    /// Bits of the loss on held-out data after the last step, evaluated twice.
    evaluated: [u64; 2],
    /// Counters of the pool after each step.
    pool: Vec<PoolStats>,
}

fn train(backend: BackendHandle, arch: Arch, exec: Exec) -> Trained {
    let dir = tempfile::tempdir().unwrap();
    let text: String = (0..3000).map(|i| char::from(b'a' + (i * i % 23) as u8)).collect();
    std::fs::write(dir.path().join("text"), text).unwrap();
    let mut spec = JobSpec::default();
    spec.data.train = vec![dir.path().join("text").display().to_string().into()];
    spec.data.val_fraction = 0.3;
    spec.engine.exec = exec;
    spec.train.batch = 3;
    spec.train.accumulate = 2;
    let (kv_heads, tied) = if arch == Arch::Gpt2 { (4, true) } else { (2, false) };
    let shape = ModelShape { heads: 4, kv_heads, dim: 64, ffn: 96, ..shape(arch, 2, tied) };
    let dataset = Dataset::open(&spec, &shape).unwrap();
    let weights = init::weights(
        &Layout::new(&shape),
        7,
        &rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap(),
    );
    let model = Model::new(&backend, &shape, &weights).unwrap();
    let division = Division::new(&spec, &model.layout, backend.activation_dtype(), 0, 1, Shard::None);
    let optimizer = AdamW::new(&backend, &model, &weights, &division.sharding, &spec).unwrap();
    let stepper = Stepper::new(&backend, &model, &spec, &division, 1, None).unwrap();
    let evaluator = Evaluator::new(&backend, &model, &spec, &division, None).unwrap();
    let tokens = dataset.train.sources()[0].tokens.clone();
    let order = Order::new(tokens.len(), shape.seq, Some(7));
    let schedule = Schedule { first: 0, rank: 0, world: 1, batch: 3, accumulate: 2, seq: shape.seq };
    let loader = Loader::start((tokens, order).into(), schedule).unwrap();
    let mut trained = Trained { bits: Vec::new(), evaluated: [0; 2], pool: Vec::new() };
    for step in 0..STEPS {
        optimizer.prepare(step, 1e-3).unwrap();
        let result = stepper.step(&model, &optimizer, &mut Local, &loader, Requests::default()).unwrap();
        trained.bits.push((result.loss.to_bits(), result.grad_norm.to_bits()));
        trained.pool.push(backend.pool().stats());
        backend.pool().finish_planning();
    }
    let val = dataset.held_out().unwrap();
    trained.evaluated =
        [(); 2].map(|()| evaluator.evaluate(&model, &optimizer, &mut Local, val).unwrap().loss.to_bits());
    trained
}

fn options(mode: PoolMode, debug: Option<u8>) -> PoolOptions {
    PoolOptions { mode, debug, ..PoolOptions::default() }
}

/// Compares every mode with `pool = "on"`.
fn compare(name: &str, open: impl Fn(PoolOptions) -> BackendHandle) {
    for arch in [Arch::Gpt2, Arch::Llama] {
        let on = train(open(options(PoolMode::On, None)), arch, Exec::Stream);
        assert!(f32::from_bits(on.bits[5].0) < f32::from_bits(on.bits[0].0), "{name} learns");
        let last = on.pool[5];
        assert_eq!(last.chunks.added, on.pool[1].chunks.added, "{name}: no driver allocation after step 2");
        assert_eq!(last.waits_inserted, 0);

        let plan = train(open(options(PoolMode::Plan, None)), arch, Exec::Stream);
        assert_eq!(plan.bits, on.bits, "{name}, {arch:?}: plan");
        // The third step is the first one with a plan, whose region may be larger than any free block of a small model.
        let (last, third) = (plan.pool[5], plan.pool[2]);
        assert!(last.plan_hits > 50 && last.plan_misses == 0, "{last:?}");
        assert_eq!(last.chunks.added, third.chunks.added, "{name}: no driver allocation under the plan");

        assert_eq!(
            train(open(options(PoolMode::Off, None)), arch, Exec::Stream).bits,
            on.bits,
            "{name}, {arch:?}: off"
        );
        for fill in [0x00, 0xff, 0x7f] {
            let filled = train(open(options(PoolMode::On, Some(fill))), arch, Exec::Stream);
            assert_eq!(filled.bits, on.bits, "{name}, {arch:?}: filled with {fill:#x}");
        }

        let graph = train(open(options(PoolMode::Plan, None)), arch, Exec::Graph);
        assert_eq!(graph.bits, on.bits, "{name}, {arch:?}: graph");
        assert_eq!(graph.evaluated, on.evaluated, "{name}, {arch:?}: evaluation by a graph");
        assert_eq!(graph.evaluated[0], graph.evaluated[1], "{name}, {arch:?}: the same loss again");
        // A replayed step requests no buffers. On the CPU there are no graphs.
        let requests = graph.pool[5].plan_hits - graph.pool[4].plan_hits;
        assert_eq!(requests == 0, name != "CPU", "{name}: {requests} requests in a replayed step");
        println!(
            "{name}, {arch:?}: {STEPS} identical losses and norms with pool on, plan, off, three fills, and graphs"
        );
    }
}

fn pool_modes_and_graphs_train_bit_identically_on_cpu() {
    compare("CPU", |options| BackendHandle::new(Backend::cpu(2, options)));
}

fn pool_modes_and_graphs_train_bit_identically_on_gpu() {
    drop(Backend::cuda(0, CudaOptions::new(Precision::Bf16, PoolMode::On)).unwrap());
    let high = default_mempool_high(0).unwrap();
    for precision in [Precision::Fp32, Precision::Bf16] {
        compare(&format!("{precision:?}"), |options| {
            let options = CudaOptions { deterministic: true, ..CudaOptions::new(precision, options) };
            BackendHandle::new(Backend::cuda(0, options).unwrap())
        });
    }
    assert_eq!(default_mempool_high(0).unwrap(), high, "no allocation bypassed the pool");
    println!("high-water mark of the driver's default memory pool: {high} bytes, before and after");
}
