//! The built-in trainer on CPUs: runs, checkpoints on disk and in memory, its memory pool, benchmarks and traces,
//! TensorBoard.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod chaos;
mod checkpoints;
mod divergence;
mod fail_points;
mod generate;
mod memory;
mod pool;
mod runs;
mod tensorboard;

xlaunch_harness::suite! {
    modules bench, chaos, checkpoints, divergence, fail_points, generate, memory, pool, runs, tensorboard;
}
