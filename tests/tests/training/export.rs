//! `xlaunch export`, and training that starts from existing weights.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Output, Process, read_state, requirements, xlaunch_path};

xlaunch_harness::tests! {
    exported_model_is_where_another_job_starts,
    model_keys_that_contradict_the_weights_are_refused_with_their_place,
    damaged_model_directory_is_refused_before_any_run,
    killed_export_is_complete_or_absent,
    export_says_what_it_did_and_refuses_used_directories;
    needs requirements::mount_namespace:
    export_to_a_full_disk_leaves_nothing;
}

const EXPORTS_KILLED: u64 = 100;
/// Settings of a step that changes no weight: the update is smaller than any rounding.
const NO_CHANGE: [&str; 10] = [
    "--set",
    "train.steps=1",
    "--set",
    "train.lr=1.2e-38",
    "--set",
    "train.warmup=0",
    "--set",
    "train.weight_decay=0",
    "--set",
    "train.eval_every=0",
];
/// A configuration without `[model]`.
const CONFIG: &str = "[data]\ntrain = [\"text/*.txt\"]\n[train]\nsample = 0\n[engine]\ndevice = \"cpu\"\n";

fn export(job: &Job, args: &[&str]) -> Output {
    Process::spawn(&mut job.command(&[&["export"], args].concat())).wait()
}

fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}

fn exported_model_is_where_another_job_starts() {
    let job = Job::new();
    job.run_ok(&[]);
    let run = job.run_dir();
    let output = export(&job, &["runs/train/latest", "--output", "out"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert_eq!(PathBuf::from(output.stdout.trim()), std::fs::canonicalize(job.path().join("out")).unwrap());
    let weights = |step: u64, run: &Path| {
        let mut state = read_state(&run.join(format!("checkpoints/step-{step:08}")));
        state.retain(|name, _| !name.starts_with("m.") && !name.starts_with("v."));
        state
    };
    let trained = weights(8, &run);
    job.write("train.toml", CONFIG);
    for init in ["out", "runs/train", &run.display().to_string()] {
        let init = if init == "runs/train" { format!("{}/checkpoints", run.display()) } else { init.into() };
        job.run_ok(&[&NO_CHANGE[..], &["--set", &format!("checkpoint.init={init}")]].concat());
        assert!(weights(1, &job.run_dir()) == trained, "{init}");
    }
    // Exporting, starting from the export and exporting again gives the same model.
    assert_eq!(export(&job, &["runs/train/latest", "--output", "again"]).code, 0);
    let without_card = |dir: &str| {
        let mut files = contents(&job.path().join(dir));
        files.retain(|(name, _)| name != "README.md");
        files
    };
    assert!(without_card("out") == without_card("again"));
    // Shorter sequences with the same model.
    let short = ["--set", "checkpoint.init=out", "--set", "model.seq=16"];
    job.run_ok(&[&NO_CHANGE[..], &short].concat());
    assert!(weights(1, &job.run_dir()) == trained);
}

fn model_keys_that_contradict_the_weights_are_refused_with_their_place() {
    let job = Job::new();
    job.run_ok(&[]);
    assert_eq!(export(&job, &["runs/train", "--output", "out"]).code, 65, "a directory of runs");
    assert_eq!(export(&job, &["runs/train/latest", "--output", "out"]).code, 0);
    job.write("train.toml", format!("{CONFIG}[checkpoint]\ninit = \"out\"\n[model]\nlayers = 3\n"));
    let runs = || std::fs::read_dir(job.path().join("runs/train")).unwrap().count();
    let before = runs();
    let output = job.run(&[]);
    assert_eq!(output.code, 2, "{}", output.stderr);
    for text in ["train.toml:10:10", "model.layers: 3 contradicts checkpoint.init: it is 2 in ", "out"] {
        assert!(output.stderr.contains(text), "{text} in {}", output.stderr);
    }
    let output = job.run(&["--set", "model.layers=2", "--set", "model.preset=llama-1b"]);
    assert_eq!(output.code, 2, "{}", output.stderr);
    // Keys that would not fit the default model are no contradiction.
    job.run_ok(&[&NO_CHANGE[..], &["--set", "model.layers=2", "--set", "model.dim=32"]].concat());
    assert_eq!(runs(), before + 1);
}

fn damaged_model_directory_is_refused_before_any_run() {
    let job = Job::new();
    job.run_ok(&[]);
    assert_eq!(export(&job, &["runs/train/latest", "--output", "out"]).code, 0);
    job.write("train.toml", format!("{CONFIG}[checkpoint]\ninit = \"out\"\n"));
    let runs = std::fs::read_dir(job.path().join("runs/train")).unwrap().count();
    let (weights, config) = (job.path().join("out/model.safetensors"), job.path().join("out/config.json"));
    let whole = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &whole[..whole.len() - 1]).unwrap();
    let output = job.run(&[]);
    assert_eq!(output.code, 65, "{}", output.stderr);
    assert!(output.stderr.contains("out/model.safetensors: tensor"), "{}", output.stderr);
    std::fs::write(&weights, &whole).unwrap();
    // Ids of other text.
    let tokenizer = job.path().join("out/tokenizer.json");
    let own = std::fs::read(&tokenizer).unwrap();
    let other = r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
    std::fs::write(&tokenizer, other).unwrap();
    for args in [&[][..], &["--dry-run"]] {
        let output = job.run(args);
        assert_eq!(output.code, 65, "{}", output.stderr);
        let words = "data.train is read with tokenizer `bytes`";
        assert!(output.stderr.contains(words), "{}", output.stderr);
    }
    std::fs::write(&tokenizer, own).unwrap();
    let mut changed: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    changed["clip_qkv"] = 8.0.into();
    std::fs::write(&config, changed.to_string()).unwrap();
    let output = job.run(&[]);
    assert_eq!(output.code, 65, "{}", output.stderr);
    assert!(output.stderr.contains("out/config.json: `clip_qkv`: 8"), "{}", output.stderr);
    assert_eq!(std::fs::read_dir(job.path().join("runs/train")).unwrap().count(), runs);
}

fn killed_export_is_complete_or_absent() {
    let job = Job::new();
    // The model is large enough that most of the time is spent on the files.
    job.run_ok(&["--set", "model.vocab=20000", "--set", "train.steps=1"]);
    assert_eq!(export(&job, &["runs/train/latest", "--output", "whole"]).code, 0);
    let whole = contents(&job.path().join("whole"));
    let start = std::time::Instant::now();
    assert_eq!(export(&job, &["runs/train/latest", "--output", "timed"]).code, 0);
    let longest = u64::try_from(start.elapsed().as_micros()).unwrap();
    let mut absent = 0;
    for number in 0..EXPORTS_KILLED {
        let mut command = job.command(&["export", "runs/train/latest", "--output", "out"]);
        let process = Process::spawn(&mut command);
        // Kills are spread over the time of an export, in a different order each time.
        let delay = longest * (number * 37 % EXPORTS_KILLED) / EXPORTS_KILLED;
        std::thread::sleep(Duration::from_micros(delay));
        process.signal(Signal::KILL);
        process.wait();
        let out = job.path().join("out");
        if out.exists() {
            assert!(contents(&out) == whole, "after {delay} us");
            std::fs::remove_dir_all(&out).unwrap();
        } else {
            absent += 1;
        }
    }
    assert!(absent > EXPORTS_KILLED / 4, "{absent} of {EXPORTS_KILLED} were killed in time");
    // The next export removes their leftovers.
    assert_eq!(export(&job, &["runs/train/latest", "--output", "out"]).code, 0);
    assert!(contents(&job.path().join("out")) == whole);
    let hidden = |name: &String| name.starts_with('.') && name.contains("out");
    let names =
        std::fs::read_dir(job.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(hidden).count(), 0);
}

fn export_says_what_it_did_and_refuses_used_directories() {
    let job = Job::new();
    job.run_ok(&[]);
    let output = export(&job, &["runs/train/latest", "--output", "out", "--dtype", "bf16", "--json"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let json: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!((&json["step"], &json["tokenizer"]), (&8.into(), &"bytes".into()));
    assert!(json["checkpoint"].as_str().unwrap().ends_with("step-00000008"));
    let card = std::fs::read_to_string(job.path().join("out/README.md")).unwrap();
    for text in ["| training steps | 8 |", "| training tokens | 1024 |", "| element type | bfloat16 |"] {
        assert!(card.contains(text), "{text} in {card}");
    }
    let again = export(&job, &["runs/train/latest", "--output", "out"]);
    assert_eq!(again.code, 2, "{}", again.stderr);
    assert!(again.stderr.contains("--overwrite"), "{}", again.stderr);
    assert_eq!(export(&job, &["runs/train/latest", "--output", "out", "--overwrite"]).code, 0);
    let text = export(&job, &["runs/train/latest", "--output", "text", "--overwrite"]);
    assert_eq!(text.code, 2, "{}", text.stderr);
    assert_eq!(export(&job, &["nowhere", "--output", "new"]).code, 65);
    assert!(!job.path().join("new").exists());
}

fn export_to_a_full_disk_leaves_nothing() {
    let job = Job::new();
    job.run_ok(&["--set", "model.vocab=20000", "--set", "train.steps=1"]);
    std::fs::create_dir(job.path().join("disk")).unwrap();
    // The weights do not fit; with fewer bytes available, neither do the small files or the directory.
    for size in ["1m", "8k", "4k"] {
        // A file system that only this shell sees. An earlier export in it stays unchanged.
        let script = format!(
            "mount -t tmpfs -o size={size} none disk && mkdir disk/old && echo x > disk/old/README.md && \"$0\" export \
             runs/train/latest --output disk/out; code=$?; ls -A disk disk/old; exit $code"
        );
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &script]).arg(xlaunch_path()).current_dir(job.path());
        let output = Process::spawn(&mut command).wait();
        assert_eq!(output.code, 65, "{size}: {}", output.stderr);
        assert_eq!(output.stdout, "disk:\nold\n\ndisk/old:\nREADME.md\n", "{size}");
        for text in ["No space left on device", "help: free space"] {
            assert!(output.stderr.contains(text), "{size}: {}", output.stderr);
        }
    }
}
