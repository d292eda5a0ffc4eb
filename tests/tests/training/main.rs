//! The built-in trainer on CPUs: runs, prepared data, continued runs, checkpoints on disk and in memory, its memory
//! pool, benchmarks and traces, TensorBoard.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod chaos;
mod checkpoints;
mod continued;
mod divergence;
mod export;
mod fail_points;
mod generate;
mod memory;
mod pool;
mod prepared;
mod runs;
mod tensorboard;

xlaunch_harness::suite! {
    modules bench, chaos, checkpoints, continued, divergence, export, fail_points, generate, memory, pool, prepared,
        runs, tensorboard;
}
