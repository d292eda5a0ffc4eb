//! Measures the waiting times of 10,000 simulated jobs on 8 GPUs, and the duration of a pass over a queue of 10,000
//! jobs.

use std::process::ExitCode;
use std::time::Duration;

use xlaunch_daemon::state::simulation::{Policy, simulate, time_of_pass};

const JOBS: usize = 10_000;
const SEED: u64 = 1;

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the table is the result")]
fn main() -> ExitCode {
    // cargo's profile for benches is that of tests, which does not optimize the daemon.
    if cfg!(debug_assertions) {
        eprintln!("this build is not optimized: add `--profile release` to cargo's arguments");
        return ExitCode::FAILURE;
    }
    let hours = |time: Duration| time.as_secs_f64() / 3600.0;
    println!(
        "| policy | mean wait | 95th percentile | utilisation | makespan | pass over {JOBS} queued jobs |"
    );
    println!("|---|---|---|---|---|---|");
    for (name, policy) in [("first in, first out", Policy::Fifo), ("fair share, backfill", Policy::FairShare)]
    {
        let results = simulate(JOBS, SEED, policy);
        println!(
            "| {name} | {:.2} h | {:.2} h | {:.1} % | {:.1} h | {:.1} ms |",
            hours(results.mean_wait),
            hours(results.p95_wait),
            100.0 * results.utilisation,
            hours(results.makespan),
            time_of_pass(JOBS, policy).as_secs_f64() * 1000.0
        );
    }
    ExitCode::SUCCESS
}
