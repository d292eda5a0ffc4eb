//! Runs that continue others: one curve, the schedule, and runs with no steps left.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use xlaunch_tests::{Job, Output, wait_for};

xlaunch_harness::tests! {
    continued_run_starts_with_the_points_of_its_parent,
    restarted_run_repeats_no_step,
    restart_with_other_data_is_refused,
    resume_with_nothing_left_leaves_the_newest_run_alone,
    wsd_decays_at_the_end_and_can_be_continued_before;
}

/// `--set` before each setting.
fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", setting]).collect()
}

fn steps(job: &Job) -> Vec<u64> {
    let metrics = job.metrics();
    let steps = metrics.iter().filter(|line| line["train/loss"].is_f64());
    steps.map(|line| line["_step"].as_u64().unwrap()).collect()
}

fn continued_run_starts_with_the_points_of_its_parent() {
    for saved in ["", "saved"] {
        let dir = format!("checkpoint.dir={saved:?}");
        let mut common =
            vec!["train.steps=12", "train.eval_every=2", "checkpoint.every=5", "checkpoint.keep=0"];
        common.push("checkpoint.async=false");
        if !saved.is_empty() {
            common.push(&dir);
        }
        let job = Job::new();
        job.run_ok(&set(&common));
        let whole = job.metrics();
        let first = job.run_dir();
        let checkpoints = if saved.is_empty() { first.join("checkpoints") } else { job.path().join(saved) };
        // Simulates a run that was lost after step 7.
        for step in ["step-00000010", "step-00000012"] {
            std::fs::remove_dir_all(checkpoints.join(step)).unwrap();
        }
        // A run's directory, also through the link; or a directory of checkpoints.
        let path = if saved.is_empty() { "--resume=runs/train/latest" } else { "--resume=saved" };
        let run = job.run_ok(&[&set(&common)[..], &[path]].concat());
        assert!(run.stderr.contains("resuming at step 6"), "{}", run.stderr);
        assert_ne!(job.run_dir(), first);
        assert_eq!(steps(&job), (1..=12).collect::<Vec<_>>());
        let curve = |metrics: &[Value], key: &str| -> Vec<(u64, f64)> {
            let point = |line: &Value| Some((line["_step"].as_u64()?, line[key].as_f64()?));
            metrics.iter().filter_map(point).collect()
        };
        for key in ["train/loss", "val/loss"] {
            assert_eq!(curve(&job.metrics(), key), curve(&whole, key), "{key}, {saved:?}");
        }
    }
}

/// Runs a job of 600 steps, and kills a worker in the middle, after calling `meanwhile`.
fn killed_in_the_middle(meanwhile: impl FnOnce(&Job)) -> (Job, Output) {
    let job = Job::new();
    let settings =
        ["train.steps=600", "checkpoint.every=20", "checkpoint.memory=off", "launch.max_restarts=1"];
    let run = job.spawn(&[&["--nproc", "2"], &set(&settings)[..]].concat());
    wait_for("steps after a checkpoint", || {
        let text = std::fs::read_to_string(job.run_dir().join("metrics.jsonl")).ok()?;
        let mut entries = std::fs::read_dir(job.run_dir().join("checkpoints")).ok()?.flatten();
        let saved = entries.any(|entry| entry.file_name().to_string_lossy().starts_with("step-"));
        (saved && text.lines().count() > 45).then_some(())
    });
    let status = job.command(&["status", "--json"]).output().unwrap();
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let launch = status.as_array().map_or(&status, |launches| &launches[0]);
    let worker = launch["ranks"][1]["pid"].as_i64().unwrap();
    meanwhile(&job);
    kill_process(Pid::from_raw(worker as i32).unwrap(), Signal::KILL).unwrap();
    let output = run.wait();
    (job, output)
}

fn restarted_run_repeats_no_step() {
    let (job, run) = killed_in_the_middle(|_| {});
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("resuming at step"), "{}", run.stderr);
    assert_eq!(steps(&job), (1..=600).collect::<Vec<_>>());
}

fn restart_with_other_data_is_refused() {
    // The running workers continue with the file that they have opened.
    let replace = |job: &Job| {
        let path = job.path().join("text/a.txt");
        let text = std::fs::read_to_string(&path).unwrap().replace("line", "LINE");
        job.write("text/new", text);
        std::fs::rename(job.path().join("text/new"), path).unwrap();
    };
    let (_, run) = killed_in_the_middle(replace);
    assert_eq!(run.code, 65, "{}", run.stderr);
    assert!(run.stderr.contains("the training data has changed during the run"), "{}", run.stderr);
}

fn resume_with_nothing_left_leaves_the_newest_run_alone() {
    let job = Job::new();
    job.run_ok(&[]);
    let (run, runs) = (job.run_dir(), || std::fs::read_dir(job.path().join("runs/train")).unwrap().count());
    let before = runs();
    for resume in ["--resume", "--resume=runs/train/latest"] {
        let output = job.run_ok(&[resume]);
        let text = "nothing is left to train";
        assert!(output.stderr.contains(text) && output.stderr.contains("step-00000008"), "{}", output.stderr);
        assert_eq!((job.run_dir(), runs(), output.stdout.as_str()), (run.clone(), before, ""));
    }
    assert_eq!(job.losses().len(), 8);
    job.run_ok(&["--resume", "--set", "train.steps=9"]);
    assert_ne!(job.run_dir(), run);
}

fn wsd_decays_at_the_end_and_can_be_continued_before() {
    let rates = |job: &Job| -> Vec<f64> {
        job.metrics().iter().filter_map(|line| line["train/lr"].as_f64()).collect()
    };
    let common = ["train.schedule=wsd", "train.lr=0.01", "train.min_lr_ratio=0.0", "train.steps=10"];
    let job = Job::new();
    job.run_ok(&set(
        &[&common[..], &["train.decay_steps=4", "checkpoint.every=6", "checkpoint.keep=0"]].concat()
    ));
    let expected = [0.005, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.0075, 0.005, 0.0025];
    let close = |found: &[f64], expected: &[f64]| {
        found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-8)
    };
    assert!(close(&rates(&job), &expected), "{:?}", rates(&job));
    // By default a fifth of all steps, which is two here.
    let resume = format!("--resume={}", job.run_dir().join("checkpoints/step-00000006").display());
    job.run_ok(&[&set(&common)[..], &[&resume]].concat());
    assert!(close(&rates(&job)[6..], &[0.01, 0.01, 0.01, 0.005]), "{:?}", rates(&job));

    let refused = job.run(&set(&[&common[..], &["train.decay_steps=9"]].concat()));
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(
        refused.stderr.contains("train.decay_steps") && refused.stderr.contains("1 to 8"),
        "{}",
        refused.stderr
    );
}
