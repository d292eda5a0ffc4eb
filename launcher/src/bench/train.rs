//! `xlaunch bench train`: measures the steps of a training configuration.
//!
//! ```text
//! launch 1: warm-up, measured steps (, one step with its kernels timed)  -> times, loss, memory, kernels, clocks
//! launch 2: the same without the exchange of gradients and weights       -> communication
//! launch 3: the same without any all-reduce                              -> waiting
//! launch 4: calibration of the device, if it is not cached               -> peak FLOP/s
//! ```
//! Launches 2 and 3 run only with several ranks. A step takes longer than one rank's own work for two reasons. The
//! first is that ranks wait for the slowest one. Launch 2 still has the small all-reduce of loss and flags, so its
//! steps take as long as those of the slowest rank; in launch 3 each rank takes only the time of its own work. The
//! second is communication that backward and forward do not hide.
//!
//! Evaluation, sampling and checkpoints are turned off. Step times are those of rank 0, as all ranks synchronize in
//! every step. In launch 3 they do not, so its step time is the mean of all ranks' medians.

use std::fmt::Write;
use std::time::Instant;

use serde::Serialize;
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::{StepCommunication, TrainBench};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::flops;
use xlaunch_spec::job::{CheckpointSection, JobSpec, ObserveSection};

use super::clocks::Clocks;
use super::kernels::{self, Kernel};
use super::reports::{Extent, measured_period, pool_peak_bytes, profile, started, step_seconds, steps};
use super::{Mode, RankReport, device, missing_report, quantile, run_workers};
use xlaunch_agent::stderr::print_line;
use xlaunch_host::devices::{self, Placement};
use xlaunch_host::gpu_clocks::ClockSampler;
use xlaunch_spec::quantities::count_text;
use xlaunch_spec::refusal::Refusal;

/// The result. Field names are those of the JSON form.
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
    /// Counted by [`flops::per_token`].
    pub(crate) flops_per_token: f64,
    pub(crate) tflops_per_rank: f64,
    /// Rate of a large GEMM in the same precision.
    pub(crate) ceiling_tflops: f64,
    pub(crate) share_of_ceiling: f64,
    /// Time from the start of the command to the end of the first step.
    pub(crate) first_step_seconds: f64,
    /// Time that a rank waits for the slowest one, averaged over ranks: the step with only the small all-reduce minus
    /// the step without any. 0 for one rank; noise can make it negative.
    pub(crate) waiting_ms: f64,
    /// The full step minus the step with only the small all-reduce. 0 for one rank; noise can make it negative.
    pub(crate) communication_ms: f64,
    /// Step with only the all-reduce of loss and flags: gradients and weights are not exchanged.
    pub(crate) step_ms_small_all_reduce: f64,
    pub(crate) step_ms_without_all_reduce: f64,
    /// `None` on the CPU, and if NVML does not report clocks.
    pub(crate) clocks: Option<Clocks>,
    /// Peak of the largest pool of all ranks.
    pub(crate) pool_peak_bytes: u64,
    pub(crate) final_loss: f32,
    /// Kernels of one step of rank 0, with `--profile`.
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
) -> Result<Measured, Refusal> {
    let shape = spec.model.resolve();
    let shape = shape.map_err(|invalid| Refusal::new(ExitCode::Usage, invalid.to_string()))?;
    let spec = measured_job(spec, extent);
    xlaunch_worker::preflight(&spec, "".as_ref(), placement.workers)?;
    let profile_step = extent.profile.then_some(extent.end() + 1);
    announce("training");
    let sampler = ClockSampler::start(devices::worker_gpu_addresses(placement));
    let launch = Launch { spec: &spec, placement, mode };
    let reports = launch.run(StepCommunication::Full, profile_step).await?;
    let samples = sampler.map_or_else(Vec::new, ClockSampler::finish);
    let seconds = step_seconds(&reports, 0, extent);
    let median = quantile(&seconds, 0.5);
    let (with_small_all_reduce, without_all_reduce) = match placement.workers {
        1 => (median, median),
        ranks => launch.less_communication(ranks, extent).await?,
    };
    announce("calibrating the device, unless it is cached");
    let calibration = device::run(&spec, placement, false).await?;

    let started = started(&reports).ok_or_else(|| missing_report("the start of training"))?;
    let first = steps(&reports, 0).next();
    let last = steps(&reports, 0).filter(|(_, step)| step.step <= extent.end()).last();
    let (Some((first, _)), Some((_, last))) = (first, last) else { return Err(missing_report("any step")) };
    #[expect(clippy::cast_precision_loss, reason = "tokens of a step")]
    let tokens_per_second = started.tokens_per_step as f64 / median;
    let flops_per_token = flops::per_token_of_job(&spec.lora, &shape);
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
        waiting_ms: (with_small_all_reduce - without_all_reduce) * 1e3,
        communication_ms: (median - with_small_all_reduce) * 1e3,
        step_ms_small_all_reduce: with_small_all_reduce * 1e3,
        step_ms_without_all_reduce: without_all_reduce * 1e3,
        clocks: measured_period(&reports, extent).and_then(|period| Clocks::during(&period, &samples)),
        pool_peak_bytes: pool_peak_bytes(&reports),
        final_loss: last.loss,
        kernels: extent.profile.then(|| profile(&reports)),
    })
}

/// The job that is launched several times with different settings.
struct Launch<'a> {
    spec: &'a JobSpec,
    placement: &'a Placement,
    mode: Mode,
}

impl Launch<'_> {
    async fn run(
        &self,
        communication: StepCommunication,
        profile_step: Option<u64>,
    ) -> Result<Vec<RankReport>, Refusal> {
        let bench = TrainBench { profile_step, communication: communication.into() };
        run_workers(self.spec, self.placement, self.mode, Kind::Train(bench)).await
    }

    /// Returns the seconds of a step with only the small all-reduce, and of a rank's step without any.
    async fn less_communication(&self, ranks: u32, extent: Extent) -> Result<(f64, f64), Refusal> {
        announce(
            "training with only the all-reduce of loss and flags: replicas diverge, losses are meaningless",
        );
        let reports = self.run(StepCommunication::SmallAllReduce, None).await?;
        let with_small_all_reduce = quantile(&step_seconds(&reports, 0, extent), 0.5);
        announce("training without all-reduce");
        let reports = self.run(StepCommunication::None, None).await?;
        let medians = (0..ranks).map(|rank| quantile(&step_seconds(&reports, rank, extent), 0.5));
        Ok((with_small_all_reduce, medians.sum::<f64>() / f64::from(ranks)))
    }
}

/// Returns the job with everything but its training steps turned off.
fn measured_job(mut spec: JobSpec, extent: Extent) -> JobSpec {
    let train = &mut spec.train;
    let lr_warmup = train.warmup_steps();
    (train.steps, train.epochs) = (extent.end() + u64::from(extent.profile), None);
    train.warmup = Some(lr_warmup.min(train.steps));
    (train.eval_every, train.patience, train.sample) = (0, 0, 0);
    // Nothing is saved, so another job may use the checkpoint directory at the same time.
    spec.checkpoint = CheckpointSection { init: spec.checkpoint.init, ..CheckpointSection::default() };
    spec.observe = ObserveSection { metrics: false, ..ObserveSection::default() };
    spec
}

/// Prints what the next launch measures.
fn announce(what: &str) {
    print_line(format_args!("xlaunch: {what}"));
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn table(m: &Measured) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<15}{value}");
    };
    line("hardware", format!("{} x {}, {}", m.ranks, m.device, m.platform));
    let mode = match m.mode {
        Mode::Processes => "one process per rank",
        Mode::Threads => "threads of one process",
    };
    line("ranks", format!("{}, {mode}", m.ranks));
    let parameters = count_text(m.parameters as f64);
    line(
        "model",
        format!("{}, {parameters} parameters, {}, {} tokens per step", m.job, m.precision, m.tokens_per_step),
    );
    let spread = format!("5 % {:.3}, 95 % {:.3}", m.step_ms_p5, m.step_ms_p95);
    line("step", format!("{:.3} ms, {spread}; {} steps after {}", m.step_ms, m.steps, m.warmup));
    line("speed", format!("{} tok/s", count_text(m.tokens_per_second)));
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
    if m.ranks > 1 {
        let small = m.step_ms_small_all_reduce;
        line("waiting", format!("{:.3} ms for the slowest rank", m.waiting_ms));
        line(
            "communication",
            format!(
                "{:.3} ms; step {small:.3} ms with only the all-reduce of loss and flags, {:.3} ms without",
                m.communication_ms, m.step_ms_without_all_reduce
            ),
        );
    }
    if let Some(clocks) = &m.clocks {
        line("clocks", clocks.line());
    }
    line("pool", format!("{:.1} MiB peak", m.pool_peak_bytes as f64 / f64::from(1 << 20)));
    line("loss", format!("{:.4} at step {}", m.final_loss, m.warmup + m.steps));
    m.kernels.as_ref().map_or(out.clone(), |kernels| out + &kernels::table(kernels))
}

#[cfg(test)]
mod tests {
    use super::*;

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
