//! Checks the data that TensorBoard itself reads from the event file of a run.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use xlaunch_proto::metrics::METRICS;
use xlaunch_tests::{Job, Process, requirements};

xlaunch_harness::tests! {
    needs requirements::tensorboard:
    event_file_has_the_values_of_metrics_jsonl,
    continued_run_is_one_curve,
    loads_of_experts_are_in_every_record_of_a_run;
}

/// Prints `[step, tag, value]` for every scalar in a directory's event files, one per line.
const READER: &str = r#"
import glob, json, sys
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
for path in glob.glob(sys.argv[1] + "/events.out.tfevents.*"):
    for event in LegacyEventFileLoader(path).Load():
        for value in event.summary.value:
            print(json.dumps([event.step, value.tag, value.simple_value]))
"#;

/// Returns step, tag and value of every scalar.
fn read_scalars(dir: &Path) -> Vec<Value> {
    let output = Command::new(requirements::python_path()).args(["-c", READER]).arg(dir).output().unwrap();
    let lines = String::from_utf8_lossy(&output.stdout);
    let scalars: Vec<Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(!scalars.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    scalars
}

fn event_file_has_the_values_of_metrics_jsonl() {
    let job = Job::new();
    job.run_ok(&["--set", "observe.tensorboard=true", "--set", "train.eval_every=4"]);
    let found = read_scalars(&job.run_dir().join("tensorboard"));

    let metrics = job.metrics();
    let mut expected = Vec::new();
    for line in &metrics {
        for metric in METRICS.iter().filter(|metric| metric.in_tensorboard) {
            let Some(value) = line[metric.key].as_f64() else { continue };
            let tags = [metric.key].into_iter().chain(metric.deprecated_tag);
            expected.extend(tags.map(|tag| (line["_step"].clone(), tag, value)));
        }
    }
    assert_eq!(expected.len(), 8 * 8 + 4, "{expected:?}");
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, (step, tag, value)) in found.iter().zip(expected) {
        assert_eq!((&found[0], &found[1]), (&step, &Value::from(tag)));
        let read = found[2].as_f64().unwrap_or(f64::NAN);
        assert!((read - value).abs() <= value.abs() * 1e-6, "{tag}: {read}, not {value}");
    }
}

/// Prints the steps of `train/loss` that TensorBoard shows for a directory.
const ACCUMULATOR: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
print(json.dumps([event.step for event in events.Scalars("train/loss")]))
"#;

/// Prints the histograms with this tag by step: the number of choices in each bucket.
const HISTOGRAMS: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"histograms": 0})
events.Reload()
found = events.Histograms("experts/load/1")
print(json.dumps({event.step: event.histogram_value.bucket for event in found}))
"#;

fn loads_of_experts_are_in_every_record_of_a_run() {
    let job = Job::new();
    let model =
        ["model.experts=4", "model.experts_per_token=2", "model.expert_ffn=24", "model.dense_layers=1"];
    let settings = ["observe.tensorboard=true", "train.eval_every=5"];
    job.run_ok(&[&model[..], &settings].concat().iter().flat_map(|key| ["--set", key]).collect::<Vec<_>>());
    let metrics = job.metrics();
    let loads = metrics.iter().filter(|line| line.get("experts/load").is_some());
    let loads: BTreeMap<u64, Vec<f64>> = loads
        .map(|line| {
            let shares = line["experts/load"]["1"].as_array().unwrap().iter();
            (line["_step"].as_u64().unwrap(), shares.map(|share| share.as_f64().unwrap()).collect())
        })
        .collect();
    assert!(loads.keys().eq([&5, &8]), "{loads:?}");
    for shares in loads.values() {
        assert!(shares.len() == 4 && (shares.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{shares:?}");
    }
    let dir = job.run_dir().join("tensorboard");
    let output =
        Command::new(requirements::python_path()).args(["-c", HISTOGRAMS]).arg(dir).output().unwrap();
    let found: BTreeMap<u64, Vec<f64>> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    assert!(found.keys().eq(loads.keys()), "{found:?}");
    for (found, shares) in found.values().flatten().zip(loads.values().flatten()) {
        assert!((found - shares).abs() < 1e-6, "{found}, not {shares}");
    }
    let report = Process::spawn(&mut job.command(&["report", "runs/train", "--output", "-"])).wait();
    let cell = format!("<title>block 1, expert 3: {:.1} %</title>", 100.0 * loads[&8][3]);
    assert!(report.stdout.contains(&cell), "{cell}: {}", report.stderr);
}

fn continued_run_is_one_curve() {
    let job = Job::new();
    let settings = ["--set", "observe.tensorboard=true", "--set", "checkpoint.every=5"];
    job.run_ok(&settings);
    let resume = format!("--resume={}", job.run_dir().join("checkpoints/step-00000005").display());
    job.run_ok(&[&settings[..], &[&resume]].concat());
    let dir = job.run_dir().join("tensorboard");
    let output =
        Command::new(requirements::python_path()).args(["-c", ACCUMULATOR]).arg(dir).output().unwrap();
    let steps: Vec<u64> = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(steps, (1..=8).collect::<Vec<_>>());
}
