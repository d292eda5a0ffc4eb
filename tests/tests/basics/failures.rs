//! Failures of a training job's workers, interrupts, and the end of the launcher itself.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use xlaunch_tests::{Job, Output, Process, children, is_alive, send_signal, wait_for};

use crate::FAKE_WORKER;

xlaunch_harness::tests! {
    worker_failure_stops_group_and_names_root_cause,
    killed_worker_is_reported_with_its_signal,
    killed_trainer_stops_the_job,
    ranks_that_do_not_join_are_named_after_join_timeout,
    rank_with_other_version_or_config_or_layout_is_refused_by_name,
    interrupt_stops_at_step_boundary_with_checkpoint,
    second_interrupt_kills_workers,
    sigterm_stops_cleanly,
    workers_do_not_outlive_killed_launcher,
    children_of_workers_are_killed_with_the_job,
    failed_group_is_restarted_up_to_max_restarts;
}

/// The workers of a launcher that is killed are killed at once. A worker that has to notice by itself takes longer: the
/// time after which it considers its agent lost.
const KILLED_WITHIN: Duration = Duration::from_secs(10);
/// A job that runs until it is stopped.
const ENDLESS: [&str; 2] = ["--set", "train.steps=1000000"];

fn scripted(script: &str, args: &[&str]) -> Output {
    Job::scripted(FAKE_WORKER, script).run(args)
}

/// Starts an endless job and waits for its first step.
fn start_training(job: &Job, args: &[&str]) -> Process {
    let run = job.spawn(&[&ENDLESS, args].concat());
    run.wait_for_stderr("step 1/");
    run
}

/// Returns the process ids of the workers, by rank.
fn workers(run: &Process, count: usize) -> Vec<u32> {
    wait_for("the workers", || Some(children(run.pid())).filter(|workers| workers.len() == count))
}

fn worker_failure_stops_group_and_names_root_cause() {
    let run = scripted("join sleep;join stderr:the-disk-is-on-fire exit:7;join sleep", &["--nproc", "3"]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    let (root, after) = (run.root_cause(), run.consequences());
    for words in ["rank 1 (pid ", "exit code 7", "the-disk-is-on-fire"] {
        assert!(run.failure_report().contains(words), "{words} in {}", run.stderr);
    }
    assert!(
        !root.contains("rank 0") && after.contains("rank 0") && after.contains("rank 2"),
        "{}",
        run.stderr
    );
}

fn killed_worker_is_reported_with_its_signal() {
    let run = scripted("join sleep;join signal:9", &["--nproc", "2"]);
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("rank 1 (pid ") && run.stderr.contains("SIGKILL"), "{}", run.stderr);
}

fn killed_trainer_stops_the_job() {
    let job = Job::new();
    let run = start_training(&job, &["--nproc", "2"]);
    let workers = workers(&run, 2);
    send_signal(workers[1], Signal::KILL);
    let run = run.wait();
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains(&format!("(pid {})", workers[1])), "{}", run.stderr);
    assert!(workers.iter().all(|worker| !is_alive(*worker)));
}

fn ranks_that_do_not_join_are_named_after_join_timeout() {
    let run =
        scripted("join sleep;sleep;join sleep;sleep", &["--nproc", "4", "--set", "launch.join_timeout=1.0"]);
    assert_eq!(run.code, 69, "{}", run.stderr);
    assert!(run.stderr.contains("1, 3") || run.stderr.contains("1 and 3"), "{}", run.stderr);
}

fn rank_with_other_version_or_config_or_layout_is_refused_by_name() {
    for (mismatch, word) in [("version", "0.0.1"), ("config", "config"), ("layout", "layout")] {
        let run = scripted(&format!("join sleep;join:{mismatch} sleep"), &["--nproc", "2"]);
        assert_eq!(run.code, 69, "{mismatch}: {}", run.stderr);
        assert!(run.stderr.contains("rank 1") && run.stderr.contains(word), "{mismatch}: {}", run.stderr);
    }
}

fn interrupt_stops_at_step_boundary_with_checkpoint() {
    let job = Job::new();
    let run = start_training(&job, &["--nproc", "2"]);
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    let steps = job.losses().len();
    assert!(!job.checkpoint(steps as u64, "manifest.json").is_empty());
}

fn second_interrupt_kills_workers() {
    let job = Job::scripted(FAKE_WORKER, "ignore-sigterm join sleep");
    let run = job.spawn(&["--nproc", "2", "--set", "launch.shutdown_timeout=100.0"]);
    let joined = |rank| job.worker_stderr(rank).contains("joined 2 ranks");
    wait_for("both ranks to join", || (joined(0) && joined(1)).then_some(()));
    let workers = children(run.pid());
    run.signal(Signal::INT);
    run.wait_for_stderr("again");
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 130, "{}", run.stderr);
    assert!(workers.iter().all(|worker| !is_alive(*worker)));
}

fn sigterm_stops_cleanly() {
    let job = Job::new();
    let run = start_training(&job, &[]);
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code, 143);
}

fn workers_do_not_outlive_killed_launcher() {
    let job = Job::new();
    let run = start_training(&job, &["--nproc", "3"]);
    let workers = workers(&run, 3);
    run.signal(Signal::KILL);
    let start = Instant::now();
    assert_eq!(run.wait().code, 137);
    wait_for("the workers to be killed", || workers.iter().all(|worker| !is_alive(*worker)).then_some(()));
    assert!(start.elapsed() < KILLED_WITHIN, "{:?}", start.elapsed());
}

fn children_of_workers_are_killed_with_the_job() {
    let job = Job::scripted(FAKE_WORKER, "grandchild join sleep;join stderr:ready sleep");
    let run = job.spawn(&["--nproc", "2"]);
    run.wait_for_stderr("ready");
    let grandchildren: Vec<u32> = children(run.pid()).into_iter().flat_map(children).collect();
    assert_eq!(grandchildren.len(), 1);
    run.signal(Signal::INT);
    run.wait_for_stderr("again");
    run.signal(Signal::INT);
    run.wait();
    wait_for("the grandchild to be killed", || (!is_alive(grandchildren[0])).then_some(()));
}

fn failed_group_is_restarted_up_to_max_restarts() {
    let job = Job::scripted(FAKE_WORKER, "join exit:3");
    let run = job.run(&["--nproc", "2", "--set", "launch.max_restarts=2"]);
    assert_eq!(run.code, 1);
    let restarts: Vec<&str> = run.stderr.lines().filter(|line| line.contains("restarting")).collect();
    assert!(restarts.len() == 2 && restarts[1].contains("2 of 2"), "{}", run.stderr);
    assert!(run.stderr.contains("2 restarts"), "{}", run.stderr);
    // The processes of a fourth attempt, if they had already been started, have left nothing behind.
    let logs = std::fs::read_dir(job.run_dir().join("logs")).unwrap();
    let mut attempts: Vec<_> = logs.map(|entry| entry.unwrap().file_name()).collect();
    attempts.sort();
    assert_eq!(attempts, ["attempt_0", "attempt_1", "attempt_2"]);
}
