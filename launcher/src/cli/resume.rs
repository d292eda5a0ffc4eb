//! `--resume` in a different directory than before. By default, runs are below the working directory, so a job that is
//! started elsewhere would not find them, and would start again from step 1.

use std::path::{Path, PathBuf};

use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;
use xlaunch_spec::refusal::Refusal;
use xlaunch_worker::checkpoint::directory::CHECKPOINTS;
use xlaunch_worker::checkpoint::runs;
use xlaunch_worker::newest_checkpoint;

/// Refuses to start again from step 1 if the job has checkpoints next to its configuration, but none below the working
/// directory.
pub(super) fn check(config: &Path, spec: &JobSpec) -> Result<(), Refusal> {
    if spec.checkpoint.resume != "auto" || spec.checkpoint.dir.is_some() {
        return Ok(());
    }
    let here = spec.runs_dir();
    let below = std::env::current_dir().ok().and_then(|dir| Some(here.strip_prefix(dir).ok()?.to_path_buf()));
    let beside = config.parent().zip(below).map(|(dir, below)| dir.join(below));
    let Some(beside) = beside else { return Ok(()) };
    let absolute = |path: &Path| fs_err::canonicalize(path).ok();
    if absolute(&beside).is_none() || absolute(&beside) == absolute(&here) || newest_of_runs(&here).is_some()
    {
        return Ok(());
    }
    let Some(found) = newest_of_runs(&beside) else { return Ok(()) };
    Err(Refusal::new(
        ExitCode::Usage,
        format!(
            "no checkpoint of job `{}` below {}, but there is {}; run `xlaunch` in {}, set `job.output` to an absolute \
             path, or pass `--resume={}`",
            spec.job.name,
            here.display(),
            found.display(),
            config.parent().unwrap_or(Path::new(".")).display(),
            found.display()
        ),
    ))
}

/// Returns the newest checkpoint of the newest run that has one.
fn newest_of_runs(job_dir: &Path) -> Option<PathBuf> {
    runs::of_job(job_dir).iter().rev().find_map(|run| newest_checkpoint(&run.join(CHECKPOINTS)))
}
