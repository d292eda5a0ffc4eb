//! The measurements of `xlaunch bench`. Those of the trainer run in workers that are launched as in a job.
//!
//! - [`train`]: training steps, relative to the peak rates of the device; [`reports`]: reports of the ranks;
//! - [`all_reduce`]: all-reduce by message size, with the columns of nccl-tests;
//! - [`device`]: peak rates of a device;
//! - [`launches`]: launching itself;
//! - [`kernels`]: the kernels of a step by family; [`clocks`]: the GPUs' clocks during the steps.
//!
//! Run directories are temporary. They are kept only if a launch fails.

pub(crate) mod all_reduce;
pub(crate) mod clocks;
pub(crate) mod device;
pub(crate) mod kernels;
pub(crate) mod launches;
pub(crate) mod reports;
pub(crate) mod train;

use serde::Serialize;
use xlaunch_proto::v1::Bench;
use xlaunch_proto::v1::bench::Kind;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;

use xlaunch_agent::base_environment::BaseEnvironment;
use xlaunch_agent::driver;
use xlaunch_agent::report;
use xlaunch_agent::run_dir::RunDir;
use xlaunch_agent::sinks::RankReport;
use xlaunch_agent::waiting;
use xlaunch_agent::work;
use xlaunch_agent::workload::host_memory::SaveBuffers;
use xlaunch_agent::workload::trainer::{self, CheckpointFiles, TrainerPlan};
use xlaunch_host::devices::Placement;
use xlaunch_host::libraries::Libraries;
use xlaunch_host::signals::Signals;
use xlaunch_spec::lineage::Recovered;
use xlaunch_spec::refusal::Refusal;

/// Ranks of a measurement: processes or threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// One process per rank, as in a job.
    Processes,
    /// One thread per rank in a single process.
    Threads,
}

/// Runs the workers of one measurement and returns their reports.
///
/// # Errors
/// A worker failed (with the agent's failure report), or the user interrupted the launch.
async fn run_workers(
    spec: &JobSpec,
    placement: &Placement,
    mode: Mode,
    kind: Kind,
) -> Result<Vec<RankReport>, Refusal> {
    let internal = |what: &str, error: std::io::Error| {
        Refusal::new(ExitCode::Internal, format!("failed to {what}: {error}"))
    };
    let dir = scratch_dir().map_err(|error| internal("create a temporary directory", error))?;
    let mut spec = spec.clone();
    spec.job.output = dir.path().display().to_string();
    spec.launch.nproc = Some(placement.workers);
    spec.launch.max_restarts = 0;
    let libraries = placement.cuda.then(|| Libraries::find(&|name| std::env::var_os(name)));
    let plan = TrainerPlan {
        base: &BaseEnvironment::Own,
        spec: &spec,
        placement,
        resume_from: None,
        parent: None,
        files: CheckpointFiles {
            recover: |_, _, _, _| Ok(Recovered::default()),
            verify: |_| Ok(()),
            lock: |_, _| Err("a benchmark saves nothing".into()),
        },
        lock: None,
        buffers: SaveBuffers::Copy,
        libraries: libraries.as_ref(),
        bench: Some(Bench { kind: Some(kind) }),
        rank_threads: mode == Mode::Threads,
    };
    let greeting = work::of_trainer(&spec, None, placement.workers, None);
    let signals = Signals::listen(&trainer::STOP_SIGNALS)?;
    let group = waiting::first_attempt(None, greeting, trainer::launch(&spec), |_| {}).await?;
    let run = RunDir::create(&spec, &group.run_id, None)?;
    let logs = run.logs.clone();
    let ended = driver::run_trainer(plan, run, group, signals).await;
    let (mut ending, results) = ended.map_err(|error| internal("run the workers", error))?;
    ending.logs = Some(logs);
    match report::text(&ending) {
        None if ending.exit == ExitCode::Done => Ok(results.reports),
        None => Err(Refusal::new(ending.exit, "stopped before the measurement was complete")),
        Some(text) => {
            // Keep the directory, because the report refers to its logs.
            let _ = dir.keep();
            Err(Refusal::new(ending.exit, text.trim_start_matches("xlaunch: ")))
        }
    }
}

fn scratch_dir() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("xlaunch-bench-").tempdir()
}

/// Returns the error for workers that exit successfully without having reported a result.
fn missing_report(what: &str) -> Refusal {
    Refusal::new(ExitCode::Internal, format!("the workers did not report {what}"))
}

/// Returns a quantile of sorted values, by the nearest-rank method; 0 if there are none.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index into a short list"
)]
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((q * last as f64).round() as usize).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_list() {
        let values: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!([0.05, 0.5, 0.95, 1.0].map(|q| quantile(&values, q)), [5.0, 50.0, 95.0, 100.0]);
        assert_eq!((quantile(&[7.0], 0.95), quantile(&[], 0.5)), (7.0, 0.0));
    }
}
