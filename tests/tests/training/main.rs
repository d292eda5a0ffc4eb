//! The built-in trainer on CPUs: runs and checkpoints, its memory pool, benchmarks and traces, TensorBoard.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod checkpoints;
mod divergence;
mod pool;
mod runs;
mod tensorboard;

xlaunch_harness::suite! {
    modules bench, checkpoints, divergence, pool, runs, tensorboard;
}
