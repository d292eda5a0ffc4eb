//! Finds the checkpoint that a job resumes from.
//!
//! ```text
//! checkpoint.resume = PATH                      --> that checkpoint, or the newest valid one below it
//! checkpoint.resume = "auto", checkpoint.dir    --> the newest valid one in that directory
//! checkpoint.resume = "auto"                    --> the newest valid one of the newest run that has any
//! ```

use std::path::{Path, PathBuf};

use rayon::ThreadPoolBuilder;
use xlaunch_spec::job::JobSpec;
use xlaunch_spec::model::ModelShape;

use crate::checkpoint::directory::{self, Choice};
use crate::checkpoint::{self, CheckpointError, State, runs};
use crate::model::layout::Parameters;

/// Returns the checkpoint that `checkpoint.resume` selects, if there is one. Checkpoints that are passed over are
/// reported. No worker reads a checkpoint after which `is_complete` leaves no steps, so the hashes of such a one are
/// verified here.
///
/// # Errors
/// If there are checkpoints but none is valid, or the one that is named is not.
pub(super) fn find(
    spec: &JobSpec,
    model: (&ModelShape, &Parameters),
    job_dir: &Path,
    is_complete: &dyn Fn(&State) -> bool,
    warnings: &mut Vec<String>,
) -> Result<Option<PathBuf>, CheckpointError> {
    let mut damaged = None;
    loop {
        let Some(path) = selected(spec, job_dir, warnings)? else { return damaged.map_or(Ok(None), Err) };
        match verify_complete(spec, model, &path, is_complete) {
            Err(error @ CheckpointError::Damaged { .. }) if Path::new(&spec.checkpoint.resume) != path => {
                warnings.push(directory::reject(&path, &error));
                if path.exists() {
                    return Err(error);
                }
                damaged = Some(error);
            }
            result => return result.map(|()| Some(path)),
        }
    }
}

/// Reads all of a checkpoint if it is complete.
fn verify_complete(
    spec: &JobSpec,
    (shape, layout): (&ModelShape, &Parameters),
    path: &Path,
    is_complete: &dyn Fn(&State) -> bool,
) -> Result<(), CheckpointError> {
    let state = directory::open(path, shape)?;
    state.check_trained(path, spec)?;
    if !is_complete(&state) {
        return Ok(());
    }
    let failed = |reason: String| CheckpointError::Read { path: path.into(), reason };
    let threads = ThreadPoolBuilder::new().build().map_err(|error| failed(error.to_string()))?;
    let everything = 0..layout.len;
    let moments = std::slice::from_ref(&everything);
    checkpoint::read(path, shape, layout, moments, &threads, &|_| Ok(())).map(drop)
}

/// Returns the checkpoint that `checkpoint.resume` selects. Rejected checkpoints are renamed and reported.
fn selected(
    spec: &JobSpec,
    job_dir: &Path,
    warnings: &mut Vec<String>,
) -> Result<Option<PathBuf>, CheckpointError> {
    let choice = match (spec.checkpoint.resume_path(), &spec.checkpoint.dir) {
        (Some(path), _) => Some(directory::locate(path)?),
        (None, _) if spec.checkpoint.resume == "off" => None,
        (None, Some(dir)) => directory::choose(Path::new(dir))?.map(Choice::into_parts),
        (None, None) => newest_of_runs(job_dir, warnings)?.map(Choice::into_parts),
    };
    Ok(choice.map(|(path, rejected)| {
        warnings.extend(rejected.iter().map(|(path, error)| directory::reject(path, error)));
        path
    }))
}

/// Returns the newest checkpoint of the newest run that has one.
///
/// # Errors
/// If there are checkpoints but none is valid.
fn newest_of_runs(job_dir: &Path, warnings: &mut Vec<String>) -> Result<Option<Choice>, CheckpointError> {
    let mut failure = None;
    for run in runs::of_job(job_dir).iter().rev() {
        match directory::choose(&run_checkpoints(run)) {
            Ok(Some(choice)) => {
                warnings.extend(failure.map(|error: CheckpointError| error.to_string()));
                return Ok(Some(choice));
            }
            // Report everything in a newer run that is passed over.
            Ok(None) => {
                let unfinished = directory::unfinished(&run_checkpoints(run));
                warnings.extend(unfinished.iter().map(|(_, error)| error.to_string()));
            }
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(None), Err)
}

fn run_checkpoints(run: &Path) -> PathBuf {
    run.join(directory::CHECKPOINTS)
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::job::CheckpointSection;

    use super::*;
    use crate::checkpoint::testing::save;

    fn resuming(resume: &str) -> JobSpec {
        let checkpoint = CheckpointSection { resume: resume.into(), ..CheckpointSection::default() };
        JobSpec { checkpoint, ..JobSpec::default() }
    }

    #[test]
    fn path_to_resume_from_may_be_a_checkpoint_a_directory_of_checkpoints_or_a_run() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = run.path().join("checkpoints");
        let newest = checkpoints.join("step-00000020");
        save(&checkpoints, 10);
        save(&checkpoints, 20);
        for path in [run.path(), &checkpoints, &newest] {
            let spec = resuming(path.to_str().unwrap());
            assert_eq!(
                selected(&spec, Path::new(""), &mut Vec::new()).unwrap().as_deref(),
                Some(&*newest),
                "{path:?}"
            );
        }
        let empty = tempfile::tempdir().unwrap();
        let spec = resuming(empty.path().to_str().unwrap());
        let error = selected(&spec, Path::new(""), &mut Vec::new()).unwrap_err();
        assert!(matches!(error, CheckpointError::None { path } if path == empty.path()));
    }

    /// Returns a job with these runs, each of which started after the one before it and has a checkpoint.
    fn job_with(runs: [&str; 2]) -> tempfile::TempDir {
        let job = tempfile::tempdir().unwrap();
        for run in runs.map(|run| job.path().join(run)) {
            save(&run.join("checkpoints"), 10);
            fs_err::write(run.join("job.json"), "{}").unwrap();
            // Timestamps of files may be this coarse.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        job
    }

    #[test]
    fn newest_run_is_the_one_that_started_last_whatever_its_name() {
        let job = job_with(["slurm-9.0", "slurm-10.0"]);
        // One marker of a running agent, and one of an agent that was killed.
        fs_err::write(job.path().join(".node-0123456789abcdef"), "").unwrap();
        let found = selected(&resuming("auto"), job.path(), &mut Vec::new()).unwrap();
        assert_eq!(found, Some(job.path().join("slurm-10.0/checkpoints/step-00000010")));
    }

    #[test]
    fn newest_of_copied_runs_is_the_one_with_the_latest_time_in_its_name() {
        let job = job_with(["20261121-045036-00000000", "20261121-045035-ffffffff"]);
        fs_err::create_dir(job.path().join("notes")).unwrap();
        let newest = || selected(&resuming("auto"), job.path(), &mut Vec::new()).unwrap().unwrap();
        assert!(newest().starts_with(job.path().join("20261121-045036-00000000")), "{:?}", newest());
        std::os::unix::fs::symlink("20261121-045035-ffffffff", job.path().join("latest")).unwrap();
        assert!(newest().starts_with(job.path().join("20261121-045035-ffffffff")), "{:?}", newest());
        fs_err::remove_file(job.path().join("latest")).unwrap();
    }

    #[test]
    fn copy_of_a_run_under_another_name_is_as_old_as_the_run() {
        let job = job_with(["20261121-045036-00000000", "baseline"]);
        let newest = || selected(&resuming("auto"), job.path(), &mut Vec::new()).unwrap().unwrap();
        // Its name and its files do not say when it started.
        assert!(newest().starts_with(job.path().join("baseline")), "{:?}", newest());
        // A second earlier than the other.
        let environment = r#"{"started_unix_seconds": 1795236635}"#;
        fs_err::write(job.path().join("baseline/environment.json"), environment).unwrap();
        assert!(newest().starts_with(job.path().join("20261121-045036-00000000")), "{:?}", newest());
    }
}
