//! Finds the files of a run: its directory, from the path that the user names, and the runs that it continues.

use std::path::{Path, PathBuf};

use xlaunch_spec::lineage::{ENVIRONMENT_FILE, LATEST};

use super::curves::Source;
use super::documents::{self, JOB, METRICS};

/// Maximum length of a chain of runs that continue each other; a longer one must be a cycle.
const MAX_ANCESTORS: usize = 256;

/// The files of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RunFiles {
    /// Name of the run on the page.
    pub(crate) label: String,
    /// Directory of the run; `None` for a `metrics.jsonl` outside the directory of a run.
    pub(crate) dir: Option<PathBuf>,
    /// The run's own `metrics.jsonl`, which may not exist.
    pub(crate) metrics: PathBuf,
}

/// Finds the run that a path names: a run's directory, a job's directory (its newest run), or a `metrics.jsonl`.
pub(crate) fn find(path: &Path) -> Result<RunFiles, String> {
    if path.is_file() {
        let dir = path.parent().map(Path::to_owned).unwrap_or_default();
        let dir = if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir };
        let run =
            (is_run(&dir) && path.file_name().is_some_and(|name| name == METRICS)).then(|| of_dir(&dir));
        let label = path.display().to_string();
        return Ok(run.unwrap_or_else(|| RunFiles { label, dir: None, metrics: path.to_owned() }));
    }
    if is_run(path) {
        return Ok(of_dir(path));
    }
    if let Err(error) = fs_err::metadata(path) {
        return Err(format!("{error}; name the directory of a run or of a job, or a `{METRICS}`"));
    }
    newest_run(path).map(|dir| of_dir(&dir)).ok_or_else(|| {
        format!(
            "no run in {}: it contains neither `{METRICS}` nor directories of runs; name the directory of a run or of \
             a job, or a `{METRICS}`",
            path.display()
        )
    })
}

fn is_run(dir: &Path) -> bool {
    [METRICS, JOB, ENVIRONMENT_FILE].iter().any(|name| dir.join(name).is_file())
}

/// Returns the newest run of a job. Runs are named by their start time, so names sort by time.
fn newest_run(job: &Path) -> Option<PathBuf> {
    let latest = job.join(LATEST);
    if latest.is_symlink() && is_run(&latest) {
        return Some(latest);
    }
    // In a copy without links, a directory of that name is an older copy of one of the others.
    let entries = fs_err::read_dir(job).ok()?;
    let runs = entries.flatten().map(|entry| entry.path()).filter(|path| *path != latest && is_run(path));
    runs.max()
}

fn of_dir(dir: &Path) -> RunFiles {
    // Paths such as `latest` or `.` do not contain the name of the run.
    let dir = fs_err::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let parts = [dir.parent().and_then(name), name(&dir)];
    let label = parts.into_iter().flatten().collect::<Vec<_>>().join("/");
    RunFiles { label, metrics: dir.join(METRICS), dir: Some(dir) }
}

/// Returns the files that make up the curve of a run, oldest run first. Files of the runs that it continues are left
/// out if the run has their points in its own file, or if they no longer exist; the latter adds a note.
pub(crate) fn sources(run: &RunFiles, notes: &mut Vec<String>) -> Vec<Source> {
    let own = Source::all(&run.metrics);
    let (mut sources, mut dirs) = (Vec::new(), Vec::new());
    let (mut next, mut until) = (run.dir.clone(), u64::MAX);
    let mut current = own;
    for _ in 0..MAX_ANCESTORS {
        let first = if current.path.is_file() { current.first_step() } else { None };
        if current.path.is_file() {
            sources.push(current);
        }
        let parent = next
            .as_deref()
            .and_then(parent)
            .filter(|parent| first.is_none_or(|first| first > 1 && parent.step > 0));
        let Some(Parent { run: id, step, candidates }) = parent else { break };
        until = until.min(step);
        let dir = candidates.into_iter().find(|dir| dir.join(METRICS).is_file() && !dirs.contains(dir));
        let Some(dir) = dir else {
            notes.push(format!("the steps up to {until} are those of run {id}, which no longer exists"));
            break;
        };
        current = Source { path: dir.join(METRICS), until };
        dirs.push(dir.clone());
        next = Some(dir);
    }
    sources.reverse();
    sources
}

/// A run that another one continues.
struct Parent {
    run: String,
    step: u64,
    /// Directories that may be the run's.
    candidates: Vec<PathBuf>,
}

fn parent(dir: &Path) -> Option<Parent> {
    let recorded = documents::read(&dir.join(ENVIRONMENT_FILE)).ok().flatten();
    let from_environment =
        recorded.as_ref().map(|value| &value["continues"]).filter(|value| value.is_object());
    let of_checkpoint = || documents::newest_state(dir)?["parents"].as_array()?.last().cloned();
    let value = match (from_environment, &recorded) {
        (Some(value), _) => value.clone(),
        // The run does not continue another one.
        (None, Some(_)) => return None,
        // The run is of a version that did not write the file.
        (None, None) => of_checkpoint()?,
    };
    let text = |key: &str| value[key].as_str().map(str::to_owned);
    let run = text("run").unwrap_or_default();
    let sibling = Path::new(&run).file_name().is_some_and(|name| name == run.as_str());
    let sibling = sibling.then(|| dir.parent().map(|job| job.join(&run))).flatten();
    // The path is DIR/checkpoints/step-00000500.
    let of_path = text("checkpoint").and_then(|path| Path::new(&path).ancestors().nth(2).map(Path::to_owned));
    let candidates = sibling.into_iter().chain(of_path).collect();
    Some(Parent { run, step: value["step"].as_u64()?, candidates })
}

/// Makes labels unique.
pub(crate) fn distinguish(runs: &mut [RunFiles]) {
    for index in 1..runs.len() {
        let (before, rest) = runs.split_at_mut(index);
        let label = rest[0].label.clone();
        let taken = |label: &str| before.iter().any(|run| run.label == label);
        if taken(&label) {
            let numbered = (2..).map(|number| format!("{label} ({number})"));
            rest[0].label = numbered.into_iter().find(|label| !taken(label)).unwrap_or(label);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn run(job: &Path, name: &str, lines: &str, continues: &Value) -> PathBuf {
        let dir = job.join(name);
        fs_err::create_dir_all(&dir).unwrap();
        fs_err::write(dir.join(METRICS), lines).unwrap();
        fs_err::write(dir.join(ENVIRONMENT_FILE), json!({ "continues": continues }).to_string()).unwrap();
        dir
    }

    fn line(step: u64) -> String {
        format!("{{\"_step\": {step}, \"train/loss\": 1}}\n")
    }

    #[test]
    fn run_is_named_by_its_directory_its_job_or_its_file() {
        let root = tempfile::tempdir().unwrap();
        let job = fs_err::canonicalize(root.path()).unwrap().join("train");
        let old = run(&job, "20260101-000000", "", &Value::Null);
        let new = run(&job, "20260102-000000", "", &Value::Null);
        let found = |path: &Path| find(path).unwrap().dir.unwrap();
        assert_eq!((found(&old), found(&job), found(&old.join(METRICS))), (old.clone(), new, old.clone()));
        fs_err::os::unix::fs::symlink("20260101-000000", job.join("latest")).unwrap();
        assert_eq!(find(&job).unwrap().label, "train/20260101-000000");
        let copy = root.path().join("copy.jsonl");
        fs_err::write(&copy, "").unwrap();
        assert_eq!(find(&copy).unwrap().dir, None);
        assert!(find(&root.path().join("missing")).unwrap_err().contains("missing"));
        let empty = root.path().join("empty");
        fs_err::create_dir(&empty).unwrap();
        assert!(find(&empty).unwrap_err().starts_with("no run in "));
    }

    #[test]
    fn runs_that_are_continued_come_first_unless_their_points_were_copied_or_are_gone() {
        let job = tempfile::tempdir().unwrap();
        let job = fs_err::canonicalize(job.path()).unwrap();
        let continues =
            |run: &str, step: u64| json!({ "run": run, "step": step, "checkpoint": "/gone/c/step-1" });
        let a = run(&job, "a", &line(1), &Value::Null);
        let b = run(&job, "b", &line(31), &continues("a", 30));
        let c = run(&job, "c", &line(21), &continues("b", 20));
        let copied = run(&job, "d", &line(1), &continues("b", 20));
        let orphan = run(&job, "e", &line(11), &continues("gone", 10));
        let circle = run(&job, "f", &line(11), &continues("f", 10));
        let of = |dir: &Path| {
            let mut notes = Vec::new();
            let sources = sources(&find(dir).unwrap(), &mut notes);
            let sources: Vec<_> = sources.into_iter().map(|source| (source.path, source.until)).collect();
            (sources, notes)
        };
        let file = |dir: &Path, until: u64| (dir.join(METRICS), until);
        // Run c resumes at a step before the first step of b.
        assert_eq!(of(&c), (vec![file(&a, 20), file(&b, 20), file(&c, u64::MAX)], vec![]));
        assert_eq!(of(&copied), (vec![file(&copied, u64::MAX)], vec![]));
        let (sources, notes) = of(&orphan);
        assert_eq!(sources, [file(&orphan, u64::MAX)]);
        assert_eq!(notes, ["the steps up to 10 are those of run gone, which no longer exists"]);
        assert!(of(&circle).0.len() <= 2);
    }

    #[test]
    fn equal_labels_are_numbered() {
        let run = |label: &str| RunFiles { label: label.into(), dir: None, metrics: PathBuf::new() };
        let mut runs = [run("a"), run("a"), run("b"), run("a")];
        distinguish(&mut runs);
        assert_eq!(runs.map(|run| run.label), ["a", "a (2)", "b", "a (3)"]);
    }
}
