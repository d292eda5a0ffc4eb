//! `xlaunch bench train`: what a step of a configuration takes.
//!
//! ```text
//! launch 1: warm-up, measured steps (, one step with its kernels timed)  -> times, loss, memory, kernels
//! launch 2: the same without the sums between ranks                      -> what the sums cost
//! launch 3: the device, from the cache where it was measured before      -> the ceiling
//! ```
//! Nothing is evaluated, sampled or saved. Step times are rank 0's: all ranks wait for each other in every step.

use std::fmt::Write;
use std::time::Instant;

use serde::Serialize;
use xlaunch_proto::spec::{JobSpec, ObserveSection};
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{StepReport, TrainBench, TrainStarted};

use super::kernels::{self, Kernel};
use super::{device, flops, launch, percentile, silent};
use crate::trainer::Trainer;
use xlaunch_agent::Refusal;
use xlaunch_agent::devices::{self, Placement};
use xlaunch_agent::sinks::progress::count;
use xlaunch_agent::sinks::RankReport;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Steps before the measured ones.
    pub(crate) warmup: u64,
    /// Measured steps.
    pub(crate) steps: u64,
    /// Time the kernels of one more step.
    pub(crate) profile: bool,
}

/// What was found: the fields of the JSON form.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) device: String,
    pub(crate) platform: String,
    pub(crate) ranks: u32,
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
    /// Of a large product in the same precision.
    pub(crate) ceiling_tflops: f64,
    pub(crate) share_of_ceiling: f64,
    /// From the start of the command to the end of the first step.
    pub(crate) first_step_seconds: f64,
    /// Median with the sums less the median without; 0 for one rank. Noise can make it negative.
    pub(crate) exposed_communication_ms: f64,
    pub(crate) step_ms_without_all_reduce: f64,
    /// Mapped by the pool of the rank with the most.
    pub(crate) pool_peak_bytes: u64,
    pub(crate) final_loss: f32,
    /// Of one step of rank 0; asked for with `--profile`.
    pub(crate) kernels: Option<Vec<Kernel>>,
}

/// Measures the job; `began` is when the command did.
///
/// # Errors
/// Data that cannot be read; those of [`launch`].
pub(crate) async fn run(
    spec: JobSpec,
    placement: &Placement,
    extent: Extent,
    began: Instant,
    trainer: Trainer,
) -> Result<Measured, Refusal> {
    let shape = spec
        .model
        .resolve()
        .map_err(|invalid| Refusal::new(xlaunch_proto::exit::ExitCode::Usage, invalid.to_string()))?;
    let spec = measured_job(spec, extent);
    (trainer.preflight)(&spec, "".as_ref())?;
    let profile_step = extent.profile.then_some(extent.warmup + extent.steps);
    let bench = TrainBench { skip_all_reduce: false, profile_step };
    say("training");
    let heard = launch(&spec, placement, Kind::Train(bench)).await?;
    let seconds = step_seconds(&heard, extent);
    let median = percentile(&seconds, 0.5);
    let without = if placement.workers == 1 {
        median
    } else {
        say("training without sums between ranks: replicas drift apart, losses mean nothing");
        let bench = TrainBench { skip_all_reduce: true, profile_step: None };
        percentile(&step_seconds(&launch(&spec, placement, Kind::Train(bench)).await?, extent), 0.5)
    };
    say("the device's ceiling, if it is not known yet");
    let ceiling = device::run(&spec, placement, false).await?;

    let started = started(&heard).ok_or_else(|| silent("the start of training"))?;
    let first = steps(&heard, 0).next();
    let last = steps(&heard, 0).filter(|(_, step)| step.step < extent.end()).last();
    let (Some((first, _)), Some((_, last))) = (first, last) else { return Err(silent("any step")) };
    #[expect(clippy::cast_precision_loss, reason = "tokens of a step")]
    let speed = started.tokens_per_step as f64 / median;
    let flops_per_token = flops::per_token(&shape);
    let flops_per_rank = flops_per_token * speed / f64::from(placement.workers);
    let product = device::product(&ceiling, &started.precision).unwrap_or(f64::INFINITY);
    Ok(Measured {
        device: started.device_name.clone(),
        platform: devices::platform(placement.cuda),
        ranks: placement.workers,
        job: spec.job.name.clone(),
        parameters: started.parameters,
        precision: started.precision.clone(),
        tokens_per_step: started.tokens_per_step,
        warmup: extent.warmup,
        steps: extent.steps,
        step_ms: median * 1e3,
        step_ms_p5: percentile(&seconds, 0.05) * 1e3,
        step_ms_p95: percentile(&seconds, 0.95) * 1e3,
        tokens_per_second: speed,
        flops_per_token,
        tflops_per_rank: flops_per_rank / 1e12,
        ceiling_tflops: product / 1e12,
        share_of_ceiling: flops_per_rank / product,
        first_step_seconds: first.duration_since(began).as_secs_f64(),
        exposed_communication_ms: (median - without) * 1e3,
        step_ms_without_all_reduce: without * 1e3,
        pool_peak_bytes: peak(&heard),
        final_loss: last.loss,
        kernels: extent.profile.then(|| profile(&heard)),
    })
}

impl Extent {
    /// The step behind the last measured one.
    fn end(self) -> u64 {
        self.warmup + self.steps
    }
}

/// The job without anything but its steps.
fn measured_job(mut spec: JobSpec, extent: Extent) -> JobSpec {
    let train = &mut spec.train;
    let rise = train.warmup_steps();
    train.steps = extent.end() + u64::from(extent.profile);
    train.warmup = Some(rise.min(train.steps));
    (train.eval_every, train.sample) = (0, 0);
    spec.checkpoint.resume = "off".into();
    spec.observe = ObserveSection { metrics: false, tensorboard: false, check_replicas: false, trace: 0 };
    spec
}

/// What is being measured, above the progress of its launch.
#[expect(clippy::print_stderr, reason = "results to stdout, everything else to stderr")]
fn say(what: &str) {
    eprintln!("xlaunch: {what}");
}

/// Steps of a rank, and when they were heard of.
fn steps(heard: &[RankReport], rank: u32) -> impl Iterator<Item = (Instant, StepReport)> {
    heard.iter().filter(move |heard| heard.rank == rank).filter_map(|heard| match &heard.report {
        Report::Step(step) => Some((heard.at, *step)),
        _ => None,
    })
}

/// Seconds of the measured steps, sorted.
fn step_seconds(heard: &[RankReport], extent: Extent) -> Vec<f64> {
    let measured = steps(heard, 0).filter(|(_, step)| (extent.warmup..extent.end()).contains(&step.step));
    let mut seconds: Vec<f64> = measured.map(|(_, step)| step.step_seconds).collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}

fn started(heard: &[RankReport]) -> Option<&TrainStarted> {
    heard.iter().find_map(|heard| match &heard.report {
        Report::TrainStarted(started) => Some(started),
        _ => None,
    })
}

/// Most bytes that any rank's pool mapped.
fn peak(heard: &[RankReport]) -> u64 {
    let bytes = heard.iter().filter_map(|heard| match &heard.report {
        Report::Step(step) => Some(step.pool_peak_bytes),
        _ => None,
    });
    bytes.max().unwrap_or(0)
}

fn profile(heard: &[RankReport]) -> Vec<Kernel> {
    let reported = heard.iter().find_map(|heard| match &heard.report {
        Report::Profile(profile) => Some(kernels::grouped(&profile.kernels)),
        _ => None,
    });
    reported.unwrap_or_default()
}

/// The table.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn table(m: &Measured) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<13}{value}");
    };
    line("hardware", format!("{} x {}, {}", m.ranks, m.device, m.platform));
    let parameters = count(m.parameters as f64);
    line(
        "model",
        format!("{}, {parameters} parameters, {}, {} tokens a step", m.job, m.precision, m.tokens_per_step),
    );
    let spread = format!("5 % {:.3}, 95 % {:.3}", m.step_ms_p5, m.step_ms_p95);
    line("step", format!("{:.3} ms, {spread}; {} steps after {}", m.step_ms, m.steps, m.warmup));
    line("speed", format!("{} tok/s", count(m.tokens_per_second)));
    line(
        "arithmetic",
        format!(
            "{:.3} TFLOP/s per rank, {:.1} % of a large product's {:.3}",
            m.tflops_per_rank,
            100.0 * m.share_of_ceiling,
            m.ceiling_tflops
        ),
    );
    line("first step", format!("{:.2} s after the command", m.first_step_seconds));
    let without = format!("a step without sums takes {:.3} ms", m.step_ms_without_all_reduce);
    let exposed = if m.ranks == 1 { "1 rank".into() } else { without };
    line("sums", format!("{:.3} ms exposed; {exposed}", m.exposed_communication_ms));
    line("pool", format!("{:.1} MiB at most", m.pool_peak_bytes as f64 / f64::from(1 << 20)));
    line("loss", format!("{:.4} at step {}", m.final_loss, m.warmup + m.steps));
    m.kernels.as_ref().map_or(out.clone(), |kernels| out + &kernels::table(kernels))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_measured_steps_of_rank_0_count_and_they_are_sorted() {
        let step = |rank, step, step_seconds| RankReport {
            rank,
            at: Instant::now(),
            report: Report::Step(StepReport { step, step_seconds, ..Default::default() }),
        };
        let heard = [
            step(0, 0, 9.0),
            step(0, 1, 3.0),
            step(1, 1, 8.0),
            step(0, 2, 1.0),
            step(0, 3, 2.0),
            step(0, 4, 7.0),
        ];
        let extent = Extent { warmup: 1, steps: 3, profile: true };
        assert_eq!(step_seconds(&heard, extent), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn the_measured_job_is_valid_whatever_the_jobs_length() {
        for warmup in [None, Some(0), Some(900)] {
            let mut spec = JobSpec::default();
            spec.train.warmup = warmup;
            let spec = measured_job(spec, Extent { warmup: 0, steps: 1, profile: false });
            spec.check().unwrap();
            assert_eq!(spec.train.steps, 1);
        }
    }
}
