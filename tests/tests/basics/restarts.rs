//! Restarts by progress, their budget, and the accounting of a job's time.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Launch, Output, Process, children, send_signal, wait_for};

use crate::FAKE_WORKER;

xlaunch_harness::tests! {
    job_that_makes_progress_is_restarted_at_once_each_time,
    three_attempts_without_progress_end_the_job_with_the_first_error,
    restarts_used_up_by_outside_kills_are_retryable,
    command_gets_all_of_its_restarts_however_soon_it_fails,
    first_error_of_three_attempts_is_quoted_from_the_error_file_of_its_attempt,
    rank_that_cannot_save_is_named_and_the_job_restarts;
}

/// Tolerated difference between the account and the clock of a job: reading both takes a moment.
const ACCOUNT_TOLERANCE: Duration = Duration::from_secs(2);

fn scripted(script: &str, args: &[&str]) -> Output {
    Job::scripted(FAKE_WORKER, script).run(args)
}

/// Returns xlaunch's own lines about restarts.
fn restarts(stderr: &str) -> Vec<&str> {
    stderr.lines().filter(|line| line.contains("; restarting")).collect()
}

fn status(job: &Job) -> Value {
    let status = Process::spawn(&mut job.command(&["status", "--json"])).wait().stdout;
    serde_json::from_str(&status).unwrap()
}

/// Returns the furthest step of the job so far.
fn furthest_step(job: &Job) -> u64 {
    let text = std::fs::read_to_string(job.run_dir().join("metrics.jsonl")).unwrap_or_default();
    // The last line may be incomplete.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| line["_step"].as_u64()).max().unwrap_or(0)
}

fn wait_for_step(job: &Job, step: u64) {
    wait_for("a step", || (furthest_step(job) >= step).then_some(()));
}

fn job_that_makes_progress_is_restarted_at_once_each_time() {
    let job = Job::new();
    let settings = ["train.steps=1000000", "checkpoint.every=20", "launch.max_restarts=4"];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let run = job.spawn(&[&["--nproc", "2"], &settings[..]].concat());
    for number in 1..=4 {
        wait_for_step(&job, furthest_step(&job) + 60);
        let workers = wait_for("workers", || Some(children(run.pid())).filter(|all| all.len() == 2));
        send_signal(workers[number % 2], Signal::KILL);
        run.wait_for_stderr(&format!("({number} of 4)"));
        wait_for("its end", || (run.stderr().matches("restarted in ").count() == number).then_some(()));
    }
    let account = status(&job)["accounting"].clone();
    assert_eq!(account["restarts"]["killed"], 4, "{account}");
    for kind in ["step", "repeated", "start", "down"] {
        assert!(account["seconds"][kind].as_f64().unwrap() > 0.0, "{kind} in {account}");
    }
    let started = status(&job)["started_unix_seconds"].as_f64().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    let seconds = status(&job)["accounting"]["seconds"].clone();
    let sum: f64 = seconds.as_object().unwrap().values().filter_map(Value::as_f64).sum();
    let difference = (sum - (now - started)).abs();
    assert!(difference < ACCOUNT_TOLERANCE.as_secs_f64(), "{sum} of {}", now - started);

    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    let all = restarts(&run.stderr);
    assert!(all.len() == 4 && !all.iter().any(|line| line.contains("restarting in")), "{all:?}");
    let times = run.stderr.lines().find(|line| line.contains("restarted in ")).unwrap();
    for part in ["stop ", "start ", "join ", "resume ", "first step "] {
        assert!(times.contains(part), "{part} in {times}");
    }
    assert!(run.stdout.lines().last().unwrap().starts_with("useful time "), "{}", run.stdout);
}

fn three_attempts_without_progress_end_the_job_with_the_first_error() {
    let run = scripted(
        "join sleep;join stderr:the-disk-is-on-fire exit-plus:40",
        &["--nproc", "2", "--set", "launch.max_restarts=8"],
    );
    assert_eq!((run.code, restarts(&run.stderr).len()), (1, 2), "{}", run.stderr);
    assert!(run.stderr.contains("3 attempts in a row made no progress"), "{}", run.stderr);
    let root = run.root_cause();
    assert!(root.contains("rank 1 (pid ") && root.contains("exit code 40"), "{}", run.stderr);
    assert!(root.contains("the-disk-is-on-fire"), "its own last lines: {}", run.stderr);
    assert!(run.failure_report().contains("the last one failed with rank 1: exit code 42"), "{}", run.stderr);
}

fn restarts_used_up_by_outside_kills_are_retryable() {
    let killed = scripted("join sleep;join signal:9", &["--nproc", "2", "--set", "launch.max_restarts=1"]);
    assert_eq!((killed.code, restarts(&killed.stderr).len()), (75, 1), "{}", killed.stderr);
    let crashed = scripted("join sleep;join signal:6", &["--nproc", "2", "--set", "launch.max_restarts=1"]);
    assert_eq!((crashed.code, restarts(&crashed.stderr).len()), (1, 1), "{}", crashed.stderr);
}

fn command_gets_all_of_its_restarts_however_soon_it_fails() {
    let launch = Launch::new();
    let script = "[ $RANK$TORCHELASTIC_RESTART_COUNT = 13 ] && exit; test $RANK = 0 || kill -9 $$; \
                  [ $TORCHELASTIC_RESTART_COUNT = 3 ] || exec sleep 100";
    let run = launch.run_shell(&["--max-restarts", "3"], 2, script);
    assert_eq!((run.code, restarts(&run.stderr).len()), (0, 3), "{}", run.stderr);
}

fn first_error_of_three_attempts_is_quoted_from_the_error_file_of_its_attempt() {
    let launch = Launch::new();
    let script = r#"
        test $RANK = 0 && exec sleep 100
        echo "{\"message\": \"broken in attempt $TORCHELASTIC_RESTART_COUNT\"}" > $TORCHELASTIC_ERROR_FILE
        exit $((40 + TORCHELASTIC_RESTART_COUNT))
    "#;
    let run = launch.run_shell(&["--max-restarts", "2"], 2, script);
    assert!(run.root_cause().contains("broken in attempt 0"), "{}", run.stderr);
}

fn rank_that_cannot_save_is_named_and_the_job_restarts() {
    let job = Job::new();
    // Many steps lie between two saves, so that the directory vanishes before one and not in the middle of it: then the
    // rank that happens to write would be the only one to fail.
    let settings = ["checkpoint.every=1000", "checkpoint.on_error=stop", "launch.max_restarts=1"];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    // A directory in place of a temporary file of rank 1 cannot be created in advance. A file in place of the directory
    // of checkpoints fails all ranks, and the lowest rank is named.
    let dir = job.path().join("saved");
    let saved = format!("checkpoint.dir={}", dir.display());
    let run = job
        .spawn(&[&["--nproc", "2", "--set", &saved, "--set", "train.steps=1000000"], &settings[..]].concat());
    wait_for("the first checkpoint", || dir.join("step-00001000/manifest.json").exists().then_some(()));
    std::fs::rename(&dir, job.path().join("moved")).unwrap();
    std::fs::write(&dir, "").unwrap();
    run.wait_for_stderr("(1 of 1)");
    std::fs::remove_file(&dir).unwrap();
    std::fs::rename(job.path().join("moved"), &dir).unwrap();
    run.signal(Signal::INT);
    let run = run.wait();
    let restart = restarts(&run.stderr)[0];
    assert!(restart.contains("rank 0: exit code 79 (checkpoint not saved)"), "{restart}");
}
