//! Directories of models that say more than this trainer computes, or need it in another way.

use serde_json::{Value, json};
use xlaunch_tests::{Job, Output, Process};

xlaunch_harness::tests! {
    model_with_an_attention_window_is_trained_and_generates_with_it,
    header_with_a_million_tensors_is_refused_within_a_gigabyte_of_memory,
    chat_template_knows_the_local_date;
}

/// A step that changes no weight: smaller than any rounding.
const NO_CHANGE: [&str; 4] =
    ["train.steps=1", "train.lr=1.2e-38", "train.weight_decay=0", "train.eval_every=1"];

fn xlaunch(job: &Job, args: &[&str]) -> Output {
    Process::spawn(&mut job.command(args)).wait()
}

/// An exported model in `out`, and a configuration that starts from it.
fn exported() -> Job {
    let job = Job::new();
    job.run_ok(&[]);
    let output = xlaunch(&job, &["export", "runs/train/latest", "--output", "out"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    job.write(
        "train.toml",
        "[data]\ntrain = [\"text/*.txt\"]\n[train]\nsample = 0\n[engine]\ndevice = \"cpu\"\n\
         [checkpoint]\ninit = \"out\"\n",
    );
    job
}

/// Changes keys of a file of the model.
fn edit(job: &Job, file: &str, keys: &[(&str, Value)]) {
    let path = job.path().join("out").join(file);
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in keys {
        json[*key] = value.clone();
    }
    std::fs::write(path, json.to_string()).unwrap();
}

/// `--set` before each setting.
fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

fn model_with_an_attention_window_is_trained_and_generates_with_it() {
    let job = exported();
    let losses = |seq: &str| {
        job.run_ok(&set(&[&NO_CHANGE[..], &[seq]].concat()));
        let series =
            |key: &str| job.metrics().iter().filter_map(|line| line[key].as_f64()).collect::<Vec<_>>();
        [series("train/loss"), series("val/loss")].concat()
    };
    let without = ["model.seq=16", "model.seq=32"].map(losses);
    edit(&job, "config.json", &[("model_type", json!("mistral")), ("sliding_window", json!(16))]);
    let [within, beyond] = ["model.seq=16", "model.seq=32"].map(losses);
    let equal = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(equal(&within, &without[0]), "{within:?} {without:?}");
    assert!(!equal(&beyond, &without[1]), "{beyond:?} {without:?}");
    let prompt = "a prompt of more than 16 tokens";
    let generated = xlaunch(
        &job,
        &[
            "generate",
            "out",
            "--prompt",
            prompt,
            "--device",
            "cpu",
            "--max-tokens",
            "1",
            "--temperature",
            "0",
        ],
    );
    assert_eq!(generated.code, 0, "{}", generated.stderr);
}

/// Parsed, such a header would take more.
fn header_with_a_million_tensors_is_refused_within_a_gigabyte_of_memory() {
    let job = exported();
    let tensors = 1_000_000;
    let entry = |at: usize| {
        format!("\"a{at:07}\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{at},{}]}},", at + 1)
    };
    let entries: String = (0..tensors).map(entry).collect();
    let header = format!("{{{}}}", entries.trim_end_matches(','));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + tensors, 0);
    job.write("out/model.safetensors", file);
    let output = Process::spawn(&mut job.limited_command("-v 1000000", &["train.toml"])).wait();
    assert_eq!(output.code, 65, "{}", output.stderr);
    assert!(output.stderr.contains("more than 50000 tensors"), "{}", output.stderr);
}

fn chat_template_knows_the_local_date() {
    let mut job = exported();
    let template = "{{ raise_exception('today is ' ~ strftime_now('%d %b %Y %H')) }}";
    edit(&job, "tokenizer_config.json", &[("chat_template", json!(template))]);
    let mut dates = Vec::new();
    // A day apart: whatever the time, not the same date.
    for zone in ["EAST-14", "WEST+10"] {
        job.set_env("TZ", zone);
        let output = xlaunch(&job, &["generate", "out", "--chat", "--prompt", "Hi", "--device", "cpu"]);
        let date = output.stderr.split("today is ").nth(1).map(|rest| rest[..11].to_owned());
        dates.push(date.unwrap_or_else(|| panic!("{}", output.stderr)));
    }
    assert_ne!(dates[0], dates[1]);
}
