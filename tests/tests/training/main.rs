//! The built-in trainer on CPUs: data, runs, snapshots in memory, faults, its memory pool, benchmarks and traces,
//! reports, TensorBoard. On emulated GPUs: division among ranks.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod boundaries;
mod chaos;
mod data;
mod directories;
mod divergence;
mod dry_run;
mod early_stopping;
mod export;
mod fail_points;
mod gpus;
mod growth;
mod lora;
mod memory;
mod mixtures;
mod nodes;
mod pool;
mod preferences;
mod prepared;
mod report;
mod runs;
mod tensorboard;

xlaunch_harness::suite! {
    threads_per_core 2;
    modules bench, boundaries, chaos, data, directories, divergence, dry_run, early_stopping, export, fail_points, gpus,
        growth, lora, memory, mixtures, nodes, pool, preferences, prepared, report, runs, tensorboard;
}
