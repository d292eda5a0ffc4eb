//! Checks of a job before any worker is started: data, initial weights, and the checkpoint to resume from.

use std::path::{Path, PathBuf};

use rayon::{ThreadPool, ThreadPoolBuilder};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::{Invalid, JobSpec};

use crate::checkpoint::{self, CheckpointError};
use crate::data::Dataset;
use crate::error::WorkerError;
use crate::model::layout::Layout;

/// A job that can start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preflight {
    /// Checkpoint to resume from.
    pub resume_from: Option<PathBuf>,
    /// For the user; the job starts all the same.
    pub warnings: Vec<String>,
}

/// A job that cannot start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Exit code of the launcher.
    pub exit: ExitCode,
    /// The reason.
    pub message: String,
}

impl From<WorkerError> for Refusal {
    fn from(error: WorkerError) -> Self {
        Self { exit: error.exit(), message: error.to_string() }
    }
}

/// Opens the data and finds the checkpoint to resume from. `job_dir` holds the job's earlier runs.
pub fn preflight(spec: &JobSpec, job_dir: &Path) -> Result<Preflight, Refusal> {
    let usage = |invalid: Invalid| Refusal { exit: ExitCode::Usage, message: invalid.to_string() };
    // The configuration was checked when it was read, but the number of workers is known only now.
    spec.check().map_err(usage)?;
    let shape = spec.model.resolve().map_err(usage)?;
    let dataset = Dataset::open(spec, &shape).map_err(WorkerError::from)?;
    let mut warnings = Vec::new();
    if dataset.val.is_none() && spec.train.eval_every != 0 {
        let problem = "evaluation is off: the held-out data is shorter than one sequence";
        warnings.push(format!("{problem}; raise `data.val_fraction` or lower `model.seq`"));
    }
    if let Some(path) = &spec.checkpoint.init {
        checkpoint::load_weights(Path::new(path), &Layout::new(&shape), &one_thread()?)
            .map_err(WorkerError::from)?;
    }
    let resume_from = resume_from(spec, job_dir).map_err(WorkerError::from)?;
    if let Some(path) = &resume_from {
        let state = checkpoint::check_model(path, &shape).map_err(WorkerError::from)?;
        if state.step >= spec.train.steps {
            warnings.push(format!(
                "checkpoint {} has all {} steps: there is nothing left to train",
                path.display(),
                state.step
            ));
        }
        if state.seed != spec.job.seed {
            warnings.push(format!(
                "`job.seed` changed from {} to {}: the data order changes",
                state.seed, spec.job.seed
            ));
        }
    }
    Ok(Preflight { resume_from, warnings })
}

/// Threads for a test read of the initial weights. One is enough: only the workers' reads have to be fast.
fn one_thread() -> Result<ThreadPool, Refusal> {
    let built = ThreadPoolBuilder::new().num_threads(1).build();
    built.map_err(|error| Refusal {
        exit: ExitCode::Internal,
        message: format!("failed to start a thread pool: {error}"),
    })
}

fn resume_from(spec: &JobSpec, job_dir: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    match (spec.checkpoint.resume.as_str(), &spec.checkpoint.dir) {
        ("off", _) => Ok(None),
        ("auto", Some(dir)) => Ok(checkpoint::newest(Path::new(dir))),
        ("auto", None) => Ok(newest_of_runs(job_dir)),
        (path, _) => {
            let path = PathBuf::from(path);
            if path.join("manifest.json").exists()
                || path.file_name().is_some_and(|name| is_step(&name.to_string_lossy()))
            {
                return Ok(Some(path));
            }
            // Not a checkpoint itself: the newest one in it.
            checkpoint::newest(&path).map(Some).ok_or(CheckpointError::None { path })
        }
    }
}

fn is_step(name: &str) -> bool {
    name.starts_with("step-")
}

/// The newest checkpoint of the newest run that has one. Runs are named by their start time, so names sort by time.
fn newest_of_runs(job_dir: &Path) -> Option<PathBuf> {
    let mut runs: Vec<PathBuf> =
        fs_err::read_dir(job_dir).ok()?.flatten().map(|entry| entry.path()).collect();
    runs.retain(|path| !path.is_symlink());
    runs.sort();
    runs.iter().rev().find_map(|run| checkpoint::newest(&run.join("checkpoints")))
}
