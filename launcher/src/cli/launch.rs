//! `xlaunch [--nproc N] train.toml`: from the command line to the exit code.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use miette::{GraphicalReportHandler, GraphicalTheme};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;

use crate::agent::driver;
use crate::config::{self, ConfigError, Override};
use crate::devices::{self, Node, Placement};
use crate::run_dir::{self, RunDir};
use crate::{Refusal, Trainer, report};

/// Options of a launch.
#[derive(Debug, Args)]
pub(super) struct Launch {
    /// Training configuration.
    #[arg(value_name = "CONFIG.toml", required = true)]
    pub(super) config: Option<PathBuf>,

    /// Workers to start. Default: one per GPU, or 1 without GPUs.
    #[arg(long, visible_alias = "nproc-per-node", value_name = "N")]
    pub(super) nproc: Option<u32>,

    /// Override a key of the configuration; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(super) set: Vec<String>,

    /// Resume from the newest checkpoint of this job, or from PATH.
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
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
    let plan = driver::Plan {
        spec: &spec,
        placement: &placement,
        run: &run,
        resume_from: ready.resume_from,
        newest_checkpoint: trainer.newest_checkpoint,
        bench: None,
    };
    let finished = match driver::run(plan).await {
        Ok(finished) => finished,
        Err(error) => {
            return refuse(&Refusal::new(ExitCode::Internal, format!("failed to run the job: {error}")));
        }
    };
    if finished.summary.steps() > 0 {
        print!("{}", finished.summary.text(placement.workers, start.elapsed(), finished.metrics));
    }
    if let Some(text) = report::text(&finished.outcome, &finished.evidence, Some(&run.path.join("logs"))) {
        eprint!("{text}");
    }
    finished.outcome.exit
}

/// Everything that can be known before data is opened.
pub(super) fn prepare(launch: &Launch) -> Result<(JobSpec, Placement), Refusal> {
    let path = launch.config.as_deref().unwrap_or("".as_ref());
    if path.extension().is_none_or(|extension| extension != "toml") {
        let message = format!(
            "{}: this version runs training configurations, which end in .toml: xlaunch --nproc 2 train.toml",
            path.display()
        );
        return Err(Refusal::new(ExitCode::Usage, message));
    }
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
    let mut spec = config::load(path, &overrides).map_err(|error| draw(&error))?;
    let placement = devices::place(&spec, &Node::inspect())?;
    // From here on the description says what is done, on every rank.
    spec.launch.nproc = Some(placement.workers);
    Ok((spec, placement))
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
