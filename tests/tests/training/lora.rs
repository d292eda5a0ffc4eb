//! Training of low-rank adapters: `[lora]`.

use std::collections::BTreeSet;

use serde_json::Value;
use xlaunch_tests::{Job, Output, Process};

xlaunch_harness::tests! {
    adapters_train_while_the_weights_stay_and_continue_bit_for_bit,
    ranks_and_micro_steps_train_the_same_adapters,
    changed_weights_and_other_trainings_are_refused_before_a_step,
    dry_run_counts_the_parameters_of_adapters,
    unsuitable_settings_are_refused_by_key;
}

/// Returns a job with weights to adapt: those of a run of two steps, exported.
fn job() -> Job {
    let job = Job::new();
    job.run_ok(&["--set", "train.steps=2"]);
    command(&job, &["export", "runs/train/latest", "--output", "base"]);
    std::fs::remove_dir_all(job.path().join("runs")).unwrap();
    job
}

fn command(job: &Job, args: &[&str]) -> Output {
    let output = Process::spawn(&mut job.command(args)).wait();
    assert_eq!(output.code, 0, "{args:?}: {}", output.stderr);
    output
}

fn set(settings: &[&str]) -> Vec<String> {
    let mut args = vec!["--set".to_owned(), "checkpoint.init=\"base\"".to_owned()];
    args.extend(
        ["--set", "lora.rank=4", "--set", "train.lr=0.01", "--set", "train.warmup=0"].map(str::to_owned),
    );
    args.extend(settings.iter().flat_map(|setting| ["--set".to_owned(), (*setting).to_owned()]));
    args
}

fn run(job: &Job, settings: &[&str]) -> Output {
    let args = set(settings);
    job.run(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

fn run_ok(job: &Job, settings: &[&str]) -> Output {
    let output = run(job, settings);
    assert_eq!(output.code, 0, "{}", output.stderr);
    output
}

fn adapters_train_while_the_weights_stay_and_continue_bit_for_bit() {
    let job = job();
    run_ok(&job, &["checkpoint.every=3", "checkpoint.keep=0", "checkpoint.async=false"]);
    let (losses, expected) = (job.losses(), job.saved_state(8));
    assert!(losses[7] < losses[0], "{losses:?}");
    let names: BTreeSet<&str> = expected.keys().filter_map(|name| name.split('.').nth(2)).collect();
    assert!(expected.keys().all(|name| name.contains(".lora_")), "{:?}", expected.keys());
    assert!(names.contains("q_k_v") && names.contains("gate"), "{names:?}");
    // The steps after a checkpoint, again.
    let from = job.run_dir().join("checkpoints/step-00000003");
    run_ok(&job, &[&format!("checkpoint.resume={from:?}")]);
    assert_eq!(job.losses(), losses);
    assert_eq!(job.saved_state(8), expected);
    // The adapter is that of the exported directory, and the loss of the merged model that of the adapted one.
    command(&job, &["export", "runs/train/latest", "--adapter", "--output", "adapter"]);
    let written = |name: &str| std::fs::read(job.path().join(name)).unwrap();
    assert_eq!(written("adapter/tokenizer.json"), written("base/tokenizer.json"));
    command(&job, &["export", "runs/train/latest", "--merge", "--output", "merged"]);
    let loss = |args: &[&str]| {
        let data = ["--data", "text/*.txt", "--device", "cpu", "--json"];
        let output = command(&job, &[&["eval"], args, &data].concat());
        serde_json::from_str::<Value>(&output.stdout).unwrap()["data"]["loss"].as_f64().unwrap()
    };
    let expected = loss(&["runs/train/latest"]);
    for args in [&["base", "--adapter", "adapter"][..], &["adapter"], &["merged"]] {
        assert!((loss(args) - expected).abs() < 1e-5, "{args:?}");
    }
    assert!((loss(&["base"]) - expected).abs() > 1e-3);
    let text = |args: &[&str]| {
        let prompt = ["--prompt", "line", "--temperature", "0", "--device", "cpu"];
        command(&job, &[&["generate"], args, &prompt].concat()).stdout
    };
    assert_eq!(text(&["merged"]), text(&["base", "--adapter", "runs/train/latest"]));
    // Weights that have moved are found by a link.
    let [old, new] = ["base", "moved"].map(|name| job.path().join(name));
    std::fs::rename(&old, &new).unwrap();
    let merge = ["export", "runs/train/latest", "--merge", "--output", "merged", "--overwrite"];
    let moved = Process::spawn(&mut job.command(&merge)).wait();
    assert!(moved.code != 0 && moved.stderr.contains("a link to them"), "{}", moved.stderr);
    std::os::unix::fs::symlink(&new, &old).unwrap();
    command(&job, &merge);
    // A whole export replaces an adapter's only if that is asked for.
    let again = ["export", "runs/train/latest", "--adapter", "--output", "adapter"];
    assert_ne!(Process::spawn(&mut job.command(&again)).wait().code, 0);
    command(&job, &[&again[..], &["--overwrite"]].concat());
    // The adapter is where another job starts.
    let init = format!("checkpoint.init={:?}", job.path().join("adapter"));
    run_ok(&job, &[&init, "checkpoint.resume=\"off\"", "train.steps=1"]);
    assert!((job.losses()[0] - losses[0]).abs() > 1e-3);
}

fn ranks_and_micro_steps_train_the_same_adapters() {
    let job = job();
    let losses = |ranks: &str, settings: &[&str]| {
        let mut args = set(&[&["checkpoint.resume=\"off\"", "data.shuffle=false"], settings].concat());
        args.extend(["--nproc".to_owned(), ranks.to_owned()]);
        job.run_ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
        job.losses()
    };
    let expected = losses("1", &["train.batch=6"]);
    for found in [
        losses("2", &["train.batch=3"]),
        losses("3", &["train.batch=2"]),
        losses("1", &["train.batch=2", "train.accumulate=3"]),
        losses("3", &["train.batch=1", "train.accumulate=2", "train.recompute=\"block\""]),
    ] {
        for (a, b) in found.iter().zip(&expected) {
            assert!((a - b).abs() < 2e-6 * b, "{found:?} {expected:?}");
        }
    }
}

fn changed_weights_and_other_trainings_are_refused_before_a_step() {
    let job = job();
    run_ok(&job, &["train.steps=2"]);
    let refused = |settings: &[&str], expected: &[&str]| {
        let output = run(&job, settings);
        assert_ne!(output.code, 0, "{settings:?}");
        for text in expected {
            assert!(output.stderr.contains(text), "{text} in {}", output.stderr);
        }
    };
    let resume = "checkpoint.resume=\"auto\"";
    refused(&[resume, "lora.rank=2"], &["lora.rank is 4 there, 2 in this job"]);
    refused(
        &[resume, "lora.targets=\"q\""],
        &["lora.targets is q, k, v, o, gate, up, down there, q in this job"],
    );
    refused(&[resume, "lora.rank=0", "checkpoint.init=\"base\""], &["it has adapters (LoRA) of", "--merge"]);
    let other = job.path().join("runs/train/latest").canonicalize().unwrap();
    // A model of the same shape with other values.
    let whole = Job::new();
    whole.run_ok(&["--set", "train.steps=3"]);
    command(&whole, &["export", "runs/train/latest", "--output", "base"]);
    let base = whole.path().join("base");
    refused(
        &[resume, &format!("checkpoint.init={base:?}")],
        &["other weights in `checkpoint.init`: their hash was", "set `checkpoint.init`"],
    );
    let full = whole.run_dir();
    refused(
        &[&format!("checkpoint.resume={full:?}")],
        &["it has all weights of a model, but lora.rank = 4 trains adapters"],
    );
    let missing = &[resume, "checkpoint.init=\"gone\""];
    refused(missing, &["gone", "does not exist"]);
    let output =
        Process::spawn(&mut job.command(&["export", other.to_str().unwrap(), "--output", "out"])).wait();
    assert!(
        output.code != 0 && output.stderr.contains("pass `--adapter` to export them"),
        "{}",
        output.stderr
    );
}

fn dry_run_counts_the_parameters_of_adapters() {
    let job = job();
    let mut args = set(&[]);
    args.push("--dry-run".into());
    let report = job.run_ok(&args.iter().map(String::as_str).collect::<Vec<_>>()).stdout;
    assert!(
        report.lines().any(|line| line.starts_with("trained ") && line.contains("of adapters")),
        "{report}"
    );
}

fn unsuitable_settings_are_refused_by_key() {
    let job = job();
    for (setting, key) in [
        ("lora.dropout=0.1", "lora.dropout"),
        ("lora.targets=\"c_attn\"", "lora.targets"),
        ("engine.precision=\"fp8\"", "engine.precision"),
        ("comm.shard=\"optimizer\"", "comm.shard"),
    ] {
        let output = run(&job, &[setting]);
        assert_eq!(output.code, 2, "{setting}: {}", output.stderr);
        assert!(output.stderr.contains(key), "{setting}: {}", output.stderr);
    }
    let output = job.run(&["--set", "lora.rank=4"]);
    assert!(output.stderr.contains("adapters need the weights of a model"), "{}", output.stderr);
}
