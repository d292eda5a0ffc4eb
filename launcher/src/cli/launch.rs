//! A launch, of the built-in trainer or of any command: from the command line to the exit code.

use std::path::{Path, PathBuf};
use std::time::Instant;

use miette::{GraphicalReportHandler, GraphicalTheme};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;

use crate::agent::commands::CommandPlan;
use crate::agent::driver;
use crate::agent::trainer::TrainerPlan;
use crate::agent::work::Plan;
use crate::command::CommandSpec;
use crate::config::{self, ConfigError, Override};
use crate::devices::{self, Node, Placement};
use crate::run_dir::{self, RunDir};
use crate::spawn::affinity::{self, Affinity};
use crate::{Refusal, Trainer, report};

/// A launch of the built-in trainer.
#[derive(Debug)]
pub(super) struct Launch {
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
    let ready = match (trainer.preflight)(&spec, &run_dir::job_dir(&spec)) {
        Ok(ready) => ready,
        Err(refusal) => return refuse(&refusal),
    };
    ready.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    let run = match RunDir::create(&spec) {
        Ok(run) => run,
        Err(refusal) => return refuse(&refusal),
    };
    let device = if placement.cuda { "GPU" } else { "CPU" };
    eprintln!("xlaunch: {} x {device}, run {}", placement.workers, run.path.display());
    let start = Instant::now();
    let plan = TrainerPlan {
        spec: &spec,
        placement: &placement,
        resume_from: ready.resume_from,
        newest_checkpoint: trainer.newest_checkpoint,
        bench: None,
    };
    let logs = run.logs.clone();
    let finished = match driver::run(Plan::Trainer(plan), run).await {
        Ok(finished) => finished,
        Err(error) => return refuse(&failed(&error)),
    };
    let trained = finished.trained;
    if trained.summary.steps() > 0 {
        print!("{}", trained.summary.text(placement.workers, start.elapsed(), trained.metrics));
    }
    if let Some(text) = report::text(&finished.outcome, &finished.evidence, Some(&logs)) {
        eprint!("{text}");
    }
    finished.outcome.exit
}

/// Runs a command's workers in the foreground.
#[expect(clippy::print_stderr, reason = "the report goes to stderr")]
pub(super) async fn run_command(spec: &CommandSpec) -> ExitCode {
    let affinities = match affinities(spec) {
        Ok(affinities) => affinities,
        Err(reason) => return refuse(&Refusal::new(ExitCode::Usage, reason)),
    };
    let run = match RunDir::for_command(spec) {
        Ok(run) => run,
        Err(refusal) => return refuse(&refusal),
    };
    let kept = spec.logs.dir.is_some().then(|| run.logs.clone());
    let finished = match driver::run(Plan::Command(CommandPlan { spec, affinities }), run).await {
        Ok(finished) => finished,
        Err(error) => return refuse(&failed(&error)),
    };
    if let Some(text) = report::text(&finished.outcome, &finished.evidence, kept.as_deref()) {
        eprint!("{text}");
    }
    finished.outcome.exit
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
pub(super) fn load(launch: &Launch) -> Result<JobSpec, Refusal> {
    let mut overrides = Override::from_environment(std::env::vars());
    let flag = |key: &str, value: String, source: String| Override { key: key.into(), value, source };
    for argument in &launch.set {
        overrides.push(Override::from_flag(argument).map_err(|error| draw(&error))?);
    }
    if let Some(nproc) = launch.nproc {
        overrides.push(flag("launch.nproc", nproc.to_string(), format!("--nproc {nproc}")));
    }
    if let Some(resume) = &launch.resume {
        overrides.push(flag("checkpoint.resume", format!("{resume:?}"), format!("--resume={resume}")));
    }
    config::load(&launch.config, &overrides).map_err(|error| draw(&error))
}

/// The error with its place in the file drawn below.
fn draw(error: &ConfigError) -> Refusal {
    let mut text = String::new();
    let mut theme = GraphicalTheme::default();
    // "error:" stands in front already.
    theme.characters.error = String::new();
    if GraphicalReportHandler::new_themed(theme).with_links(false).render_report(&mut text, error).is_err() {
        text = error.to_string();
    }
    Refusal::new(ExitCode::Usage, text)
}

#[expect(clippy::print_stderr, reason = "errors of the command line go to stderr")]
fn refuse(refusal: &Refusal) -> ExitCode {
    eprintln!("error: {}", refusal.message.trim());
    refusal.exit
}
