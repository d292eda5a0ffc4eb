//! `xlaunch report`: training runs as one HTML file, or their figures as JSON.
//!
//! ```text
//! RUN --locate--> files of the run and of those that it continues
//! metrics.jsonl --lines--> points --curves--> those of the final curve --reduce--> at most 2000 points per curve
//! job.json, environment.json, summary.json, samples.jsonl --documents--> texts
//! all of it --page--> HTML (assets/: script and styles)
//! ```
//! Invariants:
//! - Memory does not depend on the length of a run: files are read line by line, twice.
//! - Data that is missing, broken, of another version or still being written is left out, and a note says so.
//! - No text from a run becomes markup or script: all of it is escaped, and the page's policy allows only its own
//!   script.

mod curves;
mod documents;
mod downsampled;
mod lines;
mod locate;
mod page;
mod reduce;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use xlaunch_agent::run_summary;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::lineage::ENVIRONMENT_FILE;
use xlaunch_spec::refusal::Refusal;

use curves::Curves;
use documents::{JOB, METRICS, Sample};
use locate::RunFiles;
pub(crate) use page::{MARK, html};

/// Maximum number of runs in a report, which is the number of colours.
pub(crate) const MAX_RUNS: usize = 8;

/// The contents of a report about a run.
#[derive(Debug, Default)]
pub(crate) struct Run {
    label: String,
    path: String,
    curves: Curves,
    /// Documents as they are on disk; `None` if there is no file.
    config: Option<Value>,
    environment: Option<Value>,
    ending: Option<Value>,
    samples: Vec<Sample>,
    /// Notes about files that could not be read.
    notes: Vec<String>,
}

/// Reads the runs that these paths name.
///
/// # Errors
/// A path does not lead to a run, or a file cannot be read.
pub(crate) fn read(paths: &[PathBuf]) -> Result<Vec<Run>, Refusal> {
    let usage = |message: String| Refusal::new(ExitCode::Usage, message);
    let found: Result<Vec<RunFiles>, _> =
        paths.iter().map(|path| locate::find(path).map_err(usage)).collect();
    let mut found = found?;
    locate::distinguish(&mut found);
    found.iter().map(read_run).collect()
}

fn read_run(files: &RunFiles) -> Result<Run, Refusal> {
    let mut notes = Vec::new();
    let sources = locate::sources(files, &mut notes);
    if !files.metrics.is_file() {
        notes.push(match lines::open(&files.metrics) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => error.to_string(),
            _ => format!("there is no {}", files.metrics.display()),
        });
    }
    let mut curves =
        curves::read(&sources).map_err(|error| Refusal::new(ExitCode::Data, error.to_string()))?;
    notes.append(&mut curves.notes);
    if files.dir.is_none() && curves.points.iter().all(Vec::is_empty) {
        let message = format!(
            "no metrics in {}; name the directory of a run or of a job, or a `{METRICS}`",
            files.metrics.display()
        );
        return Err(Refusal::new(ExitCode::Usage, message));
    }
    let mut document = |name: &str| {
        let value = documents::read(&files.dir.as_ref()?.join(name));
        value.unwrap_or_else(|problem| {
            notes.push(problem);
            None
        })
    };
    let (config, environment, ending) =
        (document(JOB), document(ENVIRONMENT_FILE), document(run_summary::SUMMARY_FILE));
    let samples = files.dir.as_deref().map(|dir| documents::samples(dir, &mut notes)).unwrap_or_default();
    let path = files.dir.as_ref().unwrap_or(&files.metrics).display().to_string();
    Ok(Run { label: files.label.clone(), path, curves, config, environment, ending, samples, notes })
}

/// Returns a note about broken lines.
fn broken_lines(path: &Path, count: u64) -> String {
    let what = if count == 1 { "1 line is".into() } else { format!("{count} lines are") };
    format!("{}: {what} broken, and left out", path.display())
}

/// Returns the notes of all runs, each with the name of its run, which may be the file that the note is about.
pub(crate) fn notes(runs: &[Run]) -> Vec<String> {
    let named = |run: &Run, note: &String| {
        if note.starts_with(&run.label) { note.clone() } else { format!("{}: {note}", run.label) }
    };
    runs.iter().flat_map(|run| run.notes.iter().map(move |note| named(run, note))).collect()
}

/// Returns the same figures of the runs as the page shows.
pub(crate) fn json(runs: &[Run]) -> Value {
    json!({ "version": 1, "runs": runs.iter().map(Run::json).collect::<Vec<_>>() })
}

impl Run {
    fn json(&self) -> Value {
        let figures = &self.curves.figures;
        json!({
            "run": self.label,
            "path": self.path,
            "steps": figures.steps,
            "tokens": figures.tokens,
            "step_seconds": figures.step_seconds,
            "wall_seconds": self.ended("/seconds"),
            "loss": figures.loss.json(),
            "val_loss": figures.val_loss.json(),
            "bits_per_byte": figures.bits_per_byte.json(),
            "tokens_per_second": figures.tokens_per_second,
            "mfu": figures.mfu,
            "useful_percent": self.ended("/accounting/useful_percent"),
            "skipped_steps": figures.skipped_steps,
            "restarts": figures.restarts,
            "expert_loads": self.curves.expert_loads.as_ref().map(|(step, blocks)| {
                json!({ "step": step, "blocks": blocks })
            }),
            "exit_code": self.ending.as_ref().map(|ending| &ending["exit_code"]),
            "environment": self.environment,
            "notes": self.notes,
        })
    }

    /// Returns a number from `summary.json`; `None` while the run trains, and for runs of older versions.
    fn ended(&self, pointer: &str) -> Option<f64> {
        self.ending.as_ref()?.pointer(pointer)?.as_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_with_nothing_but_a_configuration_is_reported_with_a_note() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join(JOB), "{\"train\": {\"lr\": 1}}").unwrap();
        fs_err::write(dir.path().join(run_summary::SUMMARY_FILE), "nonsense").unwrap();
        let runs = read(&[dir.path().to_owned()]).unwrap();
        let report = json(&runs);
        let run = &report["runs"][0];
        assert_eq!((&run["steps"], &run["loss"]["last"]), (&json!(0), &Value::Null));
        let notes = run["notes"].to_string();
        assert!(notes.contains("there is no") && notes.contains("summary.json"), "{notes}");
        assert!(html(&runs).contains("there is no"));
        let refusal = read(&["/no/such/run".into()]).unwrap_err();
        assert!(refusal.exit == ExitCode::Usage && refusal.message.contains("/no/such/run"), "{refusal:?}");
    }

    #[test]
    fn file_without_metrics_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("copy.jsonl");
        for text in ["# Title\n\nText\n", "{\"exit_code\": 0}\n", "{\"_step\": 4, \"text\": \"a\"}\n", ""] {
            fs_err::write(&file, text).unwrap();
            let refusal = read(std::slice::from_ref(&file)).unwrap_err();
            let words = format!("no metrics in {}", file.display());
            assert!(refusal.exit == ExitCode::Usage && refusal.message.contains(&words), "{refusal:?}");
        }
        fs_err::write(&file, "{\"_step\": 4, \"train/loss\": 1}\nnonsense\n").unwrap();
        let broken = format!("{}: 1 line is broken, and left out", file.display());
        assert_eq!(notes(&read(&[file]).unwrap()), [broken]);
    }
}
