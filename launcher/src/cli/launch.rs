//! A launch, of the built-in trainer or of any command: from the command line to the exit code.

use std::path::{Path, PathBuf};
use std::time::Instant;

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::StatusReply;

use crate::trainer::Trainer;
use xlaunch_agent::command::CommandSpec;
use xlaunch_agent::config::{self, Override};
use xlaunch_agent::devices::{self, Node, Placement};
use xlaunch_agent::driver;
use xlaunch_agent::report::Evidence;
use xlaunch_agent::run_dir::{self, RunDir};
use xlaunch_agent::spawn::affinity::{self, Affinity};
use xlaunch_agent::state::Outcome;
use xlaunch_agent::workload::command::CommandPlan;
use xlaunch_agent::workload::trainer::TrainerPlan;
use xlaunch_agent::{Refusal, report};

/// A launch of the built-in trainer.
#[derive(Debug)]
pub(crate) struct Launch {
    /// Training configuration.
    pub(super) config: PathBuf,
    /// Workers to start. Default: one per GPU, or 1 without GPUs.
    pub(super) nproc: Option<u32>,
    /// Overrides of keys, as `section.key=value`.
    pub(super) set: Vec<String>,
    /// The checkpoint to resume from: `auto` for the newest of this job, or a path.
    pub(super) resume: Option<String>,
}

/// Runs a job in the foreground.
#[expect(clippy::print_stderr, clippy::print_stdout, reason = "results to stdout, everything else to stderr")]
pub(super) async fn run(launch: &Launch, trainer: Trainer) -> ExitCode {
    let (spec, placement) = match prepare(launch) {
        Ok(prepared) => prepared,
        Err(refusal) => return refuse(&refusal),
    };
    match train(&spec, &placement, trainer, RunDir::create).await {
        Ok(ended) => {
            print!("{}", ended.summary);
            eprint!("{}", ended.report);
            ended.exit
        }
        Err(refusal) => refuse(&refusal),
    }
}

/// A launch that is over.
pub(super) struct Ended {
    pub(super) exit: ExitCode,
    /// Why it ended so, in one line.
    pub(super) reason: String,
    /// Whose failure it was, where it was a rank's.
    pub(super) rank: Option<u32>,
    /// The ranks, and how far they came.
    pub(super) status: StatusReply,
    /// What came of it, for stdout.
    pub(super) summary: String,
    /// Why it failed, for stderr; empty where it did not.
    pub(super) report: String,
}

/// Trains. The run's directory is made when data and checkpoint are known to be good.
#[expect(clippy::print_stderr, reason = "what the user should know, before workers write")]
pub(super) async fn train(
    spec: &JobSpec,
    placement: &Placement,
    trainer: Trainer,
    create: impl FnOnce(&JobSpec) -> Result<RunDir, Refusal>,
) -> Result<Ended, Refusal> {
    let ready = (trainer.preflight)(spec, &run_dir::job_dir(spec))?;
    ready.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    let run = create(spec)?;
    let device = if placement.cuda { "GPU" } else { "CPU" };
    eprintln!("xlaunch: {} x {device}, run {}", placement.workers, run.path.display());
    let start = Instant::now();
    let plan = TrainerPlan {
        spec,
        placement,
        resume_from: ready.resume_from,
        newest_checkpoint: trainer.newest_checkpoint,
        bench: None,
    };
    let logs = run.logs.clone();
    let (finished, results) = driver::run_trainer(plan, run).await.map_err(|error| failed(&error))?;
    let summary = match results.summary.steps() {
        0 => String::new(),
        _ => results.summary.text(placement.workers, start.elapsed(), results.metrics),
    };
    let report = report::text(&finished.outcome, &finished.evidence, Some(&logs)).unwrap_or_default();
    let (exit, reason) = (finished.outcome.exit, reason(&finished.outcome, &finished.evidence));
    let rank = finished.outcome.root.and_then(|root| root.rank);
    Ok(Ended { exit, reason, rank, status: finished.status, summary, report })
}

fn reason(outcome: &Outcome, evidence: &[Evidence]) -> String {
    // That a job is done needs no reason.
    let meaning = if outcome.exit == ExitCode::Done { "" } else { outcome.exit.meaning() };
    report::headline(outcome, evidence).unwrap_or_else(|| meaning.into())
}

/// Runs a command's workers in the foreground.
#[expect(clippy::print_stderr, reason = "the report goes to stderr")]
pub(super) async fn run_command(spec: &CommandSpec) -> ExitCode {
    match run_workers(spec, || RunDir::for_command(spec)).await {
        Ok(ended) => {
            eprint!("{}", ended.report);
            ended.exit
        }
        Err(refusal) => refuse(&refusal),
    }
}

/// Runs a command's workers, in this run's directory.
pub(super) async fn run_workers(
    spec: &CommandSpec,
    create: impl FnOnce() -> Result<RunDir, Refusal>,
) -> Result<Ended, Refusal> {
    let affinities = affinities(spec).map_err(|reason| Refusal::new(ExitCode::Usage, reason))?;
    let run = create()?;
    let kept = (spec.logs.dir.is_some() || run.private().is_none()).then(|| run.logs.clone());
    let plan = CommandPlan { spec, affinities };
    let finished = driver::run_command(plan, run).await.map_err(|error| failed(&error))?;
    let report = report::text(&finished.outcome, &finished.evidence, kept.as_deref()).unwrap_or_default();
    let (exit, reason) = (finished.outcome.exit, reason(&finished.outcome, &finished.evidence));
    let rank = finished.outcome.root.and_then(|root| root.rank);
    Ok(Ended { exit, reason, rank, status: finished.status, summary: String::new(), report })
}

fn affinities(spec: &CommandSpec) -> Result<Vec<Affinity>, String> {
    let allowed = rustix::thread::sched_getaffinity(None);
    let allowed = allowed.map_err(|error| format!("failed to ask which CPUs may be used: {error}"))?;
    // NVML takes its time, and GPUs matter to a binding alone.
    let gpus = if spec.binding.is_some() { devices::gpu_addresses() } else { Vec::new() };
    affinity::plan(spec.binding, spec.nproc, &gpus, Path::new("/sys"), &allowed)
}

fn failed(error: &std::io::Error) -> Refusal {
    Refusal::new(ExitCode::Internal, format!("failed to run the job: {error}"))
}

/// Everything that can be known before data is opened.
pub(super) fn prepare(launch: &Launch) -> Result<(JobSpec, Placement), Refusal> {
    let mut spec = load(launch)?;
    let placement = devices::place(&spec, &Node::inspect())?;
    // From here on the description says what is done, on every rank.
    spec.launch.nproc = Some(placement.workers);
    Ok((spec, placement))
}

/// What is to be trained, of all layers, wherever that will be.
#[expect(clippy::print_stderr, reason = "warnings go to stderr")]
pub(super) fn load(launch: &Launch) -> Result<JobSpec, Refusal> {
    let mut overrides = Override::from_environment(std::env::vars());
    let flag = |key: &str, value: String, source: String| Override { key: key.into(), value, source };
    for argument in &launch.set {
        overrides.push(Override::from_flag(argument)?);
    }
    if let Some(nproc) = launch.nproc {
        overrides.push(flag("launch.nproc", nproc.to_string(), format!("--nproc {nproc}")));
    }
    if let Some(resume) = &launch.resume {
        overrides.push(flag("checkpoint.resume", format!("{resume:?}"), format!("--resume={resume}")));
    }
    let loaded = config::load(&launch.config, &overrides)?;
    loaded.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    Ok(loaded.spec)
}

#[expect(clippy::print_stderr, reason = "errors of the command line go to stderr")]
fn refuse(refusal: &Refusal) -> ExitCode {
    eprintln!("error: {}", refusal.message.trim());
    refusal.exit
}
