//! The built-in trainer on CPUs: runs, checkpoints on disk and in memory, its memory pool, benchmarks and traces,
//! TensorBoard.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod checkpoints;
mod divergence;
mod memory;
mod pool;
mod runs;
mod tensorboard;

xlaunch_harness::suite! {
    modules bench, checkpoints, divergence, memory, pool, runs, tensorboard;
}
