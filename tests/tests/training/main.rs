//! The built-in trainer on CPUs: data, runs, checkpoints on disk and in memory, its memory pool, benchmarks and traces,
//! TensorBoard.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod chaos;
mod checkpoints;
mod data;
mod divergence;
mod fail_points;
mod memory;
mod pool;
mod runs;
mod tensorboard;

xlaunch_harness::suite! {
    modules bench, chaos, checkpoints, data, divergence, fail_points, memory, pool, runs, tensorboard;
}
