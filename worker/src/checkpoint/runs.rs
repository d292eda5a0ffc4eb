//! The runs of a job, in the order in which they started.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use chrono::NaiveDateTime;
use xlaunch_spec::lineage::{ENVIRONMENT_FILE, LATEST, STARTED};

/// The beginning of a run's id: a time in UTC.
const TIME_IN_NAME: &str = "20261121-045035";

/// Returns the directories of a job's runs, oldest first. The run to which `latest` leads counts as the newest,
/// whatever the clocks were when the others began. Leaves out symbolic links.
pub fn of_job(job_dir: &Path) -> Vec<PathBuf> {
    let mut runs: Vec<PathBuf> =
        fs_err::read_dir(job_dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let latest = fs_err::read_link(job_dir.join(LATEST)).ok();
    let is_latest = |run: &Path| latest.as_ref().is_some_and(|latest| job_dir.join(latest) == run);
    // The directory also contains that link, and marker files of nodes.
    runs.retain(|path| !path.is_symlink() && path.is_dir());
    runs.sort_by_cached_key(|path| (is_latest(path), started(path), described(path), path.clone()));
    runs
}

/// Returns the path of a job's newest run, by the link `latest` if there is one.
pub(super) fn newest_of_job(job_dir: &Path) -> Option<PathBuf> {
    let latest = job_dir.join(LATEST);
    if latest.is_symlink() && latest.is_dir() {
        return Some(latest);
    }
    of_job(job_dir).into_iter().rfind(|run| described(run).is_some())
}

/// Returns when a run started, in seconds since 1970. Copies keep what its name or its files say; the time at which a
/// file was modified counts only if neither does.
fn started(run: &Path) -> Option<i64> {
    time_in_name(run).or_else(|| recorded_time(run)).or_else(|| {
        let written = described(run)?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        i64::try_from(written.as_secs()).ok()
    })
}

/// Returns the time in a name like `20261121-045035-0a1b2c3d`. A run has another name if it belongs to the job of a
/// batch system, or if the user has given it one.
fn time_in_name(run: &Path) -> Option<i64> {
    let name = run.file_name()?.to_str()?;
    let time = NaiveDateTime::parse_from_str(name.get(..TIME_IN_NAME.len())?, "%Y%m%d-%H%M%S").ok()?;
    Some(time.and_utc().timestamp())
}

fn recorded_time(run: &Path) -> Option<i64> {
    let text = fs_err::read_to_string(run.join(ENVIRONMENT_FILE)).ok()?;
    serde_json::from_str::<serde_json::Value>(&text).ok()?[STARTED].as_i64()
}

/// Returns when a run wrote its description, which is when it started, unless it was copied.
fn described(run: &Path) -> Option<SystemTime> {
    fs_err::metadata(run.join("job.json")).and_then(|found| found.modified()).ok()
}
