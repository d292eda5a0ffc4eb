//! Invalid input of the trainer: a clear error, the right exit code, and nothing started or half-written.

use xlaunch_tests::{Job, Output, Process};

xlaunch_harness::tests! {
    invalid_configuration_is_refused_with_position_and_expectation,
    invalid_set_option_is_refused_like_a_line_of_the_file,
    missing_files_are_named,
    unusable_training_data_is_refused,
    token_files_with_and_without_header_train,
    checkpoint_of_another_model_is_refused,
    output_that_is_not_a_directory_is_refused;
}

/// Runs a job that must exit with `code` and these words on stderr before any worker starts.
fn refused(job: &Job, args: &[&str], code: i32, words: &[&str]) -> Output {
    let run = job.run(args);
    assert_eq!(run.code, code, "{args:?}: {}", run.stderr);
    for word in words {
        assert!(run.stderr.contains(word), "{args:?}: {word:?} in {}", run.stderr);
    }
    assert!(
        !run.stderr.contains("internal error in thread") && !run.stderr.contains("step 1/"),
        "{}",
        run.stderr
    );
    assert!(!job.run_dir().join("checkpoints").exists());
    run
}

/// Same, with an additional line in `[train]`.
fn refused_line(line: &str, code: i32, words: &[&str]) {
    let job = Job::new();
    let config = std::fs::read_to_string(job.path().join("train.toml")).unwrap();
    let config = config.replace("[train]", &format!("[train]\n{line}")).replace("lr = 3e-3\n", "");
    job.write("train.toml", config);
    refused(&job, &[], code, words);
}

fn invalid_configuration_is_refused_with_position_and_expectation() {
    refused_line("learning_rat = 1", 2, &["train.toml:", "train.learning_rat"]);
    refused_line("stepz = 1", 2, &["train.toml:", "`train.stepz`", "steps"]);
    refused_line("lr = \"fast\"", 2, &["train.toml:", "string", "expected"]);
    refused_line("lr = -1.0", 2, &["train.toml:", "train.lr", "expected"]);
    refused_line("lr = ", 2, &["train.toml:"]);
    let job = Job::new();
    job.write("train.toml", "[modell]\ndim = 3\n");
    refused(&job, &[], 2, &["train.toml:1:", "[modell]", "model"]);
    job.write("train.toml", [0xff, 0xfe, 0x00]);
    refused(&job, &[], 2, &["train.toml"]);
}

fn invalid_set_option_is_refused_like_a_line_of_the_file() {
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

fn missing_files_are_named() {
    let job = Job::new();
    let run = Process::spawn(&mut job.command(&["nowhere.toml"])).wait();
    assert!(run.code == 2 && run.stderr.contains("nowhere.toml"), "{}", run.stderr);
    refused(&job, &["--set", "data.train=[\"nowhere/*.txt\"]"], 65, &["nowhere/*.txt", "data.train"]);
    refused(&job, &["--resume=nowhere"], 65, &["nowhere"]);
    refused(&job, &["--set", "checkpoint.init=\"nowhere.safetensors\""], 65, &["nowhere.safetensors"]);
}

/// Returns the header of llm.c's token files.
fn llmc_header(tokens: u32) -> Vec<u8> {
    let mut header = vec![0_u8; 1024];
    for (at, number) in [(0, 20_240_520_u32), (4, 1), (8, tokens)] {
        header[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    header
}

fn unusable_training_data_is_refused() {
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
    // The header promises more tokens than the file contains.
    job.write("ids.bin", [llmc_header(5000), ids(3)].concat());
    refused(&job, &bin, 65, &["ids.bin", "5000"]);
}

fn token_files_with_and_without_header_train() {
    let ids: Vec<u8> = (0..2000_u32).flat_map(|i| ((i * 7 % 256) as u16).to_le_bytes()).collect();
    let losses = |file: Vec<u8>| {
        let job = Job::new();
        job.write("ids.bin", file);
        job.run_ok(&["--set", "data.tokenizer=\"bin\"", "--set", "data.train=[\"ids.bin\"]"]);
        job.losses()
    };
    let without_header = losses(ids.clone());
    assert_eq!(without_header.len(), 8);
    assert_eq!(without_header, losses([llmc_header(2000), ids].concat()));
}

fn checkpoint_of_another_model_is_refused() {
    let job = Job::new();
    job.run_ok(&["--set", "checkpoint.dir=\"saved\""]);
    let checkpoints = || std::fs::read_dir(job.path().join("saved")).unwrap().count();
    let before = checkpoints();
    let run = job.run(&["--resume=saved", "--set", "model.dim=64", "--set", "train.steps=20"]);
    assert_eq!(run.code, 65, "{}", run.stderr);
    for word in ["dim", "64", "32"] {
        assert!(run.stderr.contains(word), "{word} in {}", run.stderr);
    }
    assert_eq!(checkpoints(), before);
}

fn output_that_is_not_a_directory_is_refused() {
    let job = Job::new();
    job.write("taken", "a file");
    refused(&job, &["--set", "job.output=\"taken\""], 2, &["taken"]);
}
