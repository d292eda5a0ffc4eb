//! `xlaunch bench`: measurements made by workers, started and looked after as those of a job.
//!
//! - [`train`]: what a step of a configuration takes, beside what the device can do;
//! - [`all_reduce`]: sums between ranks by size, in nccl-tests' columns;
//! - [`device`]: what a device can do at best;
//! - [`launches`]: what launching itself costs; [`rendezvous`]: how long many ranks take to meet;
//! - [`queries`]: how many questions a daemon answers;
//! - [`flops`]: how many operations a model asks for; [`kernels`]: a step's kernels by family.
//!
//! Each launch has a run directory in a temporary place, which goes when the launch has gone well.

pub(crate) mod all_reduce;
pub(crate) mod device;
pub(crate) mod flops;
pub(crate) mod kernels;
pub(crate) mod launches;
pub(crate) mod queries;
pub(crate) mod rendezvous;
pub(crate) mod train;

use std::path::Path;

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::Bench;
use xlaunch_proto::v1::bench::Kind;

use xlaunch_agent::devices::Placement;
use xlaunch_agent::driver;
use xlaunch_agent::run_dir::RunDir;
use xlaunch_agent::sinks::RankReport;
use xlaunch_agent::workload::trainer::TrainerPlan;
use xlaunch_agent::{Refusal, report};

/// Runs the workers of one measurement to their end; what they said.
///
/// # Errors
/// A worker that failed, with the agent's report; an interrupt.
pub(crate) async fn launch(spec: &JobSpec, placement: &Placement, kind: Kind) -> Result<Vec<RankReport>, Refusal> {
    let internal = |what: &str, error: std::io::Error| {
        Refusal::new(ExitCode::Internal, format!("failed to {what}: {error}"))
    };
    let dir = scratch().map_err(|error| internal("make a temporary directory", error))?;
    let mut spec = spec.clone();
    spec.job.output = dir.path().display().to_string();
    spec.launch.nproc = Some(placement.workers);
    spec.launch.max_restarts = 0;
    let run = RunDir::create(&spec)?;
    let logs = run.logs.clone();
    let plan = TrainerPlan {
        spec: &spec,
        placement,
        resume_from: None,
        newest_checkpoint: |_: &Path| None,
        bench: Some(Bench { kind: Some(kind) }),
    };
    let (finished, results) =
        driver::run_trainer(plan, run).await.map_err(|error| internal("run the workers", error))?;
    match report::text(&finished.outcome, &finished.evidence, Some(&logs)) {
        None if finished.outcome.exit == ExitCode::Done => Ok(results.reports),
        None => Err(Refusal::new(finished.outcome.exit, "stopped before everything was measured")),
        Some(text) => {
            // The report names the logs.
            let _ = dir.keep();
            Err(Refusal::new(finished.outcome.exit, text.trim_start_matches("xlaunch: ")))
        }
    }
}

/// A temporary directory for what is not to be kept.
fn scratch() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("xlaunch-bench-").tempdir()
}

/// A bench whose workers ended well without saying what they were asked for.
fn silent(what: &str) -> Refusal {
    Refusal::new(ExitCode::Internal, format!("the workers did not report {what}"))
}

/// The value below which this share of the sorted `values` lies, by the nearest rank; 0 of none.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index into a short list"
)]
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((share * last as f64).round() as usize).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_of_the_list() {
        let values: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!([0.05, 0.5, 0.95, 1.0].map(|share| percentile(&values, share)), [5.0, 50.0, 95.0, 100.0]);
        assert_eq!((percentile(&[7.0], 0.95), percentile(&[], 0.5)), (7.0, 0.0));
    }
}
