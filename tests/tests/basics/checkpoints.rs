//! Directories of checkpoints: the checkpoint that a run continues from, and isolation of runs from each other.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use xlaunch_tests::{Job, children, read_state, send_signal, suspend, wait_for};

xlaunch_harness::tests! {
    run_that_continues_from_an_earlier_step_sets_later_checkpoints_aside,
    fresh_run_in_a_used_directory_is_refused_unless_it_may_overwrite,
    damaged_checkpoint_is_named_renamed_and_passed_over,
    job_without_any_valid_checkpoint_does_not_start_afresh,
    second_job_in_a_directory_is_refused,
    job_whose_directory_is_moved_away_saves_in_a_new_one,
    job_does_not_touch_a_directory_that_another_job_uses_in_place_of_its_own,
    other_data_batch_seed_or_order_needs_consent,
    resumed_run_keeps_its_warm_up,
    run_killed_at_random_moments_equals_an_undisturbed_one,
    failed_save_is_reported_and_training_goes_on,
    failed_last_save_fails_the_job;
}

const EVERY_4: [&str; 2] = ["--set", "checkpoint.every=4"];
const SAVED: [&str; 4] = ["--set", "checkpoint.async=false", "--set", "checkpoint.dir=\"saved\""];

fn args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&EVERY_4[..], &SAVED, more].concat()
}

/// Waits until there is a checkpoint. On a fast machine, the first one is soon removed for a newer one.
fn wait_for_checkpoint(job: &Job) {
    let any = || entries(job).iter().any(|name| name.starts_with("step-"));
    wait_for("a checkpoint", || any().then_some(()));
}

/// Returns the names in the directory of checkpoints, except the lock.
fn entries(job: &Job) -> Vec<String> {
    let entries = std::fs::read_dir(job.path().join("saved")).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != ".lock");
    names.sort();
    names
}

fn flip_last_byte(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
}

fn run_that_continues_from_an_earlier_step_sets_later_checkpoints_aside() {
    let job = Job::new();
    job.run_ok(&args(&[]));
    assert_eq!(entries(&job), ["step-00000004", "step-00000008"]);
    let keep_1 = ["--set", "checkpoint.keep=1", "--set", "checkpoint.every=2"];
    let output = job.run_ok(&[&args(&["--resume=saved/step-00000004"])[..], &keep_1].concat());
    assert!(output.stderr.contains("step-00000008.abandoned"), "{}", output.stderr);
    assert!(output.stderr.contains("resuming at step 5 "), "{}", output.stderr);
    // The checkpoint that the run began with is kept until another run begins.
    assert_eq!(entries(&job), ["step-00000004", "step-00000008", "step-00000008.abandoned"]);
}

fn fresh_run_in_a_used_directory_is_refused_unless_it_may_overwrite() {
    let job = Job::new();
    job.run_ok(&args(&["--set", "train.steps=40"]));
    let used = ["step-00000036", "step-00000040"];
    assert_eq!(entries(&job), used);
    let refused = job.run(&args(&[]));
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    for text in ["step-00000040", "--resume", "--overwrite"] {
        assert!(refused.stderr.contains(text), "{text} in {}", refused.stderr);
    }
    assert_eq!(entries(&job), used, "nothing was changed");
    job.run_ok(&args(&["--overwrite"]));
    let expected = ["step-00000004", "step-00000008", "step-00000036.abandoned", "step-00000040.abandoned"];
    assert_eq!(entries(&job), expected);
}

fn damaged_checkpoint_is_named_renamed_and_passed_over() {
    for (file, found_by) in [
        ("manifest.json", "before"),
        ("model.safetensors", "while"),
        ("optimizer-00001-of-00002.safetensors", "while"),
    ] {
        let job = Job::new();
        let ranks = ["--nproc", "2"];
        job.run_ok(&[&args(&ranks)[..], &["--set", "train.sample=0"]].concat());
        flip_last_byte(&job.path().join("saved/step-00000008").join(file));
        let output = job.run_ok(&args(&[&ranks[..], &["--resume"]].concat()));
        for text in ["saved/step-00000008", file, "step-00000008.damaged"] {
            assert!(output.stderr.contains(text), "{text} ({found_by} the start) in {}", output.stderr);
        }
        assert!(output.stderr.contains("resuming at step 5 "), "{file}: {}", output.stderr);
        assert_eq!(entries(&job), ["step-00000004", "step-00000008", "step-00000008.damaged"], "{file}");
    }
}

fn job_without_any_valid_checkpoint_does_not_start_afresh() {
    for file in ["manifest.json", "model.safetensors"] {
        let job = Job::new();
        job.run_ok(&args(&[]));
        for step in ["step-00000004", "step-00000008"] {
            flip_last_byte(&job.path().join("saved").join(step).join(file));
        }
        let output = job.run(&args(&["--resume"]));
        assert_eq!(output.code, 65, "{file}: {}", output.stderr);
        for text in ["step-00000004", "step-00000008", file] {
            assert!(output.stderr.contains(text), "{text} in {}", output.stderr);
        }
    }
    // A named checkpoint is not replaced by another one.
    let job = Job::new();
    job.run_ok(&args(&[]));
    flip_last_byte(&job.path().join("saved/step-00000008/model.safetensors"));
    let output = job.run(&args(&["--resume=saved/step-00000008"]));
    assert_eq!(output.code, 65, "{}", output.stderr);
    assert_eq!(entries(&job), ["step-00000004", "step-00000008"]);
}

fn second_job_in_a_directory_is_refused() {
    let job = Job::new();
    let first = job.spawn(&endless(&[]));
    wait_for_checkpoint(&job);
    let second = job.run(&args(&["--resume"]));
    assert_eq!(second.code, 75, "{}", second.stderr);
    for text in ["saved", "used by another job: job `"] {
        assert!(second.stderr.contains(text), "{text} in {}", second.stderr);
    }
    first.signal(Signal::TERM);
    assert_eq!(first.wait().code, 143);
    job.run_ok(&args(&["--resume"]));
}

/// Returns the arguments of a job that runs until it is stopped.
fn endless(more: &[&'static str]) -> Vec<&'static str> {
    let endless = ["--set", "train.steps=100000", "--set", "train.eval_every=0"];
    args(&[&endless[..], more].concat())
}

fn move_checkpoints(job: &Job, name: &str) {
    std::fs::rename(job.path().join("saved"), job.path().join(name)).unwrap();
}

fn job_whose_directory_is_moved_away_saves_in_a_new_one() {
    let job = Job::new();
    let first = job.spawn(&endless(&[]));
    wait_for_checkpoint(&job);
    move_checkpoints(&job, "moved");
    first.wait_for_stderr("saved was moved or removed; saving in a new one");
    wait_for_checkpoint(&job);
    let second = job.run(&args(&["--resume"]));
    assert_eq!(second.code, 75, "{}", second.stderr);
    assert!(second.stderr.contains("saved is used by another job: job `"), "{}", second.stderr);
    first.signal(Signal::TERM);
    assert_eq!(first.wait().code, 143);
    job.run_ok(&args(&["--resume", "--set", "train.steps=1"]));
}

fn job_does_not_touch_a_directory_that_another_job_uses_in_place_of_its_own() {
    let job = Job::new();
    let first = job.spawn(&endless(&["--set", "launch.stall_timeout=600"]));
    wait_for_checkpoint(&job);
    let workers = children(first.pid());
    workers.iter().copied().for_each(suspend);
    move_checkpoints(&job, "moved");
    let second = job.spawn(&endless(&["--set", "checkpoint.every=100000"]));
    second.wait_for_stderr("step 1/");
    workers.iter().for_each(|pid| send_signal(*pid, Signal::CONT));
    first.wait_for_stderr("saved is used by another job: job `");
    assert!(entries(&job).is_empty(), "{:?}", entries(&job));
    first.signal(Signal::TERM);
    let output = first.wait();
    assert_eq!(output.code, 75, "{}", output.stderr);
    second.signal(Signal::TERM);
    assert_eq!(second.wait().code, 143);
    assert!(matches!(&entries(&job)[..], [only] if only.starts_with("step-")), "{:?}", entries(&job));
}

fn other_data_batch_seed_or_order_needs_consent() {
    let job = Job::new();
    job.run_ok(&args(&["--set", "train.steps=4"]));
    for (setting, text) in [
        ("train.batch=3", "sequences"),
        ("job.seed=7", "job.seed was"),
        ("data.shuffle=false", "data.shuffle was true"),
        ("data.val_fraction=0.2", "the training data was"),
    ] {
        let resume = ["--resume", "--set", setting];
        let refused = job.run(&args(&resume));
        assert_eq!(refused.code, 65, "{setting}: {}", refused.stderr);
        assert!(
            refused.stderr.contains(text) && refused.stderr.contains("--resume-changed"),
            "{}",
            refused.stderr
        );
    }
    let output =
        job.run_ok(&args(&["--resume", "--resume-changed", "--set", "job.seed=7", "--set", "train.lr=1e-4"]));
    for text in ["job.seed was", "train.lr was"] {
        assert!(output.stderr.contains(text), "{text} in {}", output.stderr);
    }
}

fn resumed_run_keeps_its_warm_up() {
    let rates = |job: &Job| -> Vec<f64> {
        let lines = job.metrics().into_iter();
        lines.filter_map(|line| line["train/lr"].as_f64()).collect()
    };
    let constant = ["--set", "train.schedule=constant", "--set", "train.steps=40"];
    let job = Job::new();
    job.run_ok(&args(&constant));
    let whole = rates(&job);
    // By default the warm-up is a fraction of all steps, of which there are more now.
    let more =
        ["--resume=saved/step-00000036", "--set", "train.schedule=constant", "--set", "train.steps=4000"];
    let process = job.spawn(&args(&more));
    let first = wait_for("the first step of the second run", || {
        // Until the second run has a directory, the newest run is the first one.
        let first = std::fs::read_to_string(job.run_dir().join("metrics.jsonl")).ok()?;
        // Before that, the file starts with the steps of the first run.
        let line: serde_json::Value = serde_json::from_str(first.lines().nth(36)?).ok()?;
        (line["_step"] == 37 && first.lines().nth(40).is_some()).then_some(line)
    });
    drop(process);
    assert_eq!(first["train/lr"].as_f64(), Some(whole[36]));
}

fn run_killed_at_random_moments_equals_an_undisturbed_one() {
    let ranks_and_steps = ["--nproc", "2", "--set", "train.steps=300", "--set", "checkpoint.every=7"];
    let args = [&ranks_and_steps[..], &["--set", "checkpoint.dir=\"saved\"", "--resume"]].concat();
    let whole = Job::new();
    whole.run_ok(&args);
    let job = Job::new();
    // The job is killed while starting, training, saving or resuming, as decided by xorshift64.
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..10 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let process = job.spawn(&args);
        std::thread::sleep(Duration::from_millis(random % 800));
        process.signal(Signal::KILL);
        drop(process);
        // The next job finds these entries.
        let names = entries(&job);
        assert!(names.iter().all(|name| !name.ends_with(".damaged")), "{names:?}");
    }
    job.run_ok(&args);
    let last = |job: &Job| read_state(&job.path().join("saved/step-00000300"));
    assert!(last(&job) == last(&whole));
}

fn failed_save_is_reported_and_training_goes_on() {
    let job = Job::new();
    let process = job.spawn(&args(&["--set", "train.steps=100000", "--set", "train.eval_every=0"]));
    let (saved, away) = (job.path().join("saved"), job.path().join("away"));
    wait_for_checkpoint(&job);
    std::fs::rename(&saved, &away).unwrap();
    std::fs::write(&saved, "").unwrap();
    process.wait_for_stderr("failed: ");
    std::fs::remove_file(&saved).unwrap();
    std::fs::rename(&away, &saved).unwrap();
    let before = entries(&job);
    wait_for("another checkpoint", || (entries(&job) != before).then_some(()));
    process.signal(Signal::TERM);
    let output = process.wait();
    assert_eq!(output.code, 143, "{}", output.stderr);
    let path = saved.display().to_string();
    assert!(output.stderr.contains(&path) && output.stderr.contains("(os error"), "{}", output.stderr);
    assert!(output.stdout.contains(" failed, "), "{}", output.stdout);
}

fn failed_last_save_fails_the_job() {
    let job = Job::new();
    let process =
        job.spawn(&args(&["--nproc", "2", "--set", "train.steps=100000", "--set", "train.eval_every=0"]));
    let (saved, away) = (job.path().join("saved"), job.path().join("away"));
    wait_for_checkpoint(&job);
    std::fs::rename(&saved, &away).unwrap();
    std::fs::write(&saved, "").unwrap();
    process.signal(Signal::TERM);
    let output = process.wait();
    assert!(output.code == 65 || output.code == 75, "{}: {}", output.code, output.stderr);
    assert!(output.stderr.contains(&saved.display().to_string()), "{}", output.stderr);
    assert!(std::fs::read_dir(&away).unwrap().count() > 1);
}
