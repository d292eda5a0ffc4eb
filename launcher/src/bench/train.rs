//! `xlaunch bench train`: the steps of a training configuration.
//!
//! ```text
//! launch 1: warm-up, measured steps (, one step with its kernels timed)  -> times, loss, memory, kernels
//! launch 2: the same without all-reduce                                  -> exposed communication
//! launch 3: calibration of the device, if it is not cached               -> peak FLOP/s
//! ```
//! Evaluation, sampling and checkpoints are turned off. Step times are rank 0's: all ranks synchronize in every step.

use std::fmt::Write;
use std::time::Instant;

use serde::Serialize;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::flops;
use xlaunch_proto::spec::{CheckpointSection, JobSpec, ObserveSection};
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{StepReport, TrainBench, TrainStarted};

use super::kernels::{self, Kernel};
use super::{Mode, RankReport, device, missing_report, quantile, run_workers};
use crate::trainer::Trainer;
use xlaunch_agent::Refusal;
use xlaunch_agent::devices::{self, Placement};
use xlaunch_agent::sinks::progress::count;

/// Which steps to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Number of steps before the measured ones.
    pub(crate) warmup: u64,
    /// Number of measured steps.
    pub(crate) steps: u64,
    /// Whether to time the kernels of one more step.
    pub(crate) profile: bool,
}

/// The result, with the field names of its JSON form.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) device: String,
    pub(crate) platform: String,
    pub(crate) ranks: u32,
    pub(crate) mode: Mode,
    pub(crate) job: String,
    pub(crate) parameters: u64,
    pub(crate) precision: String,
    pub(crate) tokens_per_step: u64,
    pub(crate) warmup: u64,
    pub(crate) steps: u64,
    pub(crate) step_ms: f64,
    pub step_ms_p5: f64,
    pub step_ms_p95: f64,
    pub(crate) tokens_per_second: f64,
    /// By [`flops::per_token`].
    pub(crate) flops_per_token: f64,
    pub(crate) tflops_per_rank: f64,
    /// Rate of a large GEMM in the same precision.
    pub(crate) ceiling_tflops: f64,
    pub(crate) share_of_ceiling: f64,
    /// From the start of the command to the end of the first step.
    pub(crate) first_step_seconds: f64,
    /// Median with all-reduce minus the median without; 0 for one rank. Noise can make it negative.
    pub(crate) exposed_communication_ms: f64,
    pub(crate) step_ms_without_all_reduce: f64,
    /// The largest of all ranks' pools.
    pub(crate) pool_peak_bytes: u64,
    pub(crate) final_loss: f32,
    /// Those of one step of rank 0, with `--profile`.
    pub(crate) kernels: Option<Vec<Kernel>>,
}

/// Measures the job. `command_start` is when the user started the command.
///
/// # Errors
/// Data that cannot be read; those of [`run_workers`].
pub(crate) async fn run(
    spec: JobSpec,
    placement: &Placement,
    mode: Mode,
    extent: Extent,
    command_start: Instant,
    trainer: Trainer,
) -> Result<Measured, Refusal> {
    let shape = spec.model.resolve();
    let shape = shape.map_err(|invalid| Refusal::new(ExitCode::Usage, invalid.to_string()))?;
    let spec = measured_job(spec, extent);
    (trainer.preflight)(&spec, "".as_ref(), placement.workers, true)?;
    let profile_step = extent.profile.then_some(extent.end() + 1);
    announce("training");
    let bench = TrainBench { skip_all_reduce: false, profile_step };
    let reports = run_workers(&spec, placement, mode, Kind::Train(bench)).await?;
    let seconds = step_seconds(&reports, extent);
    let median = quantile(&seconds, 0.5);
    let median_without_all_reduce = if placement.workers == 1 {
        median
    } else {
        announce("training without all-reduce: replicas diverge, losses are meaningless");
        let bench = TrainBench { skip_all_reduce: true, profile_step: None };
        let reports = run_workers(&spec, placement, mode, Kind::Train(bench)).await?;
        quantile(&step_seconds(&reports, extent), 0.5)
    };
    announce("calibrating the device, unless it is cached");
    let calibration = device::run(&spec, placement, false).await?;

    let started = started(&reports).ok_or_else(|| missing_report("the start of training"))?;
    let first = steps(&reports, 0).next();
    let last = steps(&reports, 0).filter(|(_, step)| step.step <= extent.end()).last();
    let (Some((first, _)), Some((_, last))) = (first, last) else { return Err(missing_report("any step")) };
    #[expect(clippy::cast_precision_loss, reason = "tokens of a step")]
    let tokens_per_second = started.tokens_per_step as f64 / median;
    let flops_per_token = flops::per_token(&shape);
    let flops_per_rank = flops_per_token * tokens_per_second / f64::from(placement.workers);
    let peak_flops = device::gemm_rate(&calibration, &started.precision).unwrap_or(f64::INFINITY);
    Ok(Measured {
        device: started.device_name.clone(),
        platform: devices::platform(placement.cuda),
        ranks: placement.workers,
        mode,
        job: spec.job.name.clone(),
        parameters: started.parameters,
        precision: started.precision.clone(),
        tokens_per_step: started.tokens_per_step,
        warmup: extent.warmup,
        steps: extent.steps,
        step_ms: median * 1e3,
        step_ms_p5: quantile(&seconds, 0.05) * 1e3,
        step_ms_p95: quantile(&seconds, 0.95) * 1e3,
        tokens_per_second,
        flops_per_token,
        tflops_per_rank: flops_per_rank / 1e12,
        ceiling_tflops: peak_flops / 1e12,
        share_of_ceiling: flops_per_rank / peak_flops,
        first_step_seconds: first.duration_since(command_start).as_secs_f64(),
        exposed_communication_ms: (median - median_without_all_reduce) * 1e3,
        step_ms_without_all_reduce: median_without_all_reduce * 1e3,
        pool_peak_bytes: pool_peak_bytes(&reports),
        final_loss: last.loss,
        kernels: extent.profile.then(|| profile(&reports)),
    })
}

impl Extent {
    /// The last measured step, from 1.
    fn end(self) -> u64 {
        self.warmup + self.steps
    }
}

/// The job with nothing turned on but its training steps.
fn measured_job(mut spec: JobSpec, extent: Extent) -> JobSpec {
    let train = &mut spec.train;
    let lr_warmup = train.warmup_steps();
    train.steps = extent.end() + u64::from(extent.profile);
    train.warmup = Some(lr_warmup.min(train.steps));
    (train.eval_every, train.sample) = (0, 0);
    // Nothing is saved, so another job may use the directory meanwhile.
    spec.checkpoint = CheckpointSection { init: spec.checkpoint.init, ..CheckpointSection::default() };
    spec.observe = ObserveSection { metrics: false, ..ObserveSection::default() };
    spec
}

/// Says what the next launch measures.
#[expect(clippy::print_stderr, reason = "results to stdout, everything else to stderr")]
fn announce(what: &str) {
    eprintln!("xlaunch: {what}");
}

/// Steps of a rank, with the times at which their reports arrived.
fn steps(reports: &[RankReport], rank: u32) -> impl Iterator<Item = (Instant, StepReport)> {
    reports.iter().filter(move |received| received.rank == rank).filter_map(|received| {
        match &received.report {
            Report::Step(step) => Some((received.at, *step)),
            _ => None,
        }
    })
}

/// Seconds of the measured steps, sorted.
fn step_seconds(reports: &[RankReport], extent: Extent) -> Vec<f64> {
    let measured = extent.warmup + 1..=extent.end();
    let measured = steps(reports, 0).filter(|(_, step)| measured.contains(&step.step));
    let mut seconds: Vec<f64> = measured.map(|(_, step)| step.step_seconds).collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}

fn started(reports: &[RankReport]) -> Option<&TrainStarted> {
    reports.iter().find_map(|received| match &received.report {
        Report::TrainStarted(started) => Some(started),
        _ => None,
    })
}

/// The most bytes that any rank's pool has mapped.
fn pool_peak_bytes(reports: &[RankReport]) -> u64 {
    let bytes = reports.iter().filter_map(|received| match &received.report {
        Report::Step(step) => Some(step.pool_peak_bytes),
        _ => None,
    });
    bytes.max().unwrap_or(0)
}

fn profile(reports: &[RankReport]) -> Vec<Kernel> {
    let reported = reports.iter().find_map(|received| match &received.report {
        Report::Profile(profile) => Some(kernels::grouped(&profile.kernels)),
        _ => None,
    });
    reported.unwrap_or_default()
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn table(m: &Measured) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<13}{value}");
    };
    line("hardware", format!("{} x {}, {}", m.ranks, m.device, m.platform));
    let mode = match m.mode {
        Mode::Processes => "a process each",
        Mode::Threads => "threads of one process",
    };
    line("ranks", format!("{}, {mode}", m.ranks));
    let parameters = count(m.parameters as f64);
    line(
        "model",
        format!("{}, {parameters} parameters, {}, {} tokens per step", m.job, m.precision, m.tokens_per_step),
    );
    let spread = format!("5 % {:.3}, 95 % {:.3}", m.step_ms_p5, m.step_ms_p95);
    line("step", format!("{:.3} ms, {spread}; {} steps after {}", m.step_ms, m.steps, m.warmup));
    line("speed", format!("{} tok/s", count(m.tokens_per_second)));
    line(
        "arithmetic",
        format!(
            "{:.3} TFLOP/s per rank, {:.1} % of a large GEMM's {:.3}",
            m.tflops_per_rank,
            100.0 * m.share_of_ceiling,
            m.ceiling_tflops
        ),
    );
    line("first step", format!("{:.2} s after the command", m.first_step_seconds));
    let without = format!("{:.3} ms per step without all-reduce", m.step_ms_without_all_reduce);
    let without = if m.ranks == 1 { "1 rank".into() } else { without };
    line("all-reduce", format!("{:.3} ms exposed; {without}", m.exposed_communication_ms));
    line("pool", format!("{:.1} MiB peak", m.pool_peak_bytes as f64 / f64::from(1 << 20)));
    line("loss", format!("{:.4} at step {}", m.final_loss, m.warmup + m.steps));
    m.kernels.as_ref().map_or(out.clone(), |kernels| out + &kernels::table(kernels))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_seconds_are_the_measured_steps_of_rank_0_sorted() {
        let step = |rank, step, step_seconds| RankReport {
            rank,
            at: Instant::now(),
            report: Report::Step(StepReport { step, step_seconds, ..Default::default() }),
        };
        let reports = [
            step(0, 1, 9.0),
            step(0, 2, 3.0),
            step(1, 2, 8.0),
            step(0, 3, 1.0),
            step(0, 4, 2.0),
            step(0, 5, 7.0),
        ];
        let extent = Extent { warmup: 1, steps: 3, profile: true };
        assert_eq!(step_seconds(&reports, extent), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn measured_job_is_valid_for_any_learning_rate_warmup() {
        for warmup in [None, Some(0), Some(900)] {
            let mut spec = JobSpec::default();
            spec.train.warmup = warmup;
            let spec = measured_job(spec, Extent { warmup: 0, steps: 1, profile: false });
            spec.check().unwrap();
            assert_eq!(spec.train.steps, 1);
        }
    }
}
