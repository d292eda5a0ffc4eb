//! Losses, gradients and weights that are not finite: no step applies them, no checkpoint contains them, and the job
//! fails without a restart.

use std::path::PathBuf;

use rustix::process::Signal;
use xlaunch_tests::{Job, Output};

xlaunch_harness::tests! {
    step_that_is_not_finite_ends_the_job_and_leaves_the_checkpoint_of_the_last_good_step,
    skipped_steps_are_reported_and_ten_in_a_row_end_the_job,
    step_with_a_bad_batch_is_skipped_and_its_checkpoint_is_saved_after_the_next_good_step,
    job_is_stopped_with_a_checkpoint_after_a_skipped_step,
    last_step_of_a_job_is_not_skipped,
    validation_loss_that_is_not_finite_ends_the_job,
    weights_that_overflow_are_not_saved;
}

/// Every step is saved, and all steps have the same learning rate.
const SETTINGS: [&str; 5] = [
    "checkpoint.every=1",
    "checkpoint.async=false",
    "checkpoint.keep=0",
    "train.warmup=0",
    "train.schedule=constant",
];
/// Step 5 is the last good one with the checkpoint of step 4 and this learning rate: its update makes weights so large
/// that the next forward pass overflows.
const EXPLODE: &str = "train.lr=1e30";

fn run(job: &Job, ranks: u32, settings: &[&str]) -> Output {
    let ranks = ranks.to_string();
    let settings = SETTINGS.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    job.run(&["--nproc", &ranks].into_iter().chain(settings).collect::<Vec<_>>())
}

/// Returns a job that has trained for four steps, and `checkpoint.resume` with its checkpoint.
fn trained_for_four_steps() -> (Job, String) {
    let job = Job::new();
    let output = run(&job, 1, &["train.steps=4"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let checkpoint = job.run_dir().join("checkpoints/step-00000004").display().to_string();
    (job, format!("checkpoint.resume={checkpoint:?}"))
}

/// Returns `checkpoint.init` with weights whose loss is not finite.
fn exploded_weights(job: &Job, resume: &str) -> String {
    let output = run(job, 1, &[resume, "train.steps=5", EXPLODE]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let weights = job.run_dir().join("checkpoints/step-00000005/model.safetensors");
    format!("checkpoint.init={:?}", weights.display().to_string())
}

fn checkpoints(job: &Job) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(job.run_dir().join("checkpoints")) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    let mut steps: Vec<_> = paths.filter(|path| path.join("manifest.json").exists()).collect();
    steps.sort();
    steps
}

/// Asserts that the job failed for this reason, was not restarted, and left this number of checkpoints.
fn assert_diverged(job: &Job, output: &Output, reason: &str, saved: usize) {
    assert_eq!(output.code, 1, "{}", output.stderr);
    assert!(output.stderr.contains(reason), "{reason} in {}", output.stderr);
    assert!(!output.stderr.contains("; restarting"), "{}", output.stderr);
    assert_eq!(checkpoints(job).len(), saved, "{:?}", checkpoints(job));
}

fn step_that_is_not_finite_ends_the_job_and_leaves_the_checkpoint_of_the_last_good_step() {
    let (job, resume) = trained_for_four_steps();
    let init = exploded_weights(&job, &resume);
    for ranks in [1, 2, 4] {
        for sharded in ["comm.shard=\"none\"", "comm.shard=\"optimizer\""] {
            let run = |settings: &[&str]| {
                run(&job, ranks, &[&[sharded, "launch.max_restarts=2"], settings].concat())
            };
            let state = || job.saved_state(5);
            let good = run(&[&resume, EXPLODE, "train.steps=5"]);
            assert_eq!(good.code, 0, "{}", good.stderr);
            let expected = state();
            // Once in the middle of the job, and once at its end.
            for steps in ["train.steps=8", "train.steps=6"] {
                let diverged = run(&[&resume, EXPLODE, steps]);
                assert_diverged(&job, &diverged, "training diverged at step 6: the loss is", 1);
                assert!(state() == expected, "{ranks} ranks, {sharded}, {steps}");
            }
            let diverged = run(&[&init]);
            assert_diverged(&job, &diverged, "training diverged at step 1: the loss is", 0);
            let diverged = run(&[&init, "train.clip=0.0"]);
            assert_diverged(&job, &diverged, "training diverged at step 1: the loss is", 0);
        }
    }
}

fn skipped_steps_are_reported_and_ten_in_a_row_end_the_job() {
    let (job, resume) = trained_for_four_steps();
    let init = exploded_weights(&job, &resume);
    let output = run(&job, 2, &[&init, "train.nonfinite=skip", "train.steps=20", "launch.max_restarts=2"]);
    assert_diverged(&job, &output, "training diverged at step 10", 0);
    assert!(output.stderr.contains("10 skipped steps in a row"), "{}", output.stderr);
    for step in 1..10 {
        let line = format!("step {step}/20  skipped: the loss is");
        assert_eq!(output.stderr.matches(&line).count(), 1, "{line} in {}", output.stderr);
    }
    let skipped = job.metrics().iter().map(|line| line["train/skipped_steps"].as_u64()).collect::<Vec<_>>();
    assert_eq!(skipped, (1..10).map(Some).collect::<Vec<_>>());
}

/// Writes a model in which the logit of byte `~` is about -3e31 everywhere. If it is the next byte, the loss is large
/// but finite, and the square of the gradient norm overflows; otherwise its probability is 0.
fn write_weights_with_bad_logit(job: &Job) {
    let output = run(job, 1, &["model.arch=gpt2", "model.tied=false", "train.lr=1e-30", "train.steps=1"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let mut file = job.checkpoint(1, "model.safetensors");
    // Normalised values add up to 0, so the sum of the final norm's outputs is that of its biases.
    fill_row(&mut file, "lnf.bias", 0, 1.0);
    fill_row(&mut file, "head.weight", usize::from(b'~'), -1e30);
    job.write("bad.safetensors", file);
}

/// Sets the values of a row of a tensor in a safetensors file. A vector has one row.
fn fill_row(file: &mut [u8], tensor: &str, row: usize, value: f32) {
    let number = |value: &serde_json::Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let header_len = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + header_len]).unwrap();
    let tensor = &header[tensor];
    let len = 4 * number(tensor["shape"].as_array().unwrap().last().unwrap());
    let start = 8 + header_len + number(&tensor["data_offsets"][0]) + row * len;
    file[start..start + len].copy_from_slice(&value.to_le_bytes().repeat(len / 4));
}

fn step_with_a_bad_batch_is_skipped_and_its_checkpoint_is_saved_after_the_next_good_step() {
    for (ranks, sharded) in [(1, false), (2, false), (2, true)] {
        let job = Job::new();
        write_weights_with_bad_logit(&job);
        // Four sequences of 32 bytes per rank and step; the bad byte is in step 4.
        let mut text = b"some words and more ".repeat(300);
        text[3 * 128 * ranks as usize + 40] = b'~';
        job.write("text/a.txt", text);
        let bad_batch = |settings: &[&str]| {
            let sharded = format!("comm.shard={:?}", if sharded { "optimizer" } else { "none" });
            let init = "checkpoint.init=bad.safetensors";
            let common = [init, "model.arch=gpt2", "model.tied=false", "data.shuffle=false", &sharded];
            run(&job, ranks, &[&common[..], settings].concat())
        };
        let output = bad_batch(&[]);
        assert_diverged(&job, &output, "training diverged at step 4: the loss is", 3);
        assert!(output.stderr.contains("its square overflows fp32"), "{}", output.stderr);
        let output = bad_batch(&["train.nonfinite=skip", "checkpoint.every=4"]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        assert!(output.stderr.contains("step 4/8  skipped: the loss is"), "{}", output.stderr);
        let skipped: Vec<_> =
            job.metrics().iter().filter_map(|line| line["train/skipped_steps"].as_u64()).collect();
        assert_eq!(skipped, [0, 0, 0, 1, 1, 1, 1, 1]);
        let saved: Vec<_> =
            checkpoints(&job).iter().filter_map(|path| path.file_name().map(ToOwned::to_owned)).collect();
        assert_eq!(saved, ["step-00000005", "step-00000008"], "{ranks} ranks, sharded {sharded}");
    }
}

fn job_is_stopped_with_a_checkpoint_after_a_skipped_step() {
    let (job, resume) = trained_for_four_steps();
    let init = exploded_weights(&job, &resume);
    // Steps that take long enough to be interrupted before training counts as diverged.
    let settings = [&init, "train.nonfinite=skip", "train.steps=20", "train.accumulate=50"];
    let settings = SETTINGS.iter().chain(&settings).flat_map(|setting| ["--set", setting]);
    let run = job.spawn(&["--nproc", "2"].into_iter().chain(settings).collect::<Vec<_>>());
    run.wait_for_stderr("step 1/20  skipped");
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    assert_eq!(checkpoints(&job).len(), 1, "{}", run.stderr);
}

fn last_step_of_a_job_is_not_skipped() {
    let (job, resume) = trained_for_four_steps();
    let output = run(&job, 1, &[&resume, EXPLODE, "train.nonfinite=skip", "train.steps=7"]);
    assert_diverged(&job, &output, "training diverged at step 7", 1);
    assert!(output.stderr.contains("step 6/7  skipped"), "{}", output.stderr);
}

fn validation_loss_that_is_not_finite_ends_the_job() {
    let (job, resume) = trained_for_four_steps();
    for nonfinite in ["train.nonfinite=stop", "train.nonfinite=skip"] {
        for ranks in [1, 2] {
            let settings = [&resume, nonfinite, "train.steps=5", "train.eval_every=1", "train.lr=1e12"];
            let output = run(&job, ranks, &settings);
            assert_diverged(&job, &output, "training diverged at step 5: the validation loss is", 0);
        }
    }
}

fn weights_that_overflow_are_not_saved() {
    let (job, resume) = trained_for_four_steps();
    for sharded in ["comm.shard=\"none\"", "comm.shard=\"optimizer\""] {
        let output = run(&job, 2, &[&resume, sharded, "train.lr=3e38", "train.steps=5"]);
        assert_diverged(&job, &output, "training diverged at step 5: a weight", 0);
    }
}
