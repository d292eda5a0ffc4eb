//! Training on pairs of a better and a worse answer: `[dpo]`.

use serde_json::{Value, json};
use xlaunch_tests::{Job, Output, Process};

xlaunch_harness::tests! {
    preferences_are_learned_alike_on_any_ranks_and_continue_bit_for_bit,
    adapters_are_compared_with_those_that_they_start_from,
    pairs_and_other_data_are_not_confused;
}

const TEMPLATE: &str = "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}";
/// The loss of a pair whose answers the model and the reference see alike.
const UNDECIDED: f64 = std::f64::consts::LN_2;

pub(crate) fn job() -> Job {
    let job = Job::new();
    write_model_and_pairs(&job, 2);
    job
}

/// Writes a model to start from, `base`, and pairs of answers to train on, `pairs`.
pub(crate) fn write_model_and_pairs(job: &Job, layers: usize) {
    let layers = format!("model.layers={layers}");
    job.run_ok(&["--set", "train.steps=2", "--set", "model.seq=64", "--set", &layers]);
    command(job, &["export", "runs/train/latest", "--output", "base"]);
    std::fs::remove_dir_all(job.path().join("runs")).unwrap();
    job.write("template.jinja", TEMPLATE);
    let message = |role: &str, content: String| json!({"role": role, "content": content});
    let row = |i: usize| {
        let answer = |text: &str| message("assistant", format!("{text}{}", "!".repeat(i % 3)));
        json!({"prompt": [message("user", format!("{i}?"))], "chosen": [answer("yes")], "rejected": [answer("no")]})
    };
    job.write("pairs.jsonl", (0..90).map(|i| format!("{}\n", row(i))).collect::<String>());
    prepare(job, "--preferences", "pairs", "pairs.jsonl");
}

fn prepare(job: &Job, kind: &str, output: &str, input: &str) {
    let template = ["--tokenizer", "bytes", "--chat-template", "template.jinja", "--val", "0.2"];
    command(job, &[&["data", "prepare", kind, "--output", output], &template[..], &[input]].concat());
}

fn command(job: &Job, args: &[&str]) -> Output {
    let output = Process::spawn(&mut job.command(args)).wait();
    assert_eq!(output.code, 0, "{args:?}: {}", output.stderr);
    output
}

fn run(job: &Job, ranks: &str, settings: &[&str]) -> Output {
    let common = [
        "checkpoint.init=\"base\"",
        "data.train=\"pairs\"",
        "model.seq=64",
        "train.lr=0.01",
        "train.warmup=0",
        "train.eval_every=4",
    ];
    let settings = common.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    job.run(&settings.chain(["--nproc", ranks]).collect::<Vec<_>>())
}

pub(crate) fn run_ok(job: &Job, ranks: &str, settings: &[&str]) -> Output {
    let output = run(job, ranks, settings);
    assert_eq!(output.code, 0, "{}", output.stderr);
    output
}

fn values(job: &Job, key: &str) -> Vec<f64> {
    job.metrics().iter().filter_map(|line| line[key].as_f64()).collect()
}

fn preferences_are_learned_alike_on_any_ranks_and_continue_bit_for_bit() {
    let job = job();
    let fresh = |more: &[&'static str]| [&["checkpoint.resume=\"off\""], more].concat();
    let output = run_ok(
        &job,
        "1",
        &fresh(&["train.batch=6", "checkpoint.every=3", "checkpoint.keep=0", "checkpoint.async=false"]),
    );
    assert!(output.stderr.contains(" pairs packed into "), "{}", output.stderr);
    let expected = job.losses();
    assert!((expected[0] - UNDECIDED).abs() < 1e-6 && expected[7] < 0.9 * UNDECIDED, "{expected:?}");
    let [right, margins] = ["preferences/accuracy", "preferences/margin"].map(|key| values(&job, key));
    assert!(right[0] == 0.0 && margins[0] == 0.0, "the model is the reference: {right:?} {margins:?}");
    assert!(right[7] > 0.9 && margins[7] > 0.1, "{right:?} {margins:?}");
    let [val, val_right] = ["val/loss", "val/preference_accuracy"].map(|key| values(&job, key));
    assert!(val[1] < val[0] && val[0] < UNDECIDED && val_right[1] > 0.9, "{val:?} {val_right:?}");
    let saved = job.saved_state(8);
    // The steps after a checkpoint, again. The reference is still the model before the first step.
    let from = job.run_dir().join("checkpoints/step-00000003");
    run_ok(&job, "1", &["train.batch=6", &format!("checkpoint.resume={from:?}")]);
    assert!(job.losses() == expected && job.saved_state(8) == saved, "{:?} {expected:?}", job.losses());
    // A mean over pairs, however they are divided.
    for (ranks, settings) in [
        ("2", &["train.batch=3"][..]),
        ("3", &["train.batch=2", "comm.shard=\"parameters\"", "train.classifier_chunk=7"]),
        ("1", &["train.batch=2", "train.accumulate=3", "train.recompute=\"block\""]),
    ] {
        run_ok(&job, ranks, &fresh(settings));
        for (key, expected) in
            [("train/loss", &expected), ("val/loss", &val), ("preferences/margin", &margins)]
        {
            let found = values(&job, key);
            let close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-5);
            assert!(
                close && found.len() == expected.len(),
                "{ranks} {settings:?} {key}: {found:?} {expected:?}"
            );
        }
    }
    let planned =
        job.run_ok(&["--dry-run", "--set", "checkpoint.init=\"base\"", "--set", "data.train=\"pairs\""]);
    assert!(planned.stdout.contains("0.1"), "{}", planned.stdout);
    // Other weights would be another reference.
    let other = job.run_dir().join("checkpoints/step-00000008");
    let settings = [&format!("checkpoint.resume={from:?}")[..], &format!("checkpoint.init={other:?}")];
    let refused = run(&job, "1", &[&["train.batch=6"], &settings[..]].concat());
    let reason = "was trained with other weights in `checkpoint.init`";
    assert!(refused.code != 0 && refused.stderr.contains(reason), "{}", refused.stderr);
}

fn adapters_are_compared_with_those_that_they_start_from() {
    let job = job();
    let lora = ["lora.rank=4", "checkpoint.every=3", "checkpoint.keep=0"];
    run_ok(&job, "1", &[&lora[..], &["checkpoint.resume=\"off\""]].concat());
    let first = job.losses();
    assert!((first[0] - UNDECIDED).abs() < 1e-6 && first[7] < 0.9 * UNDECIDED, "{first:?}");
    let from = job.run_dir().join("checkpoints/step-00000003");
    run_ok(&job, "1", &[&lora[..], &[&format!("checkpoint.resume={from:?}")]].concat());
    assert_eq!(job.losses(), first);
    command(&job, &["export", "runs/train/latest", "--adapter", "--output", "adapter"]);
    // Trained adapters are a reference as well, also after a resume.
    let again = [&lora[..], &["checkpoint.init=\"adapter\""]].concat();
    run_ok(&job, "2", &[&again[..], &["checkpoint.resume=\"off\""]].concat());
    let second = job.losses();
    assert!((second[0] - UNDECIDED).abs() < 1e-6 && second[7] < second[0], "{second:?}");
    let from = job.run_dir().join("checkpoints/step-00000003");
    run_ok(&job, "2", &[&again[..], &[&format!("checkpoint.resume={from:?}")]].concat());
    assert_eq!(job.losses(), second);
}

fn pairs_and_other_data_are_not_confused() {
    let job = job();
    let refused = |settings: &[&str], code: i32, reason: &str| {
        let output = run(&job, "1", settings);
        assert_eq!(output.code, code, "{settings:?}: {}", output.stderr);
        assert!(output.stderr.contains(reason), "{reason} in {}", output.stderr);
    };
    let chat = |i: usize| {
        let question = format!("{i}");
        json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "b"}]})
    };
    job.write("chats.jsonl", (0..40).map(|i| format!("{}\n", chat(i))).collect::<String>());
    prepare(&job, "--chat", "chats", "chats.jsonl");
    refused(
        &["data.train=\"chats\"", "dpo.beta=0.1"],
        2,
        "dpo.beta=0.1: training on preferences needs pairs",
    );
    refused(&["data.documents=\"masked\""], 2, "data.documents=\"masked\": \"masked\" with pairs of answers");
    refused(&["dpo.beta=-1.0"], 2, "dpo.beta=-1.0: ");
    let mixture = "data.train=[{path=\"pairs\",weight=1},{path=\"chats\",weight=1}]";
    refused(&[mixture], 65, "different rows: pairs of answers and other data");
    refused(&["data.val=\"chats\""], 65, "different rows: pairs of answers and other data");
    refused(&["model.seq=8"], 65, "no pair of answers fits into model.seq = 8 tokens");
    let no_model = job.run(&["--set", "data.train=\"pairs\"", "--set", "model.seq=64"]);
    assert!(
        no_model.code == 2 && no_model.stderr.contains("checkpoint.init: training on preferences"),
        "{}",
        no_model.stderr
    );
    let eval = ["eval", "base", "--data", "pairs", "--device", "cpu"];
    let eval = Process::spawn(&mut job.command(&eval)).wait();
    assert!(eval.code == 65 && eval.stderr.contains("pairs has pairs of answers"), "{}", eval.stderr);
    // Pairs that are too long are left out, and counted.
    let output = run_ok(&job, "1", &["model.seq=18", "train.steps=1"]);
    assert!(output.stderr.contains(" longer than model.seq"), "{}", output.stderr);
    // Rows for one are refused as the other, with advice.
    let template = ["--tokenizer", "bytes", "--chat-template", "template.jinja", "--output", "none"];
    for (kind, input, advice) in [
        ("--chat", "pairs.jsonl", "use --preferences in place of --chat"),
        ("--preferences", "chats.jsonl", "the row has no `chosen`, only `messages`"),
    ] {
        let args = [&["data", "prepare", kind, input], &template[..]].concat();
        let output = Process::spawn(&mut job.command(&args)).wait();
        assert!(output.code == 65 && output.stderr.contains(advice), "{}", output.stderr);
    }
    let manifest = std::fs::read_to_string(job.path().join("pairs/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    assert_eq!(
        (manifest["version"].as_u64(), manifest["chat"]["preferences"].as_bool()),
        (Some(3), Some(true))
    );
}
