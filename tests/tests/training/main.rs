//! The built-in trainer on CPUs: runs, checkpoints on disk and in memory, its memory pool, benchmarks and traces,
//! TensorBoard.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod chaos;
mod checkpoints;
mod divergence;
mod export;
mod fail_points;
mod memory;
mod pool;
mod runs;
mod tensorboard;

xlaunch_harness::suite! {
    modules bench, chaos, checkpoints, divergence, export, fail_points, memory, pool, runs, tensorboard;
}
