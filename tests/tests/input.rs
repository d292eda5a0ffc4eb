//! Bad input: a clear error, the right exit code, and nothing started or half-written.

#![expect(clippy::unwrap_used, reason = "a test")]

use xlaunch_tests::{Finished, Job};

/// A run that must end with `code` and words on stderr, before any worker starts.
fn refused(job: &Job, args: &[&str], code: i32, words: &[&str]) -> Finished {
    let run = job.run(args);
    assert_eq!(run.code, code, "{args:?}: {}", run.stderr);
    for word in words {
        assert!(run.stderr.contains(word), "{args:?}: {word:?} in {}", run.stderr);
    }
    assert!(!run.stderr.contains("panicked") && !run.stderr.contains("step 1/"), "{}", run.stderr);
    assert!(!job.latest().join("checkpoints").exists());
    run
}

fn with_config(line: &str, code: i32, words: &[&str]) {
    let job = Job::new();
    let config = std::fs::read_to_string(job.path().join("train.toml")).unwrap();
    job.write(
        "train.toml",
        config.replace("[train]", &format!("[train]\n{line}")).replace("lr = 3e-3\n", ""),
    );
    refused(&job, &[], code, words);
}

#[test]
fn configurations_are_refused_with_the_place_and_what_was_expected() {
    with_config("learning_rat = 1", 2, &["train.toml:", "unknown key `train.learning_rat`"]);
    with_config("stepz = 1", 2, &["train.toml:", "`train.stepz`", "steps"]);
    with_config("lr = \"fast\"", 2, &["train.toml:", "string", "expected"]);
    with_config("lr = -1.0", 2, &["train.toml:", "train.lr", "expected"]);
    with_config("lr = ", 2, &["train.toml:"]);
    let job = Job::new();
    job.write("train.toml", "[modell]\ndim = 3\n");
    refused(&job, &[], 2, &["train.toml:1:", "[modell]", "model"]);
    job.write("train.toml", [0xff, 0xfe, 0x00]);
    refused(&job, &[], 2, &["train.toml"]);
}

#[test]
fn settings_are_refused_like_lines_of_the_file() {
    let job = Job::new();
    refused(&job, &["--set", "train.stepz=3"], 2, &["train.stepz", "steps"]);
    refused(&job, &["--set", "train.steps"], 2, &["="]);
    refused(&job, &["--set", "train.steps=many"], 2, &["train.steps"]);
    refused(&job, &["--set", "launch.join_timeout=1e300"], 2, &["launch.join_timeout", "86400"]);
    refused(&job, &["--nproc", "0"], 2, &["nproc"]);
    refused(&job, &["--nproc", "many"], 2, &["many"]);
    refused(&job, &["--set", "model.heads=5"], 2, &["heads"]);
    refused(&job, &["--set", "model.preset=\"gpt5\""], 2, &["gpt5", "llama-28m"]);
    refused(&job, &["--set", "engine.device=\"cuda\""], 2, &["cuda", "GPU"]);
    refused(&job, &["--set", "engine.precision=\"bf16\""], 2, &["bf16", "fp32"]);
}

#[test]
fn files_that_are_missing_are_named() {
    let job = Job::new();
    let run = xlaunch_tests::Running::start(&mut job.command(&["nowhere.toml"])).finish();
    assert!(run.code == 2 && run.stderr.contains("nowhere.toml"), "{}", run.stderr);
    refused(&job, &["--set", "data.train=[\"nowhere/*.txt\"]"], 65, &["nowhere/*.txt", "data.train"]);
    refused(&job, &["--resume=nowhere"], 65, &["nowhere"]);
    refused(&job, &["--set", "checkpoint.init=\"nowhere.safetensors\""], 65, &["nowhere.safetensors"]);
}

#[test]
fn data_that_cannot_train_is_refused() {
    let job = Job::new();
    job.write("text/a.txt", "");
    refused(&job, &[], 65, &["data.train"]);
    job.write("text/a.txt", "short");
    refused(&job, &[], 65, &["32"]);

    let bin = ["--set", "data.tokenizer=\"bin\"", "--set", "data.train=[\"ids.bin\"]"];
    let ids = |id: u16| id.to_le_bytes().repeat(1000);
    job.write("ids.bin", ids(300));
    refused(&job, &bin, 65, &["ids.bin", "300", "256"]);
    job.write("ids.bin", &ids(3)[..1999]);
    refused(&job, &bin, 65, &["ids.bin"]);
    // llm.c's header promises more than there is.
    let mut header = vec![0_u8; 1024];
    for (at, number) in [(0, 20_240_520_u32), (4, 1), (8, 5000)] {
        header[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    job.write("ids.bin", [header, ids(3)].concat());
    refused(&job, &bin, 65, &["ids.bin", "5000"]);
}

#[test]
fn token_files_of_both_layouts_train() {
    let ids: Vec<u8> = (0..2000_u32).flat_map(|i| ((i * 7 % 256) as u16).to_le_bytes()).collect();
    let mut header = vec![0_u8; 1024];
    for (at, number) in [(0, 20_240_520_u32), (4, 1), (8, 2000)] {
        header[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    let losses = |file: Vec<u8>| {
        let job = Job::new();
        job.write("ids.bin", file);
        job.run_well(&["--set", "data.tokenizer=\"bin\"", "--set", "data.train=[\"ids.bin\"]"]);
        job.losses()
    };
    let bare = losses(ids.clone());
    assert_eq!(bare.len(), 8);
    assert_eq!(bare, losses([header, ids].concat()));
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let job = Job::new();
    job.run_well(&["--set", "checkpoint.dir=\"saved\""]);
    let before = std::fs::read_dir(job.path().join("saved")).unwrap().count();
    let run = job.run(&["--resume=saved", "--set", "model.dim=64", "--set", "train.steps=20"]);
    assert_eq!(run.code, 65, "{}", run.stderr);
    assert!(
        run.stderr.contains("dim") && run.stderr.contains("64") && run.stderr.contains("32"),
        "{}",
        run.stderr
    );
    assert_eq!(std::fs::read_dir(job.path().join("saved")).unwrap().count(), before);
}

#[test]
fn an_output_that_cannot_be_written_is_refused() {
    let job = Job::new();
    job.write("taken", "a file");
    refused(&job, &["--set", "job.output=\"taken\""], 2, &["taken"]);
}
