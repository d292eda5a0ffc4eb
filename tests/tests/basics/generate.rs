//! `xlaunch generate` and `xlaunch eval` on a model that was just trained.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Output, Process};

xlaunch_harness::tests! {
    trained_model_continues_text_the_same_from_run_checkpoint_and_batch,
    samples_depend_on_seed_and_text_ends_before_stop_string,
    invalid_requests_are_refused_by_exit_code,
    damaged_checkpoint_is_refused,
    weights_that_are_not_finite_are_refused,
    interrupt_ends_generation,
    interrupt_loses_no_complete_text,
    eval_gives_the_validation_loss_of_training,
    hellaswag_prefers_the_completion_that_was_learned;
}

/// Trains a model long enough for it to continue its text.
fn trained(settings: &[&str]) -> Job {
    let job = Job::new();
    let steps = ["--set", "train.steps=150", "--set", "train.lr=1e-2"];
    job.run_ok(&[&steps, settings].concat());
    job
}

fn run(job: &Job, args: &[&str]) -> Output {
    Process::spawn(job.command(args).env("RUST_BACKTRACE", "0")).wait()
}

fn generate(job: &Job, args: &[&str]) -> Output {
    run(job, &[&["generate", "runs/train/latest", "--device", "cpu"], args].concat())
}

/// Returns the objects that a generation prints.
fn objects(job: &Job, args: &[&str]) -> Vec<Value> {
    let output = generate(job, &[args, &["--json"]].concat());
    assert_eq!(output.code, 0, "{}", output.stderr);
    output.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn trained_model_continues_text_the_same_from_run_checkpoint_and_batch() {
    let job = trained(&["--set", "checkpoint.every=100"]);
    let greedy = ["--temperature", "0", "--max-tokens", "12", "--prompt", "line 4"];
    let text = generate(&job, &greedy);
    assert_eq!((text.code, text.stdout.len()), (0, 12), "{text:?}");
    assert!(text.stdout.contains(": "), "{text:?}");
    let directory = job.run_dir().join("checkpoints");
    let newest = directory.join("step-00000150");
    for model in [&directory, &newest] {
        let path = model.to_str().unwrap();
        let again = run(&job, &[&["generate", path, "--device", "cpu"], &greedy[..]].concat());
        assert_eq!(again.stdout, text.stdout, "{again:?}");
    }
    let prompts = ["", "line 4", "7 and 1\nline 8: 64", "é"];
    let lines: String = prompts
        .iter()
        .map(|prompt| serde_json::json!({"prompt": prompt, "id": prompt}).to_string() + "\n")
        .collect();
    job.write("prompts.jsonl", lines);
    let options = ["--temperature", "0.7", "--top-k", "20", "--top-p", "0.95", "--max-tokens", "12"];
    let batch = objects(&job, &[&["--prompts", "prompts.jsonl"], &options[..]].concat());
    assert_eq!(batch.len(), prompts.len());
    for (object, prompt) in batch.iter().zip(prompts) {
        assert_eq!((&object["id"], &object["prompt"]), (&Value::from(prompt), &Value::from(prompt)));
        let alone = objects(&job, &[&["--prompt", prompt], &options[..]].concat());
        assert_eq!(alone[0]["text"], object["text"], "{prompt}");
        assert_eq!((&object["tokens"], &object["finish_reason"]), (&Value::from(12), &Value::from("length")));
    }
}

fn samples_depend_on_seed_and_text_ends_before_stop_string() {
    let job = trained(&[]);
    let texts = |args: &[&str]| -> Vec<String> {
        let args = [&["--prompt", "line", "--max-tokens", "20"], args].concat();
        objects(&job, &args).iter().map(|object| object["text"].as_str().unwrap().to_owned()).collect()
    };
    let samples = texts(&["--samples", "5", "--seed", "1"]);
    assert_eq!(samples, texts(&["--samples", "5", "--seed", "1"]));
    assert_eq!(samples[..2], texts(&["--samples", "2", "--seed", "1"]));
    assert_ne!(samples, texts(&["--samples", "5", "--seed", "2"]));
    assert!(samples.iter().any(|text| *text != samples[0]), "{samples:?}");
    let greedy = &texts(&["--temperature", "0"])[0];
    let stop = &greedy[5..8];
    let stopped = objects(&job, &["--prompt", "line", "--temperature", "0", "--stop", stop, "--stop", "zzz"]);
    assert_eq!(stopped[0]["text"], greedy[..greedy.find(stop).unwrap()]);
    assert_eq!(stopped[0]["finish_reason"], "stop");
    // The context has 32 tokens.
    let full = objects(&job, &["--prompt", "line", "--temperature", "0", "--max-tokens", "99"]);
    assert_eq!((&full[0]["finish_reason"], &full[0]["tokens"]), (&Value::from("context"), &Value::from(29)));
}

fn invalid_requests_are_refused_by_exit_code() {
    let job = trained(&["--set", "train.steps=1"]);
    let refused = |code: i32, part: &str, args: &[&str]| {
        let output = generate(&job, args);
        assert_eq!((output.code, output.stdout.as_str()), (code, ""), "{output:?}");
        assert!(output.stderr.contains(part), "{part} in {}", output.stderr);
    };
    refused(65, "has 33 tokens, but the model's context has 32", &["--prompt", &"x".repeat(33)]);
    job.write("p.jsonl", "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n");
    refused(65, "p.jsonl:2: missing field `prompt`", &["--prompts", "p.jsonl"]);
    refused(65, "missing.jsonl", &["--prompts", "missing.jsonl"]);
    refused(
        2,
        "has 50257 ids, but the model's vocabulary has 256",
        &["--prompt", "a", "--tokenizer", "gpt2"],
    );
    refused(2, "--top-p", &["--prompt", "a", "--top-p", "0"]);
    refused(2, "--prompt", &[]);
    let other = run(&job, &["generate", "text", "--prompt", "a"]);
    assert_eq!(other.code, 2, "{other:?}");
    assert!(other.stderr.contains("neither a checkpoint"), "{other:?}");
    // A model trained on token files has no tokenizer of its own.
    let ids: Vec<u8> = (0..4000_u16).flat_map(|i| (i % 200).to_le_bytes()).collect();
    let tokens = Job::new();
    tokens.write("ids.bin", ids);
    let config = std::fs::read_to_string(tokens.path().join("train.toml")).unwrap();
    tokens.write(
        "train.toml",
        config.replace("train = [\"text/*.txt\"]", "train = [\"ids.bin\"]\ntokenizer = \"bin\""),
    );
    tokens.run_ok(&["--set", "train.steps=1"]);
    let output = generate(&tokens, &["--prompt", "a"]);
    assert_eq!(output.code, 2, "{output:?}");
    assert!(output.stderr.contains("--tokenizer gpt2|bytes|FILE.json"), "{output:?}");
    assert_eq!(generate(&tokens, &["--prompt", "a", "--tokenizer", "bytes", "--max-tokens", "2"]).code, 0);
}

fn damaged_checkpoint_is_refused() {
    let job = trained(&["--set", "train.steps=1"]);
    let file = job.run_dir().join("checkpoints/step-00000001/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 100;
    bytes[last] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let output = generate(&job, &["--prompt", "a"]);
    assert_eq!((output.code, output.stdout.as_str()), (65, ""), "{output:?}");
    assert!(output.stderr.contains("does not match its hash"), "{output:?}");
    std::fs::write(&file, &bytes[..last]).unwrap();
    assert_eq!(generate(&job, &["--prompt", "a"]).code, 65);
}

fn weights_that_are_not_finite_are_refused() {
    let job = trained(&["--set", "train.steps=1"]);
    assert_eq!(run(&job, &["export", "runs/train/latest", "--output", "out"]).code, 0);
    let file = job.path().join("out/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let output = run(&job, &["generate", "out", "--device", "cpu", "--prompt", "line 4"]);
    assert_eq!((output.code, output.stdout.as_str()), (65, ""), "{output:?}");
    for text in ["model.safetensors", "not finite"] {
        assert!(output.stderr.contains(text), "{text} in {}", output.stderr);
    }
}

fn interrupt_ends_generation() {
    let job = trained(&["--set", "train.steps=1"]);
    let args = [
        "generate",
        "runs/train/latest",
        "--device",
        "cpu",
        "--prompt",
        "a",
        "--samples",
        "1000000",
        "--json",
    ];
    let mut process = Process::spawn(&mut job.command(&args));
    let started = Instant::now();
    while !process.stdout().contains("tokens_per_second") {
        assert!(process.is_running() && started.elapsed() < Duration::from_secs(60), "{}", process.stderr());
        std::thread::sleep(Duration::from_millis(10));
    }
    process.signal(Signal::INT);
    assert_eq!(process.wait().code, 130);
}

/// The last prompt fills the context but for one token. The texts before it would take longer than the test may.
fn interrupt_loses_no_complete_text() {
    let job = Job::new();
    job.run_ok(&["--set", "train.steps=1", "--set", "train.batch=1", "--set", "model.seq=4096"]);
    let mut prompts = "{\"prompt\": \"a\"}\n".repeat(31);
    prompts += &serde_json::json!({"prompt": "b".repeat(4095), "id": "last"}).to_string();
    job.write("prompts.jsonl", prompts);
    let args = ["generate", "runs/train/latest", "--device", "cpu", "--prompts", "prompts.jsonl"];
    let args = [&args[..], &["--max-tokens", "4000", "--json"]].concat();
    let last = [1, 2, 4, 8].into_iter().find_map(|seconds| {
        let process = Process::spawn(&mut job.command(&args));
        std::thread::sleep(Duration::from_secs(seconds));
        process.signal(Signal::INT);
        let output = process.wait();
        assert_eq!(output.code, 130, "{output:?}");
        output.stdout.lines().next().map(|line| serde_json::from_str::<Value>(line).unwrap())
    });
    assert_eq!(last.unwrap()["id"], "last");
}

fn eval_gives_the_validation_loss_of_training() {
    let all = [
        "--set",
        "data.val=text/a.txt",
        "--set",
        "train.eval_every=150",
        "--set",
        "train.eval_batches=100000",
    ];
    let job = trained(&all);
    let expected = job.metrics().iter().filter_map(|line| line["val/loss"].as_f64()).next_back().unwrap();
    let eval = |args: &[&str]| run(&job, &[&["eval", "runs/train/latest", "--device", "cpu"], args].concat());
    let output = eval(&["--data", "text/*.txt", "--json"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let found: Value = serde_json::from_str(&output.stdout).unwrap();
    let loss = found["data"]["loss"].as_f64().unwrap();
    assert!((loss - expected).abs() < 1e-5, "{loss} instead of {expected}");
    let close = |name: &str, value: f64| {
        let found = found["data"][name].as_f64().unwrap();
        assert!((found - value).abs() < 1e-9, "{name}: {found} instead of {value}");
    };
    close("perplexity", loss.exp());
    close("bits_per_byte", loss / std::f64::consts::LN_2);
    let part = eval(&["--data", "text/*.txt", "--tokens", "100"]);
    assert!(part.stdout.contains("tokens          128\n"), "{part:?}");
    let shorter = eval(&["--data", "text/*.txt", "--seq", "16", "--json"]);
    let shorter: Value = serde_json::from_str(&shorter.stdout).unwrap();
    let [shorter, whole] = [&shorter, &found].map(|json| json["data"]["loss"].as_f64().unwrap());
    assert!(shorter > whole, "with less to go by, the loss is {shorter} instead of {whole}");
    assert_eq!(eval(&["--data", "text/*.txt", "--seq", "100000"]).code, 2);
    assert_eq!(eval(&["--data", "text/*.txt", "--data", "text/*.txt"]).code, 2);
    assert_eq!(eval(&[]).code, 2);
    assert_eq!(eval(&["--data", "nothing/*.txt"]).code, 65);
    assert_eq!(eval(&["--hellaswag", "text/a.txt"]).code, 65);
    let prepare = ["data", "prepare", "--tokenizer", "bytes", "--val", "0", "--output", "none", "text"];
    assert_eq!(run(&job, &prepare).code, 0);
    let none = eval(&["--data", "none"]);
    assert!(none.code == 65 && none.stderr.contains("none has no validation data"), "{}", none.stderr);
    let prepare = ["data", "prepare", "--tokenizer", "gpt2", "--val", "0", "--output", "other", "text"];
    assert_eq!(run(&job, &prepare).code, 0);
    let other = eval(&["--data", "other"]);
    assert_eq!(other.code, 65, "{}", other.stderr);
    assert!(other.stderr.contains("other was prepared with tokenizer `gpt2` (hash "), "{}", other.stderr);
    // llm.c's header and ids.
    let header = [20_240_520, 1, 100].into_iter().chain([0; 253]).flat_map(i32::to_le_bytes);
    job.write("ids.bin", header.chain([0; 200]).collect::<Vec<u8>>());
    let ids = eval(&["--data", "ids.bin"]);
    assert_eq!(ids.code, 65, "{}", ids.stderr);
    assert!(
        ids.stderr.contains("a file of token ids; this model reads text, byte by byte"),
        "{}",
        ids.stderr
    );
}

/// The questions are bytes of the text that the model has learned: the right completion comes from the text, the others
/// do not.
fn hellaswag_prefers_the_completion_that_was_learned() {
    let job = trained(&[]);
    let mut bytes: Vec<u8> = Vec::new();
    let mut header = [0_i32; 256];
    header[..4].copy_from_slice(&[20_240_522, 1, 8, 200]);
    bytes.extend(header.iter().flat_map(|word| word.to_le_bytes()));
    for question in 0..8_u16 {
        let label = question % 4;
        let mut words = vec![u16::MAX, 0, question, label, 4];
        let mut put = |text: &str| {
            words.push(u16::try_from(text.len()).unwrap());
            words.extend(text.bytes().map(u16::from));
        };
        put("\nlin");
        (0..4).for_each(|index| {
            put(if index == label { "e " } else { ["zq#x", "XY", "~~~", "((("][usize::from(index)] })
        });
        words[1] = u16::try_from(2 * words.len()).unwrap();
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }
    job.write("questions.bin", bytes);
    let output = run(
        &job,
        &["eval", "runs/train/latest", "--device", "cpu", "--hellaswag", "questions.bin", "--json"],
    );
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert!(output.stderr.contains("this model was trained with tokenizer `bytes`"), "{}", output.stderr);
    let found: Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(found["hellaswag"], serde_json::json!({"accuracy": 1.0, "correct": 8, "questions": 8}));
}
