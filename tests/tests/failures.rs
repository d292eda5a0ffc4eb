//! What the launcher does when workers, users or the launcher itself end early.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use xlaunch_tests::{Job, Running, alive, children, wait_for};

const FAKE_WORKER: &str = env!("CARGO_BIN_EXE_fake_worker");

fn scripted(script: &str, args: &[&str]) -> xlaunch_tests::Finished {
    Job::scripted(FAKE_WORKER, script).run(args)
}

/// The workers of a job of two, by rank.
fn two_workers(run: &Running) -> Vec<u32> {
    wait_for("two workers", || Some(children(run.pid())).filter(|workers| workers.len() == 2))
}

fn signal(pid: u32, signal: Signal) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a process id");
    rustix::process::kill_process(pid, signal).expect("a process of ours");
}

#[test]
fn a_failing_worker_ends_the_others_and_is_reported_with_its_last_words() {
    let run = scripted("join sleep;join say:the-disk-is-on-fire exit:7;join sleep", &["--nproc", "3"]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    let report = run.stderr.split("the job failed").nth(1).unwrap_or_default();
    assert!(report.contains("rank 1 (pid ") && report.contains("exit code 7"), "{}", run.stderr);
    assert!(report.contains("the-disk-is-on-fire"), "{}", run.stderr);
    let (root, others) = report.split_once("then:").unwrap_or_default();
    assert!(!root.contains("rank 0") && others.contains("rank 0") && others.contains("rank 2"), "{report}");
}

#[test]
fn a_killed_worker_is_reported_with_its_signal() {
    let run = scripted("join sleep;join signal:9", &["--nproc", "2"]);
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("rank 1 (pid ") && run.stderr.contains("SIGKILL"), "{}", run.stderr);
}

#[test]
fn a_real_worker_that_is_killed_ends_the_job() {
    let job = Job::new();
    let run = job.start(&["--nproc", "2", "--set", "train.steps=1000000"]);
    run.wait_for_stderr("step 1/");
    let workers = two_workers(&run);
    signal(workers[1], Signal::KILL);
    let run = run.finish();
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains(&format!("(pid {})", workers[1])), "{}", run.stderr);
    assert!(workers.iter().all(|worker| !alive(*worker)));
}

#[test]
fn a_rank_that_hangs_is_named_until_it_goes_on() {
    let job = Job::new();
    let run = job.start(&["--nproc", "2", "--set", "train.steps=1000000", "--set", "launch.stall_timeout=3"]);
    run.wait_for_stderr("step 1/");
    let workers = two_workers(&run);
    signal(workers[1], Signal::STOP);
    run.wait_for_stderr("xlaunch: rank 1 sent no heartbeat for");
    let status = Running::start(&mut job.command(&["status", "--json"])).finish().stdout;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let hint = |rank: usize| status["ranks"][rank]["hint"].as_str().unwrap_or_default().to_owned();
    assert!(hint(1).starts_with("no heartbeat for") && hint(0).is_empty(), "{status}");
    // Longer than a worker waits for its agent.
    std::thread::sleep(Duration::from_secs(16));
    signal(workers[1], Signal::CONT);
    run.wait_for_stderr("xlaunch: steps continue");
    run.signal(Signal::INT);
    let run = run.finish();
    assert_eq!(run.code, 143, "{}", run.stderr);
    assert_eq!(run.stderr.matches("sent no heartbeat").count(), 1, "{}", run.stderr);
}

#[test]
fn a_rank_whose_trainer_alone_hangs_is_named_with_what_it_does() {
    let job = Job::new();
    let run = job.start(&["--nproc", "2", "--set", "train.steps=1000000", "--set", "launch.stall_timeout=2"]);
    run.wait_for_stderr("step 1/");
    let workers = two_workers(&run);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/freeze.py");
    let mut freeze = Command::new("python3");
    // Its first thread is the trainer's.
    freeze.args([script, &workers[1].to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut freeze) = freeze.spawn() else {
        eprintln!("skipped: no python3 here");
        return;
    };
    let mut said = String::new();
    BufReader::new(freeze.stdout.take().unwrap()).read_line(&mut said).unwrap();
    if said.trim() != "frozen" {
        eprintln!("skipped: this user may not trace processes here");
        return;
    }
    run.wait_for_stderr("xlaunch: rank 1 made no progress for");
    let told = run.stderr();
    let line = told.lines().find(|line| line.contains("made no progress")).unwrap_or_default();
    assert!(line.contains(" s (phase: ") && line.contains(", step "), "{line}");
    drop(freeze.stdin.take());
    assert!(freeze.wait().unwrap().success());
    run.wait_for_stderr("xlaunch: steps continue");
    run.signal(Signal::INT);
    assert_eq!(run.finish().code, 143);
}

#[test]
fn ranks_that_do_not_join_are_named_at_the_deadline() {
    let run =
        scripted("join sleep;sleep;join sleep;sleep", &["--nproc", "4", "--set", "launch.join_timeout=1.0"]);
    assert_eq!(run.code, 69, "{}", run.stderr);
    let report = run.stderr.split("the job failed").nth(1).unwrap_or_default();
    assert!(report.contains("rank") && report.contains('1') && report.contains('3'), "{}", run.stderr);
    assert!(run.stderr.contains("1, 3") || run.stderr.contains("1 and 3"), "{}", run.stderr);
}

#[test]
fn whoever_disagrees_is_refused_by_name() {
    for (odd, word) in [("version", "0.0.1"), ("config", "config"), ("layout", "layout")] {
        let run = scripted(&format!("join sleep;join:{odd} sleep"), &["--nproc", "2"]);
        assert_eq!(run.code, 69, "{odd}: {}", run.stderr);
        assert!(run.stderr.contains("rank 1") && run.stderr.contains(word), "{odd}: {}", run.stderr);
    }
}

#[test]
fn one_interrupt_stops_at_a_step_with_a_checkpoint() {
    let job = Job::new();
    let run = job.start(&["--nproc", "2", "--set", "train.steps=1000000"]);
    run.wait_for_stderr("step 1/");
    run.signal(Signal::INT);
    let run = run.finish();
    assert_eq!(run.code, 143, "{}", run.stderr);
    let steps = job.losses().len();
    assert!(!job.checkpoint(steps as u64, "manifest.json").is_empty());
}

#[test]
fn two_interrupts_end_at_once() {
    let job = Job::scripted(FAKE_WORKER, "deaf join sleep");
    let run = job.start(&["--nproc", "2", "--set", "launch.shutdown_timeout=100.0"]);
    wait_for("both to join", || {
        let said = |rank: usize| {
            std::fs::read_to_string(job.latest().join(format!("logs/attempt_0/{rank}/stderr.log")))
                .is_ok_and(|text| text.contains("joined 2 ranks"))
        };
        (said(0) && said(1)).then_some(())
    });
    let workers = children(run.pid());
    run.signal(Signal::INT);
    run.wait_for_stderr("again");
    run.signal(Signal::INT);
    let run = run.finish();
    assert_eq!(run.code, 130, "{}", run.stderr);
    assert!(workers.iter().all(|worker| !alive(*worker)));
}

#[test]
fn terminate_stops_cleanly_too() {
    let job = Job::new();
    let run = job.start(&["--set", "train.steps=1000000"]);
    run.wait_for_stderr("step 1/");
    run.signal(Signal::TERM);
    assert_eq!(run.finish().code, 143);
}

#[test]
fn no_worker_outlives_a_launcher_that_is_killed() {
    let job = Job::new();
    let run = job.start(&["--nproc", "3", "--set", "train.steps=1000000"]);
    run.wait_for_stderr("step 1/");
    let workers =
        wait_for("three workers", || Some(children(run.pid())).filter(|workers| workers.len() == 3));
    run.signal(Signal::KILL);
    let start = std::time::Instant::now();
    assert_eq!(run.finish().code, 137);
    wait_for("the workers' end", || workers.iter().all(|worker| !alive(*worker)).then_some(()));
    assert!(start.elapsed() < std::time::Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn what_a_worker_started_ends_with_the_job() {
    let job = Job::scripted(FAKE_WORKER, "grandchild join sleep;join say:ready sleep");
    let run = job.start(&["--nproc", "2"]);
    run.wait_for_stderr("ready");
    let grandchildren: Vec<u32> = children(run.pid()).into_iter().flat_map(children).collect();
    assert_eq!(grandchildren.len(), 1);
    run.signal(Signal::INT);
    run.wait_for_stderr("again");
    run.signal(Signal::INT);
    run.finish();
    wait_for("the grandchild's end", || (!alive(grandchildren[0])).then_some(()));
}

#[test]
fn a_failed_group_is_started_again_as_often_as_allowed() {
    let run = scripted("join exit:3", &["--nproc", "2", "--set", "launch.max_restarts=2"]);
    assert_eq!(run.code, 1);
    let restarts: Vec<&str> = run.stderr.lines().filter(|line| line.contains("; restarting")).collect();
    assert!(restarts.len() == 2 && restarts[1].contains(" s (2 of 2)"), "{}", run.stderr);
    assert!(run.stderr.contains("all 2 restarts are used up"), "{}", run.stderr);
}
