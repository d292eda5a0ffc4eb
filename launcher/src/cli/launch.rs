//! A launch in the foreground, of the built-in trainer or of any command: from the command line to the exit code.

use std::path::{Path, PathBuf};
use std::time::Instant;

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::StatusReply;

use crate::trainer::{FillIn, FillInError, Trainer};
use xlaunch_agent::command::{self, CommandSpec, ResolvedCommand};
use xlaunch_agent::config::{self, Layer, Override};
use xlaunch_agent::devices::{self, Node, Placement};
use xlaunch_agent::driver::{self, Finished};
use xlaunch_agent::report::Evidence;
use xlaunch_agent::run_dir::{self, RunDir};
use xlaunch_agent::spawn::affinity::{self, Affinity};
use xlaunch_agent::spawn::environment::BaseEnvironment;
use xlaunch_agent::state::Outcome;
use xlaunch_agent::workload::command::CommandPlan;
use xlaunch_agent::workload::snapshots::{MemoryUse, memory_use};
use xlaunch_agent::workload::trainer::TrainerPlan;
use xlaunch_agent::{Refusal, memory, report};

/// A launch of the built-in trainer.
#[derive(Debug)]
pub(crate) struct Launch {
    /// Training configuration.
    pub(super) config: PathBuf,
    /// Workers to start. Default: one per GPU, or 1 without GPUs.
    pub(super) nproc: Option<u32>,
    /// `section.key=value`, in rising precedence.
    pub(super) set: Vec<String>,
    /// `auto` for the newest checkpoint of this job, or the path of a checkpoint.
    pub(super) resume: Option<String>,
}

/// Trains in the foreground.
#[expect(clippy::print_stderr, clippy::print_stdout, reason = "results to stdout, everything else to stderr")]
pub(super) async fn run(launch: &Launch, trainer: Trainer) -> ExitCode {
    let (spec, placement) = match prepare(launch, trainer.fill_in) {
        Ok(prepared) => prepared,
        Err(refusal) => return refuse(&refusal),
    };
    match train(&spec, &placement, trainer, &BaseEnvironment::Own, RunDir::create).await {
        Ok(ended) => {
            print!("{}", ended.summary);
            eprint!("{}", ended.report);
            ended.exit
        }
        Err(refusal) => refuse(&refusal),
    }
}

/// The result of a launch.
pub(super) struct Ended {
    pub(super) exit: ExitCode,
    /// It was stopped on request, and had not failed before.
    pub(super) stopped: bool,
    /// The reason for the exit code, in one line.
    pub(super) reason: String,
    /// The rank that failed first, if a rank failed.
    pub(super) rank: Option<u32>,
    /// The last status of all ranks.
    pub(super) status: StatusReply,
    /// The most memory that all ranks together were seen to use.
    pub(super) peak_memory_bytes: u64,
    /// Summary of the training, for stdout.
    pub(super) summary: String,
    /// Failure report for stderr; empty on success.
    pub(super) report: String,
}

impl Ended {
    /// There was nothing to do.
    fn without_a_run() -> Self {
        Self {
            exit: ExitCode::Done,
            stopped: false,
            reason: String::new(),
            rank: None,
            status: StatusReply::default(),
            peak_memory_bytes: 0,
            summary: String::new(),
            report: String::new(),
        }
    }
}

/// Trains. The run directory is created only after data and checkpoint have been validated.
#[expect(clippy::print_stderr, reason = "warnings precede the output of workers")]
pub(super) async fn train(
    spec: &JobSpec,
    placement: &Placement,
    trainer: Trainer,
    base: &BaseEnvironment,
    create: impl FnOnce(&JobSpec) -> Result<RunDir, Refusal>,
) -> Result<Ended, Refusal> {
    let ready = (trainer.preflight)(spec, &run_dir::job_dir(spec), placement.workers)?;
    ready.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    if let (Some(checkpoint), Some(step)) = (&ready.resume_from, ready.complete) {
        // Without a run: the newest one of the job stays the one that trained.
        eprintln!(
            "xlaunch: nothing is left to train: checkpoint {} has all {step} steps; raise `train.steps` to go on",
            checkpoint.display()
        );
        return Ok(Ended::without_a_run());
    }
    let mut spec = spec.clone();
    spec.train.warmup = spec.train.warmup.or(ready.warmup);
    let spec = &spec;
    let MemoryUse { used: memory_snapshots, note } = memory_use(spec, ready.state_bytes, memory::available())
        .map_err(|reason| Refusal::new(ExitCode::Usage, reason))?;
    // Held until the workers are gone.
    let _lock = ready.lock;
    let parent = ready.resume_from.as_deref().zip(ready.parent.as_deref());
    let parent = parent.and_then(|(checkpoint, run)| parent_dir(checkpoint, run, &run_dir::job_dir(spec)));
    let run = create(spec)?;
    let device = if placement.cuda { "GPU" } else { "CPU" };
    eprintln!("xlaunch: {} x {device}, run {}", placement.workers, run.path.display());
    note.iter().for_each(|note| eprintln!("xlaunch: {note}"));
    let start = Instant::now();
    let plan = TrainerPlan {
        spec,
        placement,
        resume_from: ready.resume_from,
        parent,
        recover: trainer.recover,
        memory_snapshots,
        bench: None,
        base,
    };
    let logs = run.logs.clone();
    let (finished, results) = driver::run_trainer(plan, run).await.map_err(|error| failed(&error))?;
    let summary = match results.summary.steps() {
        0 => String::new(),
        _ => {
            let accounting = finished.status.accounting.as_ref();
            results.summary.text(placement.workers, start.elapsed(), results.metrics, accounting)
        }
    };
    let report = report::text(&finished.outcome, &finished.evidence, Some(&logs)).unwrap_or_default();
    let (exit, reason) = (finished.outcome.exit, reason(&finished.outcome, &finished.evidence));
    let stopped = finished.outcome.stopped;
    let rank = finished.outcome.root.and_then(|root| root.rank);
    let Finished { status, peak_memory_bytes, .. } = finished;
    Ok(Ended { exit, stopped, reason, rank, status, peak_memory_bytes, summary, report })
}

/// Directory of the run that wrote a checkpoint: the one that the checkpoint is in or, with `checkpoint.dir`, a run of
/// this job.
fn parent_dir(checkpoint: &Path, run: &str, job_dir: &Path) -> Option<PathBuf> {
    let around = checkpoint.parent().and_then(Path::parent).map(Path::to_path_buf);
    // A name from a file must not lead elsewhere.
    let of_job = Path::new(run).file_name().map(|run| job_dir.join(run));
    [around, of_job].into_iter().flatten().find(|dir| dir.join("job.json").is_file())
}

fn reason(outcome: &Outcome, evidence: &[Evidence]) -> String {
    let meaning = if outcome.exit == ExitCode::Done { "" } else { outcome.exit.meaning() };
    report::headline(outcome, evidence).unwrap_or_else(|| meaning.into())
}

/// Runs a command in the foreground.
#[expect(clippy::print_stderr, reason = "the report goes to stderr")]
pub(super) async fn run_command(spec: CommandSpec) -> ExitCode {
    let command = match command::resolve(spec, &|name| std::env::var_os(name), &Node::inspect) {
        Ok(command) => command,
        Err(refusal) => return refuse(&refusal),
    };
    if command.flight_recorder && command.logs.dir.is_none() {
        let message = "--flight-recorder needs --log-dir: without it, the dumps are removed with the logs";
        return refuse(&Refusal::new(ExitCode::Usage, message));
    }
    match run_workers(&command, &BaseEnvironment::Own, || RunDir::for_command(&command)).await {
        Ok(ended) => {
            eprint!("{}", ended.report);
            ended.exit
        }
        Err(refusal) => refuse(&refusal),
    }
}

/// Runs the workers of a command. `create` makes the run directory.
pub(super) async fn run_workers(
    spec: &ResolvedCommand,
    base: &BaseEnvironment,
    create: impl FnOnce() -> Result<RunDir, Refusal>,
) -> Result<Ended, Refusal> {
    let affinities = affinities(spec).map_err(|reason| Refusal::new(ExitCode::Usage, reason))?;
    let run = create()?;
    let kept = (spec.logs.dir.is_some() || run.private().is_none()).then(|| run.logs.clone());
    let plan = CommandPlan { spec, affinities, base };
    let finished = driver::run_command(plan, run).await.map_err(|error| failed(&error))?;
    let report = report::text(&finished.outcome, &finished.evidence, kept.as_deref()).unwrap_or_default();
    let (exit, reason) = (finished.outcome.exit, reason(&finished.outcome, &finished.evidence));
    let stopped = finished.outcome.stopped;
    let rank = finished.outcome.root.and_then(|root| root.rank);
    let Finished { status, peak_memory_bytes, .. } = finished;
    Ok(Ended { exit, stopped, reason, rank, status, peak_memory_bytes, summary: String::new(), report })
}

fn affinities(spec: &ResolvedCommand) -> Result<Vec<Affinity>, String> {
    let allowed = rustix::thread::sched_getaffinity(None);
    let allowed = allowed.map_err(|error| format!("failed to read the CPU affinity: {error}"))?;
    // Loading NVML is slow, and only a binding needs the GPUs.
    let gpus = if spec.binding.is_some() { devices::gpu_addresses() } else { Vec::new() };
    affinity::plan(spec.binding, spec.nproc, &gpus, Path::new("/sys"), &allowed)
}

fn failed(error: &std::io::Error) -> Refusal {
    Refusal::new(ExitCode::Internal, format!("failed to run the job: {error}"))
}

/// Resolves and validates everything that does not need the tokens of the data.
pub(super) fn prepare(launch: &Launch, fill_in: FillIn) -> Result<(JobSpec, Placement), Refusal> {
    let mut spec = load(launch, fill_in)?;
    let placement = devices::place(&spec, &Node::inspect())?;
    // From here on the description has the actual number of workers: all ranks compare its digest.
    spec.launch.nproc = Some(placement.workers);
    Ok((spec, placement))
}

/// The job description from all layers of configuration and the data that it names, not yet placed on devices.
#[expect(clippy::print_stderr, reason = "warnings go to stderr")]
pub(super) fn load(launch: &Launch, fill_in: FillIn) -> Result<JobSpec, Refusal> {
    let mut overrides = Override::from_environment(std::env::vars());
    let flag = |key: &str, value: String, source: String| Override {
        key: key.into(),
        value,
        source,
        layer: Layer::Flags,
    };
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
    let (mut spec, sources) = (loaded.spec, loaded.sources);
    fill_in(&mut spec).map_err(|error| match error {
        FillInError::Invalid(invalid) => sources.error(&invalid).into(),
        FillInError::Refused(refusal) => refusal,
    })?;
    // What was filled in follows the same rules.
    spec.check().map_err(|invalid| sources.error(&invalid))?;
    Ok(spec)
}

#[expect(clippy::print_stderr, reason = "errors of the command line go to stderr")]
fn refuse(refusal: &Refusal) -> ExitCode {
    eprintln!("error: {}", refusal.message.trim());
    refusal.exit
}
