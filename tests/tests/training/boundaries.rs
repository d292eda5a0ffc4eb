//! Boundaries at which trainers lose or repeat data: the last batch of an evaluation, the end of an epoch, the first
//! checkpoint, and the last step of a run that is continued for more steps.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Process, children, is_alive, wait_for};

xlaunch_harness::tests! {
    validation_of_five_sequences_counts_each_once_whatever_ranks_and_batch,
    run_killed_within_an_epoch_equals_an_uninterrupted_one_through_later_epochs,
    run_resumed_at_the_end_of_an_epoch_equals_an_uninterrupted_one,
    epochs_are_passes_over_the_data_for_any_number_of_ranks_and_after_a_resume,
    one_kept_checkpoint_is_complete_whenever_slow_saves_are_killed,
    resume_without_a_complete_checkpoint_says_so_and_starts_at_the_first_step,
    cosine_schedule_of_more_steps_is_stated_and_starts_at_the_resumed_step,
    continued_wsd_and_constant_schedules_equal_those_of_a_longer_run;
}

/// Tokens of a sequence: `model.seq`.
const SEQ: usize = 32;

/// `--set` before each setting.
fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

fn series(job: &Job, key: &str) -> Vec<f64> {
    job.metrics().iter().filter_map(|line| line[key].as_f64()).collect()
}

/// Text without repetition, so that each sequence has a loss of its own.
fn text(tokens: usize) -> Vec<u8> {
    let lines = (0u64..).flat_map(|i| format!("{} {};", i * i % 9973, i * 31 % 101).into_bytes());
    lines.take(tokens).collect()
}

fn validation_of_five_sequences_counts_each_once_whatever_ranks_and_batch() {
    // Other bytes in each sequence, so that each has a loss of its own.
    let all: Vec<u8> = (0..=5 * SEQ).map(|at| b'A' + (at / SEQ * 9 + at % 3) as u8).collect();
    // A learning rate that changes no weight: the global batch, and so training, depends on the number of ranks.
    let common = ["train.steps=1", "train.eval_every=1", "train.lr=1e-30", "data.val=[\"val/v.txt\"]"];
    let evaluate = |val: &[u8], ranks: &str, settings: &[&str]| {
        let job = Job::new();
        job.write("val/v.txt", val);
        let run = job.run_ok(&[&["--nproc", ranks], &set(&[&common[..], settings].concat())[..]].concat());
        let tokens = format!("({} tokens)", val.len() - 1);
        assert!(run.stderr.contains(&tokens), "{tokens} in {}", run.stderr);
        series(&job, "val/loss")[0]
    };
    let each: Vec<f64> = (0..5)
        .map(|index| evaluate(&all[index * SEQ..=(index + 1) * SEQ], "1", &["train.batch=1"]))
        .collect();
    assert!(each.windows(2).all(|pair| (pair[0] - pair[1]).abs() > 1e-4), "{each:?}");
    let mean = each.iter().sum::<f64>() / 5.0;
    for (ranks, settings) in [
        ("1", &["train.batch=1", "train.eval_batches=5"][..]),
        ("4", &["train.batch=3"]),
        ("4", &["train.batch=3", "comm.shard=\"optimizer\""]),
        ("4", &["train.batch=3", "comm.shard=\"parameters\""]),
        ("4", &["train.batch=3", "train.eval_tokens=160"]),
    ] {
        let loss = evaluate(&all, ranks, settings);
        assert!((loss - mean).abs() < 1e-6, "{ranks} ranks, {settings:?}: {loss}, expected {mean}");
    }
}

/// Two ranks with four sequences each: eight in a step.
fn two_ranks<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    let common = ["checkpoint.async=false", "checkpoint.keep=0", "data.val_fraction=0.0"];
    [&["--nproc", "2"], &set(&[&common[..], settings].concat())[..]].concat()
}

/// Kills xlaunch and its workers, and returns when none is left.
fn kill(process: Process) {
    let workers = children(process.pid());
    process.signal(Signal::KILL);
    drop(process);
    wait_for("the workers to be gone", || workers.iter().all(|pid| !is_alive(*pid)).then_some(()));
}

/// Trains on this text without an interruption, and again killed in step `killed`, and resumed. Expects the same
/// losses and bits after `steps` steps, and that the second run has continued after step `resumed`.
fn assert_kill_changes_nothing(text: &[u8], settings: &[&str], killed: u64, resumed: u64, steps: u64) {
    let all_steps = format!("train.steps={steps}");
    let args = two_ranks(&[settings, &[&all_steps]].concat());
    let whole = Job::new();
    whole.write("text/a.txt", text);
    whole.run_ok(&args);
    let mut job = Job::with_fail_points(&format!("data@*:{killed}=hang"));
    job.write("text/a.txt", text);
    let process = job.spawn(&args);
    process.wait_for_stderr("fail point reached");
    // The other rank may reach the step before rank 0 has put the checkpoint in place.
    let checkpoint = job.run_dir().join(format!("checkpoints/step-{resumed:08}"));
    wait_for("the checkpoint", || checkpoint.exists().then_some(()));
    kill(process);
    job.set_env("XLAUNCH_FAIL", "");
    let run = job.run_ok(&[&args[..], &["--resume"]].concat());
    let expected = format!("resuming at step {} ", resumed + 1);
    assert!(run.stderr.contains(&expected), "{expected} in {}", run.stderr);
    assert_eq!(job.losses().len() as u64, steps);
    assert_eq!(job.losses(), whole.losses(), "{settings:?}");
    assert!(job.saved_state(steps) == whole.saved_state(steps), "{settings:?}");
    let state: Value = serde_json::from_slice(&job.checkpoint(steps, "state.json")).unwrap();
    assert_eq!(state["sequences"], 8 * steps);
}

fn run_killed_within_an_epoch_equals_an_uninterrupted_one_through_later_epochs() {
    // 41 sequences an epoch, so that epochs end within steps. Without shuffling there is one more.
    let text = text(42 * SEQ + 1);
    for shuffle in ["data.shuffle=true", "data.shuffle=false"] {
        // Step 10 is in the second epoch, the last one in the fourth or fifth.
        assert_kill_changes_nothing(&text, &[shuffle, "checkpoint.every=4"], 10, 8, 21);
    }
}

fn run_resumed_at_the_end_of_an_epoch_equals_an_uninterrupted_one() {
    // 40 sequences an epoch: five steps.
    for (shuffle, windows) in [("data.shuffle=true", 41), ("data.shuffle=false", 40)] {
        assert_kill_changes_nothing(&text(windows * SEQ + 1), &[shuffle, "checkpoint.every=5"], 11, 10, 20);
    }
}

fn epochs_are_passes_over_the_data_for_any_number_of_ranks_and_after_a_resume() {
    let job = Job::new();
    // 41 sequences an epoch, eight in a step of two ranks.
    job.write("text/a.txt", text(42 * SEQ + 1));
    let run = |settings: &[&str], more: &[&str]| {
        let mut args = two_ranks(&[&["checkpoint.dir=saved"], settings].concat());
        if more.contains(&"--nproc") {
            args.drain(..2);
        }
        let run = job.run(&[&args[..], more].concat());
        assert_eq!(run.code, 0, "{}", run.stderr);
        run
    };
    // 82 sequences are ten steps and a quarter of another. The schedule decays over the same number of steps.
    assert!(run(&["train.epochs=2"], &["--dry-run"]).stdout.contains("\nsteps         11\n"));
    let described = run(&["train.epochs=2"], &[]).stderr;
    assert!(described.contains(" 11 steps of 256 tokens: 2.82K tokens, 2.15 epochs of 1.31K"), "{described}");
    let (losses, rates) = (job.losses(), series(&job, "train/lr"));
    run(&["train.steps=11"], &["--overwrite"]);
    assert_eq!((job.losses(), series(&job, "train/lr")), (losses.clone(), rates));
    // Half an epoch are three steps. The rest of two epochs: as if there had been no break.
    run(&["train.epochs=0.5", "train.schedule=constant"], &["--overwrite"]);
    assert_eq!(job.losses().len(), 3);
    let constant = ["train.epochs=2", "train.schedule=constant"];
    run(&constant, &["--resume=saved/step-00000003"]);
    assert_eq!(job.losses().len(), 11);
    // On one rank, 58 sequences are 15 steps of four.
    let on_one_rank = ["--resume=saved/step-00000003", "--nproc", "1"];
    let planned = run(&constant, &[&on_one_rank[..], &["--dry-run"]].concat()).stdout;
    assert!(planned.contains(" 128 a step, 2.69K in all, 2.05 epochs of 1.31K\n"), "{planned}");
    let resumed = run(&constant, &on_one_rank);
    for text in
        ["train.steps was 3, is now 18", " 18 steps of 128 tokens: 2.69K tokens, 2.05 epochs of 1.31K"]
    {
        assert!(resumed.stderr.contains(text), "{text} in {}", resumed.stderr);
    }
    assert_eq!(job.losses().len(), 18);
    let state = std::fs::read(job.path().join("saved/step-00000018/state.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&state).unwrap()["sequences"], 24 + 15 * 4);
    let done = run(&["train.epochs=0.5"], &["--resume=saved/step-00000003"]);
    assert!(done.stderr.contains("has all 3 steps; raise `train.epochs` to continue"), "{}", done.stderr);
}

/// Steps of the complete checkpoints in a directory.
fn complete(dir: &Path) -> Vec<u64> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let step = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
        entry.path().join("manifest.json").exists().then_some(step)
    });
    named.collect()
}

fn one_kept_checkpoint_is_complete_whenever_slow_saves_are_killed() {
    let mut job = Job::with_fail_points(
        "save_write@*:*=slow(5);save_sync@*:*=slow(5);save_commit@0:*=slow(20);save_delete@0:*=slow(20)",
    );
    let settings =
        ["checkpoint.every=1", "checkpoint.keep=1", "checkpoint.dir=\"saved\"", "train.steps=100000"];
    let args = [&["--nproc", "2"], &set(&settings)[..], &["--resume"]].concat();
    let saved = job.path().join("saved");
    let mut newest = 0;
    // xorshift64.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..12 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let process = job.spawn(&args);
        if newest > 0 {
            process.wait_for_stderr(&format!("resuming at step {} ", newest + 1));
        }
        wait_for("a newer checkpoint", || {
            complete(&saved).into_iter().any(|step| step > newest).then_some(())
        });
        std::thread::sleep(Duration::from_millis(random % 400));
        kill(process);
        let found = complete(&saved);
        assert!(found.iter().any(|step| *step > newest), "{found:?} after {newest}");
        newest = found.into_iter().max().unwrap();
    }
    job.set_env("XLAUNCH_FAIL", "");
    let last = format!("train.steps={}", newest + 1);
    let run = job.run_ok(&[&args[..], &["--set", &last]].concat());
    assert!(run.stderr.contains(&format!("resuming at step {} ", newest + 1)), "{}", run.stderr);
    assert!(!run.stderr.contains("damaged"), "{}", run.stderr);
    assert_eq!(complete(&saved).into_iter().max(), Some(newest + 1));
}

fn resume_without_a_complete_checkpoint_says_so_and_starts_at_the_first_step() {
    let fresh = Job::new();
    fresh.run_ok(&["--nproc", "2"]);
    // Before the first save, and during it.
    for (rule, saves) in [("data@*:2=hang", false), ("save_commit@0:4=hang", true)] {
        for dir in [None, Some("checkpoint.dir=\"saved\"")] {
            let mut job = Job::with_fail_points(rule);
            let settings: Vec<&str> = ["checkpoint.every=4"].into_iter().chain(dir).collect();
            let args = [&["--nproc", "2"], &set(&settings)[..]].concat();
            let process = job.spawn(&args);
            process.wait_for_stderr("fail point reached");
            kill(process);
            let killed = job.run_dir();
            job.set_env("XLAUNCH_FAIL", "");
            let mut output = String::new();
            // A run that is named is not replaced by a fresh start.
            let named = job.run(&[&args[..], &["--resume=runs/train/latest"]].concat());
            assert_eq!(named.code, 65, "{rule}: {}", named.stderr);
            assert!(named.stderr.contains("no checkpoint in"), "{rule}: {}", named.stderr);
            assert_eq!(job.run_dir(), killed);
            output += &named.stderr;
            let run = job.run_ok(&[&args[..], &["--resume"]].concat());
            output += &run.stderr;
            for text in ["no checkpoint of job `train` below", "starting at step 1"] {
                assert!(run.stderr.contains(text), "{rule}, {dir:?}: {text} in {}", run.stderr);
            }
            let unfinished = output.contains("the checkpoint of step 4 is not complete: ");
            assert_eq!(unfinished, saves, "{rule}, {dir:?}: {output}");
            assert_ne!(job.run_dir(), killed);
            assert_eq!(job.losses(), fresh.losses(), "{rule}, {dir:?}");
        }
    }
}

/// The cosine schedule's rate of a step, from 1, where the warm-up has two steps.
fn cosine(step: u32, steps: u32) -> f64 {
    let (lr, warmup, min_ratio) = (0.01, 2.0, 0.1);
    let progress = (f64::from(step) - 1.0 - warmup) / (f64::from(steps) - warmup);
    lr * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()))
}

fn cosine_schedule_of_more_steps_is_stated_and_starts_at_the_resumed_step() {
    let job = Job::new();
    job.run_ok(&set(&["train.lr=0.01", "train.steps=8"]));
    let run = job.run_ok(&[&set(&["train.lr=0.01", "train.steps=20"])[..], &["--resume"]].concat());
    let expected = (3..=8).map(|step| cosine(step, 8)).chain((9..=20).map(|step| cosine(step, 20)));
    for (found, expected) in series(&job, "train/lr")[2..].iter().zip(expected) {
        assert!((found - expected).abs() < 1e-8, "{found}, expected {expected}");
    }
    let jump = format!("the learning rate of step 9 was {:.3e}, is now {:.3e}", 0.01 * 0.1, cosine(9, 20));
    for text in ["train.steps was 8, is now 20", &jump] {
        assert!(run.stderr.contains(text), "{text} in {}", run.stderr);
    }
    // The same for a job that has been configured for these steps, and is resumed.
    let longer = Job::new();
    longer.run_ok(&set(&["train.lr=0.01", "train.steps=20"]));
    assert_eq!(series(&longer, "train/lr")[8..], series(&job, "train/lr")[8..]);
    assert!(longer.saved_state(20) != job.saved_state(20), "the first eight steps had other rates");
}

fn continued_wsd_and_constant_schedules_equal_those_of_a_longer_run() {
    let wsd = ["train.schedule=wsd", "train.decay_steps=3", "checkpoint.keep=0"];
    let constant = ["train.schedule=constant", "checkpoint.keep=0"];
    for (schedule, from) in [(&wsd[..], 5), (&constant, 8)] {
        let run = |job: &Job, steps: &str, more: &[&str]| {
            let common = [schedule, &["checkpoint.every=5", "checkpoint.async=false", steps]].concat();
            job.run_ok(&[&set(&common)[..], more].concat())
        };
        let (longer, job) = (Job::new(), Job::new());
        run(&longer, "train.steps=14", &[]);
        run(&job, "train.steps=8", &[]);
        let checkpoint = job.run_dir().join(format!("checkpoints/step-{from:08}"));
        let resumed = run(&job, "train.steps=14", &[&format!("--resume={}", checkpoint.display())]);
        assert!(resumed.stderr.contains("train.steps was 8, is now 14"), "{}", resumed.stderr);
        assert!(!resumed.stderr.contains("the learning rate of step"), "{}", resumed.stderr);
        assert_eq!(series(&job, "train/lr"), series(&longer, "train/lr"), "{schedule:?}");
        assert_eq!(job.losses(), longer.losses(), "{schedule:?}");
        assert!(job.saved_state(14) == longer.saved_state(14), "{schedule:?}");
    }
    // A checkpoint of the decay itself goes on at the peak.
    let job = Job::new();
    job.run_ok(&set(&wsd));
    let run = job.run_ok(&[&set(&[&wsd[..], &["train.steps=14"]].concat())[..], &["--resume"]].concat());
    let jump = format!("the learning rate of step 9 was {:.3e}, is now {:.3e}", 3e-4, 3e-3);
    assert!(run.stderr.contains(&jump), "{jump} in {}", run.stderr);
}
