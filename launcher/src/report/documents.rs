//! The files of a run's directory other than its metrics: configuration, environment, summary and samples. Each may be
//! absent, or written by another version.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::downsampled::Downsampled;
use super::lines::{Lines, open};
use xlaunch_spec::quantities::bytes_text;

/// File with the points of a run.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// File with the configuration of a run.
pub(crate) const JOB: &str = "job.json";
/// File with the texts sampled from the model.
const SAMPLES: &str = "samples.jsonl";
/// Maximum size of a document that is read.
const MAX_DOCUMENT_BYTES: u64 = 16 << 20;
/// Maximum number of samples of a run in a report: evenly spaced ones, and the last.
const MAX_SAMPLES: usize = 24;
/// Maximum number of characters of a sample in a report.
const MAX_SAMPLE_CHARS: usize = 4000;

/// A text sampled from the model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Sample {
    #[serde(rename = "_step")]
    pub(crate) step: u64,
    #[serde(default)]
    pub(crate) prompt: String,
    pub(crate) text: String,
}

/// Reads a JSON object from a file; `None` if there is no file.
pub(crate) fn read(path: &Path) -> Result<Option<Value>, String> {
    let mut text = Vec::new();
    let file = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|error| error.to_string())?,
    };
    let bytes = file.take(MAX_DOCUMENT_BYTES).read_to_end(&mut text).map_err(|error| error.to_string())?;
    if bytes as u64 == MAX_DOCUMENT_BYTES {
        return Err(format!("{} is too large for a description of a run", path.display()));
    }
    let value: Result<Map<String, Value>, _> = serde_json::from_slice(&text);
    value.map(|object| Some(Value::Object(object))).map_err(|error| format!("{}: {error}", path.display()))
}

/// Reads `state.json` of the newest checkpoint.
pub(crate) fn newest_state(run: &Path) -> Option<Value> {
    let entries = fs_err::read_dir(run.join("checkpoints")).ok()?;
    let newest =
        entries.flatten().map(|entry| entry.path().join("state.json")).filter(|path| path.is_file()).max()?;
    read(&newest).ok()?
}

/// Returns keys and values, with the keys of inner objects joined by dots: `train.lr` and `0.0003`.
pub(crate) fn flatten(value: &Value) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    flatten_into("", value, &mut out);
    out
}

fn flatten_into(prefix: &str, value: &Value, out: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten_into(&name, value, out);
            }
        }
        Value::Null => drop(out.insert(prefix.into(), "none".into())),
        other => drop(out.insert(prefix.into(), other.to_string())),
    }
}

/// Returns the lines of an environment, in the order of the page. Missing values are left out.
pub(crate) fn environment(value: &Value) -> Vec<(&'static str, String)> {
    let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let number = |pointer: &str| value.pointer(pointer).and_then(Value::as_u64);
    let version = text("/xlaunch/version").map(|version| match text("/xlaunch/commit") {
        Some(commit) => format!("{version}, commit {}", commit.chars().take(12).collect::<String>()),
        None => version,
    });
    let cpu = text("/host/cpu").map(|cpu| match number("/host/cpus") {
        Some(count) => format!("{cpu}, {count} CPUs"),
        None => cpu,
    });
    let driver = text("/driver/version").map(|version| match text("/driver/cuda") {
        Some(cuda) => format!("{version}, CUDA {cuda}"),
        None => version,
    });
    let continues = number("/continues/step")
        .map(|step| format!("run {} after step {step}", text("/continues/run").unwrap_or_default()));
    let rows = [
        ("started", number("/started_unix_seconds").and_then(date)),
        ("xlaunch", version),
        ("command", text("/command_line")),
        ("directory", text("/working_directory")),
        ("continues", continues),
        ("data", data(&value["data"])),
        ("ranks", number("/world_size").map(|ranks| ranks.to_string())),
        ("GPUs", gpus(&value["gpus"])),
        ("driver", driver),
        ("host", text("/host/name")),
        ("CPU", cpu),
        ("memory", number("/host/memory_bytes").map(bytes_text)),
        ("kernel", text("/host/kernel")),
    ];
    rows.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn date(unix_seconds: u64) -> Option<String> {
    let at = UNIX_EPOCH.checked_add(Duration::from_secs(unix_seconds))?;
    // Years after 9999 cannot be formatted.
    (unix_seconds < 253_402_300_800).then(|| humantime::format_rfc3339_seconds(at).to_string())
}

/// Describes the data, such as `train: 9500000 tokens (0f3a51c2), validation: 500000 tokens (77ab0c1d)`.
fn data(value: &Value) -> Option<String> {
    let splits = value.as_object()?.iter().filter_map(|(split, data)| {
        let hash: String = data["hash"].as_str()?.chars().take(8).collect();
        Some(format!("{split}: {} tokens ({hash})", data["tokens"].as_u64()?))
    });
    Some(splits.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
}

/// Describes the GPUs, such as `8 x NVIDIA H100 80GB HBM3, 79.6 GiB`.
fn gpus(value: &Value) -> Option<String> {
    let mut kinds: BTreeMap<(String, u64), usize> = BTreeMap::new();
    for gpu in value.as_array()? {
        let name = gpu["name"].as_str().unwrap_or("unknown GPU").to_owned();
        *kinds.entry((name, gpu["memory_bytes"].as_u64().unwrap_or(0))).or_default() += 1;
    }
    let kind =
        |((name, bytes), count): ((String, u64), usize)| format!("{count} x {name}, {}", bytes_text(bytes));
    Some(kinds.into_iter().map(kind).collect::<Vec<_>>().join("; ")).filter(|text| !text.is_empty())
}

/// Returns the samples of a run, oldest first. After a restart, a sample replaces earlier ones of the same or a later
/// step.
pub(crate) fn samples(run: &Path, notes: &mut Vec<String>) -> Vec<Sample> {
    let path = run.join(SAMPLES);
    let mut lines = match Lines::open(&path, u64::MAX) {
        Ok(lines) => lines,
        Err(error) => {
            notes.extend((error.kind() != io::ErrorKind::NotFound).then(|| error.to_string()));
            return Vec::new();
        }
    };
    let (mut thinned, mut last, mut broken) = (Downsampled::new(MAX_SAMPLES), None, 0);
    loop {
        match lines.next() {
            Ok(Some((line, cut))) => match serde_json::from_slice::<Sample>(line) {
                Ok(mut sample) => {
                    sample.text = truncated(&sample.text);
                    sample.prompt = truncated(&sample.prompt);
                    thinned.add(sample.clone());
                    last = Some(sample);
                }
                Err(_) => broken += u64::from(!cut),
            },
            Ok(None) => break,
            Err(error) => {
                notes.push(error.to_string());
                break;
            }
        }
    }
    if broken > 0 {
        notes.push(super::broken_lines(&path, broken));
    }
    let mut samples: Vec<Sample> = Vec::new();
    for sample in thinned.into_items().into_iter().chain(last) {
        while samples.pop_if(|other| other.step >= sample.step).is_some() {}
        samples.push(sample);
    }
    samples
}

fn truncated(text: &str) -> String {
    match text.char_indices().nth(MAX_SAMPLE_CHARS) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn configuration_is_flattened_to_dotted_keys() {
        let flat =
            flatten(&json!({ "train": { "lr": 3e-4, "clip": null }, "data": { "train": ["a", "b"] } }));
        let expected = [("data.train", "[\"a\",\"b\"]"), ("train.clip", "none"), ("train.lr", "0.0003")];
        assert_eq!(flat, expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    }

    #[test]
    fn environment_of_any_version_is_shown_as_far_as_it_is_recorded() {
        let value = json!({
            "started_unix_seconds": 1_795_407_300_u64, "xlaunch": { "version": "0.2.0", "commit": "0123456789abcdef" },
            "gpus": [{ "name": "NVIDIA H200", "memory_bytes": 1_u64 << 37 }, { "name": "NVIDIA H200",
            "memory_bytes": 1_u64 << 37 }], "driver": null, "world_size": "many", "future": { "a": 1 },
            "data": { "train": { "tokens": 7, "hash": "0123456789" } }, "continues": { "run": "a", "step": 5 },
        });
        let expected = [
            ("started", "2026-11-23T04:15:00Z"),
            ("xlaunch", "0.2.0, commit 0123456789ab"),
            ("continues", "run a after step 5"),
            ("data", "train: 7 tokens (01234567)"),
            ("GPUs", "2 x NVIDIA H200, 128 GiB"),
        ];
        assert_eq!(environment(&value), expected.map(|(name, value)| (name, value.to_owned())));
        assert!(environment(&json!({ "gpus": 3, "data": [], "started_unix_seconds": u64::MAX })).is_empty());
    }

    #[test]
    fn samples_are_thinned_and_repeated_ones_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let mut notes = Vec::new();
        assert!(samples(dir.path(), &mut notes).is_empty() && notes.is_empty());
        let line =
            |step: u64, text: &str| format!("{}\n", json!({ "_step": step, "prompt": "p", "text": text }));
        let lines = [line(10, "a"), line(20, "b"), line(20, "c"), "{}\n".into(), "{\"_st".into()].concat();
        fs_err::write(dir.path().join(SAMPLES), lines).unwrap();
        let texts: Vec<_> = samples(dir.path(), &mut notes).into_iter().map(|s| (s.step, s.text)).collect();
        assert_eq!(texts, [(10, "a".to_owned()), (20, "c".to_owned())]);
        assert!(notes[0].ends_with("1 line is broken, and left out"), "{notes:?}");
        let lines: String = (1..=1000).map(|step| line(step, "x")).collect();
        fs_err::write(dir.path().join(SAMPLES), lines).unwrap();
        let found = samples(dir.path(), &mut notes);
        assert!(found.len() <= MAX_SAMPLES + 1 && found.last().unwrap().step == 1000);
    }

    #[test]
    fn document_that_is_no_object_is_refused_and_one_that_is_missing_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(JOB);
        assert_eq!(read(&path), Ok(None));
        fs_err::write(&path, "[1]").unwrap();
        assert!(read(&path).unwrap_err().contains("job.json"));
    }

    #[test]
    fn fifo_in_place_of_a_file_is_reported_without_waiting_for_its_writer() {
        use rustix::fs::{CWD, FileType, mknodat};
        let dir = tempfile::tempdir().unwrap();
        for name in [JOB, SAMPLES] {
            mknodat(CWD, dir.path().join(name), FileType::Fifo, 0o600.into(), 0).unwrap();
        }
        let error = read(&dir.path().join(JOB)).unwrap_err();
        assert!(error.ends_with("job.json: it is not a regular file"), "{error}");
        let mut notes = Vec::new();
        assert!(samples(dir.path(), &mut notes).is_empty());
        assert!(notes[0].ends_with("samples.jsonl: it is not a regular file"), "{notes:?}");
    }
}
