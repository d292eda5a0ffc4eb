//! The built-in trainer on CPUs: runs, checkpoints on disk and in memory, its memory pool, benchmarks and traces,
//! reports, TensorBoard.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod chaos;
mod checkpoints;
mod divergence;
mod fail_points;
mod memory;
mod pool;
mod report;
mod runs;
mod tensorboard;

xlaunch_harness::suite! {
    modules bench, chaos, checkpoints, divergence, fail_points, memory, pool, report, runs, tensorboard;
}
