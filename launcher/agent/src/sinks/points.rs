//! A file of training curve points: one JSON object per line, with the step in `_step`.
//!
//! A run leaves a single consistent curve:
//! - a run that continues another one starts with the points of that run up to the step it resumes at;
//! - when an attempt resumes at an earlier step, the points after that step are removed before they are repeated;
//! - when another node takes over rank 0, it appends to the file.

use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use fs_err::File;
use serde::Deserialize;
use serde_json::Value;

use super::appender::Appender;

#[derive(Debug)]
pub(super) struct Points {
    file: Appender,
    /// The corresponding file of the run that this one continues, until its points have been copied.
    parent: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Point {
    #[serde(rename = "_step")]
    step: u64,
}

impl Points {
    pub(super) fn new(path: PathBuf, parent: Option<PathBuf>) -> Self {
        // A run whose id was used before continues in the same directory.
        let parent = parent.filter(|parent| !is_same(parent, &path));
        Self { file: Appender::new(path), parent }
    }

    /// Creates the file immediately, for readers that follow it.
    pub(super) fn created(mut self) -> Self {
        // If this fails, the first point creates the file.
        let _ = self.file.create();
        self
    }

    /// Prepares the file for an attempt that starts after `first_step` completed steps.
    pub(super) fn begin(&mut self, first_step: u64) -> io::Result<()> {
        match self.parent.take() {
            // If the other run has no such file, the curve starts here.
            Some(parent) if parent.is_file() => self.copy(&parent, first_step),
            _ => self.rewind(first_step),
        }
    }

    pub(super) fn append(&mut self, point: &Value) -> io::Result<()> {
        self.file.append(format!("{point}\n").into_bytes())
    }

    /// Writes the points that could not be written before.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    /// Returns a warning if the file was moved or deleted, and began again, since the last call.
    pub(super) fn take_warning(&mut self) -> Option<String> {
        self.file.take_restarted().then(|| {
            format!(
                "{} was moved or deleted: it begins again without earlier steps; checkpoints go beside it",
                self.file.path().display()
            )
        })
    }

    /// Number of points that are not in the file.
    pub(super) fn missing(&self) -> u64 {
        self.file.missing()
    }

    fn copy(&mut self, parent: &Path, last_step: u64) -> io::Result<()> {
        let mut lines = BufReader::new(File::open(parent)?);
        let mut result = Ok(());
        loop {
            let mut line = Vec::new();
            if lines.read_until(b'\n', &mut line)? == 0 {
                return result;
            }
            // The last line of a killed run may be incomplete.
            if step_of(&line).is_some_and(|step| step <= last_step) {
                result = self.file.append(line);
            }
        }
    }

    /// Truncates the file before the first point after `last_step`.
    pub(super) fn rewind(&mut self, last_step: u64) -> io::Result<()> {
        let end = first_after(self.file.path(), last_step)?;
        self.file.cut(end, |line| step_of(line).is_some_and(|step| step <= last_step))
    }
}

/// Returns the offset of the first point after `last_step`, or of an incomplete line that a killed writer left.
fn first_after(path: &Path, last_step: u64) -> io::Result<Option<u64>> {
    let mut lines = match File::open(path) {
        Ok(file) => BufReader::new(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let (mut line, mut end) = (Vec::new(), 0);
    loop {
        line.clear();
        let bytes = lines.read_until(b'\n', &mut line)?;
        if bytes == 0 {
            return Ok(None);
        }
        if !line.ends_with(b"\n") || step_of(&line).is_some_and(|step| step > last_step) {
            return Ok(Some(end));
        }
        end += bytes as u64;
    }
}

/// Returns whether both paths name the same file, which need not exist.
fn is_same(a: &Path, b: &Path) -> bool {
    let dir = |path: &Path| fs_err::canonicalize(path.parent()?).ok();
    a.file_name() == b.file_name() && dir(a) == dir(b)
}

/// The step of a complete line.
fn step_of(line: &[u8]) -> Option<u64> {
    let line = line.strip_suffix(b"\n")?;
    Some(serde_json::from_slice::<Point>(line).ok()?.step)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::*;

    fn steps(path: &PathBuf) -> Vec<u64> {
        let text = fs_err::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str::<Point>(line).unwrap().step).collect()
    }

    #[test]
    fn points_after_the_resumed_step_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut points = Points::new(path.clone(), None);
        points.begin(0).unwrap();
        assert!(!path.exists(), "nothing to write yet");
        for step in [1, 2, 2, 3, 4] {
            points.append(&json!({ "_step": step })).unwrap();
        }
        points.begin(2).unwrap();
        assert_eq!(steps(&path), [1, 2, 2]);
        points.append(&json!({ "_step": 3 })).unwrap();
        points.begin(3).unwrap();
        assert_eq!(steps(&path), [1, 2, 2, 3]);
    }

    #[test]
    fn node_that_takes_over_rank_0_continues_the_curve() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut first = Points::new(path.clone(), None).created();
        first.begin(0).unwrap();
        for step in 1..5 {
            first.append(&json!({ "_step": step })).unwrap();
        }
        // The node was killed while it wrote the next line.
        fs_err::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"_ste").unwrap();
        let mut second = Points::new(path.clone(), None).created();
        second.begin(3).unwrap();
        second.append(&json!({ "_step": 4 })).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        // A run with an id that was used before has itself as parent.
        let mut again = Points::new(path.clone(), Some(path.clone()));
        again.begin(2).unwrap();
        again.append(&json!({ "_step": 3 })).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
    }

    #[test]
    fn continued_run_starts_with_the_points_of_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        let (parent, path) = (dir.path().join("parent.jsonl"), dir.path().join("metrics.jsonl"));
        let lines = "{\"_step\": 1}\nnot a point\n{\"_step\": 2, \"x\": null}\n{\"_step\": 3}\n{\"_step\": 2";
        fs_err::write(&parent, lines).unwrap();
        let mut points = Points::new(path.clone(), Some(parent)).created();
        points.begin(2).unwrap();
        points.append(&json!({ "_step": 3 })).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
        // A restart truncates the points of this run, and does not copy the parent's again.
        points.begin(2).unwrap();
        assert_eq!(steps(&path), [1, 2]);

        let missing = Some(dir.path().join("missing.jsonl"));
        let mut points = Points::new(dir.path().join("other.jsonl"), missing);
        points.begin(2).unwrap();
        points.append(&json!({ "_step": 3 })).unwrap();
        assert_eq!(steps(&points.file.path().to_path_buf()), [3]);
    }
}
