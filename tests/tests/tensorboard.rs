//! What TensorBoard itself reads in the event file of a run.
//!
//! Needs a Python with tensorboard: `XLAUNCH_TEST_PYTHON`, or `python3`. Without one, the test says so and is skipped.

#![expect(clippy::print_stderr, reason = "a skipped test says why")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use xlaunch_tests::Job;

/// Prints `[step, tag, value]` of every scalar in a directory's event files, a line each.
const READER: &str = r#"
import glob, json, sys
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
for path in glob.glob(sys.argv[1] + "/events.out.tfevents.*"):
    for event in LegacyEventFileLoader(path).Load():
        for value in event.summary.value:
            print(json.dumps([event.step, value.tag, value.simple_value]))
"#;

/// The interpreter, if it has TensorBoard.
fn python() -> Option<PathBuf> {
    let python = std::env::var_os("XLAUNCH_TEST_PYTHON").unwrap_or_else(|| "python3".into());
    let mut import = Command::new(&python);
    import.args(["-c", "import tensorboard"]).stdout(Stdio::null()).stderr(Stdio::null());
    if import.status().is_ok_and(|status| status.success()) {
        return Some(python.into());
    }
    eprintln!("skipped: {} has no tensorboard; XLAUNCH_TEST_PYTHON names a Python", python.display());
    None
}

/// Step, tag and value of every scalar.
fn read(python: &Path, dir: &Path) -> Vec<Value> {
    let output = Command::new(python).args(["-c", READER]).arg(dir).output();
    let (scalars, problem) = output.map_or_else(
        |error| (Vec::new(), error.to_string()),
        |output| (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned()),
    );
    let lines = String::from_utf8_lossy(&scalars).into_owned();
    let scalars: Vec<Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(!scalars.is_empty(), "nothing was read: {problem}");
    scalars
}

#[test]
fn tensorboard_reads_the_values_of_the_metrics() {
    let Some(python) = python() else { return };
    let job = Job::new();
    job.run_well(&["--set", "observe.tensorboard=true", "--set", "train.eval_every=4"]);
    let found = read(&python, &job.latest().join("tensorboard"));

    let names = [
        ("train/loss", "train/loss"),
        ("lr", "train/lr"),
        ("train/grad_norm", "train/grad_norm"),
        ("perf/tokens_per_s", "perf/tokens_per_second"),
        ("perf/step_seconds", "perf/step_seconds"),
        ("val/loss", "val/loss"),
    ];
    let metrics = job.metrics();
    let of_line = |line: &Value| {
        let step = line["_step"].clone();
        names.map(|(tag, key)| line[key].as_f64().map(|value| (step.clone(), tag, value)))
    };
    let expected: Vec<_> = metrics.iter().flat_map(of_line).flatten().collect();
    assert_eq!(expected.len(), 8 * 5 + 2, "{expected:?}");
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, (step, tag, value)) in found.iter().zip(expected) {
        assert_eq!((&found[0], &found[1]), (&step, &Value::from(tag)));
        let read = found[2].as_f64().unwrap_or(f64::NAN);
        assert!((read - value).abs() <= value.abs() * 1e-6, "{tag}: {read}, not {value}");
    }
}
