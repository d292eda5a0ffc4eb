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
    if resume_from.is_none() && spec.checkpoint.resume == "auto" {
        let searched = spec.checkpoint.dir.as_ref().map_or(job_dir, Path::new);
        warnings.push(format!(
            "no checkpoint of job `{}` below {}: starting at step 1",
            spec.job.name,
            searched.display()
        ));
    }
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
            // Not a checkpoint itself: the newest one of a directory of checkpoints, or of a run.
            let newest = checkpoint::newest(&path).or_else(|| newest_of_run(&path));
            newest.map(Some).ok_or(CheckpointError::None { path })
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
    runs.iter().rev().find_map(|run| newest_of_run(run))
}

fn newest_of_run(run: &Path) -> Option<PathBuf> {
    checkpoint::newest(&run.join("checkpoints"))
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::spec::{CheckpointSection, DataSection};

    use super::*;

    /// A complete checkpoint as far as its manifest tells.
    fn write_checkpoint(path: &Path) {
        fs_err::create_dir_all(path).unwrap();
        fs_err::write(path.join("manifest.json"), r#"{"version":1,"files":[]}"#).unwrap();
    }

    fn resuming(resume: &str) -> JobSpec {
        let checkpoint = CheckpointSection { resume: resume.into(), ..CheckpointSection::default() };
        JobSpec { checkpoint, ..JobSpec::default() }
    }

    #[test]
    fn path_to_resume_from_may_be_a_checkpoint_a_directory_of_checkpoints_or_a_run() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = run.path().join("checkpoints");
        let newest = checkpoints.join("step-00000020");
        write_checkpoint(&checkpoints.join("step-00000010"));
        write_checkpoint(&newest);
        for path in [run.path(), &checkpoints, &newest] {
            let spec = resuming(path.to_str().unwrap());
            assert_eq!(resume_from(&spec, Path::new("")).unwrap().as_deref(), Some(&*newest), "{path:?}");
        }
        let empty = tempfile::tempdir().unwrap();
        let error = resume_from(&resuming(empty.path().to_str().unwrap()), Path::new("")).unwrap_err();
        assert!(matches!(error, CheckpointError::None { path } if path == empty.path()));
    }

    #[test]
    fn fresh_start_in_place_of_a_resume_is_a_warning_that_names_the_searched_directory() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("a.txt"), "some text. ".repeat(1000)).unwrap();
        let warnings = |resume: &str, saved: Option<&str>| {
            let mut spec = resuming(resume);
            spec.job.name = "train".into();
            spec.data =
                DataSection { train: vec![format!("{}/*.txt", dir.path().display())], ..spec.data.clone() };
            spec.checkpoint.dir = saved.map(str::to_owned);
            preflight(&spec, Path::new("/x/runs/train")).unwrap().warnings
        };
        let warning =
            |dir: &str| vec![format!("no checkpoint of job `train` below {dir}: starting at step 1")];
        assert_eq!(warnings("auto", None), warning("/x/runs/train"));
        assert_eq!(warnings("auto", Some("/x/saved")), warning("/x/saved"));
        assert!(warnings("off", None).is_empty());
    }
}
