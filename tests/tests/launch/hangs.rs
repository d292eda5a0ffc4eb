//! Ranks of a training job that hang or are slow: reports, terminations, and `xlaunch stacks`.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_proto::v1::Phase;
use xlaunch_tests::{
    FrozenThread, HangMode, InjectedHang, Job, Launch, Process, children, requirements, send_signal, wait_for,
};

xlaunch_harness::tests! {
    stopped_rank_is_ended_with_evidence_and_training_resumes_with_the_same_weights,
    stopped_rank_is_only_reported_until_it_continues_if_the_job_says_so,
    job_that_is_stopped_as_a_whole_and_continues_is_not_a_hang,
    stacks_show_phase_and_threads_of_a_training_job,
    process_goes_on_after_a_debugger_that_is_killed_while_it_attaches,
    stacks_show_the_whole_process_tree_of_a_command;
    needs requirements::c_compiler:
    rank_that_computes_for_ever_is_named_with_its_phase_and_ended,
    rank_stuck_in_initialization_is_named_and_ended,
    rank_whose_data_loader_is_blocked_is_named_and_ended,
    slow_rank_is_reported_and_not_ended;
    needs requirements::freeze_thread:
    rank_under_a_debugger_is_only_reported;
}

/// Long enough for a step on a loaded machine.
const HANG_TIMEOUT: &str = "launch.hang_timeout=10";
/// A job that runs until it is stopped.
const ENDLESS: &str = "train.steps=1000000";
/// Longer than the hang timeout, and than the time after which a worker considers its agent lost.
const LONG_HANG: Duration = Duration::from_secs(16);
/// Number of steps of a job that is restarted, and of steps between its checkpoints.
const STEPS: u64 = 1500;
const RESTARTED: [&str; 10] = [
    "--nproc",
    "2",
    "--set",
    HANG_TIMEOUT,
    "--set",
    "launch.max_restarts=1",
    "--set",
    "train.steps=1500",
    "--set",
    "checkpoint.every=100",
];

/// Starts a job and waits for its first step.
fn start_training(job: &Job, args: &[&str]) -> Process {
    let run = job.spawn(args);
    run.wait_for_stderr("step 1/");
    run
}

/// Returns the process ids of the workers, by rank.
fn workers(run: &Process) -> Vec<u32> {
    wait_for("the workers", || Some(children(run.pid())).filter(|workers| workers.len() == 2))
}

/// Returns the hint that `xlaunch status` shows for each rank.
fn hints(job: &Job) -> Vec<String> {
    let status = Process::spawn(&mut job.command(&["status", "--json"])).wait().stdout;
    let status: Value = serde_json::from_str(&status).unwrap();
    let ranks = status["ranks"].as_array().into_iter().flatten();
    ranks.map(|rank| rank["hint"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Waits until rank 1, and no other rank, has a hint. Returns the line about it on stderr.
fn wait_until_rank_1_is_reported(job: &Job, run: &Process) -> String {
    wait_for("a hint for rank 1", || hints(job).get(1).is_some_and(|hint| !hint.is_empty()).then_some(()));
    assert!(hints(job)[0].is_empty(), "{:?}", hints(job));
    wait_for("a line about rank 1", || {
        run.stderr().lines().find(|line| line.contains("rank 1 ")).map(str::to_owned)
    })
}

/// Waits until there are steps again and the hint is gone.
fn wait_until_training_continues(job: &Job) {
    let steps = job.losses().len();
    wait_for("steps", || (job.losses().len() > steps).then_some(()));
    wait_for("no hint", || hints(job).iter().all(String::is_empty).then_some(()));
}

/// Returns the evidence on a rank's first attempt.
fn evidence(job: &Job, rank: u32) -> String {
    let path = job.run_dir().join(format!("logs/attempt_0/{rank}/hang.txt"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Waits until there is a memory snapshot to resume from. On a slow disk, the job may end before its first checkpoint.
fn wait_for_steps(job: &Job) {
    wait_for("150 steps", || (job.losses().len() >= 150).then_some(()));
}

/// Lets a job with a hang finish. It names rank 1, is restarted once, and ends with the weights of a job that never
/// hung.
fn finishes_as_if_it_had_not_hung(job: &Job, run: Process) -> String {
    let run = run.wait();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let restarts: Vec<&str> = run.stderr.lines().filter(|line| line.contains("restarting")).collect();
    assert!(matches!(restarts[..], [line] if line.starts_with("xlaunch: rank 1: ")), "{}", run.stderr);
    assert!(run.stderr.contains("/logs/attempt_0/1/hang.txt"), "{}", run.stderr);
    // The same for all tests.
    static UNDISTURBED: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    let undisturbed = UNDISTURBED.get_or_init(|| {
        let job = Job::new();
        job.run_ok(&RESTARTED);
        job.saved_state(STEPS)
    });
    assert!(job.saved_state(STEPS) == *undisturbed, "other weights");
    run.stderr
}

fn stopped_rank_is_ended_with_evidence_and_training_resumes_with_the_same_weights() {
    let job = Job::new();
    let run = start_training(&job, &RESTARTED);
    wait_for_steps(&job);
    send_signal(workers(&run)[1], Signal::STOP);
    let stderr = finishes_as_if_it_had_not_hung(&job, run);
    let line = stderr.lines().find(|line| line.contains("rank 1 is stopped and sent no heartbeat for "));
    assert!(line.is_some_and(|line| line.ends_with(" s; rank 0 is waiting for it")), "{stderr}");
    let culprit = evidence(&job, 1);
    for words in ["rank 1: stopped, no heartbeat", "phase: ", ", step ", "state T", "the process is stopped"]
    {
        assert!(culprit.contains(words), "{words} in {culprit}");
    }
    let victim = evidence(&job, 0);
    assert!(victim.contains("rank 1: stopped") && victim.contains("phase: all-reduce"), "{victim}");
    assert!(!victim.contains("gdb"), "only culprits are shown to a debugger: {victim}");
}

fn rank_that_computes_for_ever_is_named_with_its_phase_and_ended() {
    let mut job = Job::new();
    let hang = InjectedHang::prepare(&mut job, 1, HangMode::Spin(Phase::Backward));
    let run = start_training(&job, &RESTARTED);
    wait_for_steps(&job);
    hang.begin();
    let stderr = finishes_as_if_it_had_not_hung(&job, run);
    let line = stderr.lines().find(|line| line.contains("rank 1 made no progress")).unwrap_or_default();
    assert!(
        line.contains("(phase: backward, step ") && line.ends_with("rank 0 is waiting for it"),
        "{stderr}"
    );
    let culprit = evidence(&job, 1);
    assert!(culprit.contains("phase: backward") && culprit.contains("state R"), "{culprit}");
    // The stack of the function that loops; a slow host has not printed it when the debugger's time is over.
    let stack = ["pwrite64", "no stacks", "gdb: stopped after"];
    assert!(stack.iter().any(|words| culprit.contains(words)), "{culprit}");
}

fn rank_stuck_in_initialization_is_named_and_ended() {
    let mut job = Job::new();
    let hang = InjectedHang::prepare(&mut job, 1, HangMode::Spin(Phase::Initialize));
    hang.begin();
    let run = job.spawn(&RESTARTED);
    let stderr = finishes_as_if_it_had_not_hung(&job, run);
    let line = stderr.lines().find(|line| line.contains("rank 1 made no progress")).unwrap_or_default();
    assert!(line.contains("(phase: initialize") && line.contains("rank 0 is waiting for it"), "{stderr}");
    assert!(evidence(&job, 1).contains("phase: initialize"), "{}", evidence(&job, 1));
}

fn rank_whose_data_loader_is_blocked_is_named_and_ended() {
    let mut job = Job::new();
    let hang = InjectedHang::prepare(&mut job, 1, HangMode::Read);
    let run = start_training(&job, &RESTARTED);
    wait_for_steps(&job);
    hang.begin();
    let stderr = finishes_as_if_it_had_not_hung(&job, run);
    let line = stderr.lines().find(|line| line.contains("rank 1 made no progress")).unwrap_or_default();
    assert!(line.contains("(phase: wait for data, step "), "{stderr}");
    let culprit = evidence(&job, 1);
    assert!(culprit.contains("phase: wait for data") && culprit.contains(" loader "), "{culprit}");
}

fn slow_rank_is_reported_and_not_ended() {
    let mut job = Job::new();
    let hang = InjectedHang::prepare(&mut job, 1, HangMode::Slow(Phase::Forward));
    hang.begin();
    let run = start_training(&job, &["--nproc", "2", "--set", ENDLESS, "--set", "launch.max_restarts=1"]);
    let line = wait_until_rank_1_is_reported(&job, &run);
    assert!(line.contains("rank 1 slows the others down: its steps take "), "{line}");
    assert!(hints(&job)[1].ends_with(" x the median of all ranks"), "{:?}", hints(&job));
    run.signal(Signal::INT);
    let run = run.wait();
    assert!(run.code == 143 && !run.stderr.contains("restarting"), "{}", run.stderr);
}

fn stopped_rank_is_only_reported_until_it_continues_if_the_job_says_so() {
    let job = Job::new();
    let report = ["--nproc", "2", "--set", ENDLESS, "--set", HANG_TIMEOUT, "--set", "launch.hang=report"];
    let run = start_training(&job, &report);
    let workers = workers(&run);
    send_signal(workers[1], Signal::STOP);
    wait_until_rank_1_is_reported(&job, &run);
    std::thread::sleep(LONG_HANG);
    let stderr = run.stderr();
    assert_eq!(stderr.lines().filter(|line| line.contains("rank 1 ")).count(), 1, "{stderr}");
    assert!(evidence(&job, 1).contains("state T"));
    send_signal(workers[1], Signal::CONT);
    wait_until_training_continues(&job);
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
}

fn job_that_is_stopped_as_a_whole_and_continues_is_not_a_hang() {
    let job = Job::new();
    let run = start_training(&job, &["--nproc", "2", "--set", ENDLESS, "--set", HANG_TIMEOUT]);
    let all = [&[run.pid()][..], &workers(&run)].concat();
    all.iter().for_each(|process| send_signal(*process, Signal::STOP));
    std::thread::sleep(LONG_HANG);
    all.iter().for_each(|process| send_signal(*process, Signal::CONT));
    wait_until_training_continues(&job);
    // This is longer than the hang timeout.
    std::thread::sleep(Duration::from_secs(12));
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    assert!(!run.stderr.contains("heartbeat") && !run.stderr.contains("no progress"), "{}", run.stderr);
}

fn rank_under_a_debugger_is_only_reported() {
    let job = Job::new();
    let run = start_training(&job, &["--nproc", "2", "--set", ENDLESS, "--set", HANG_TIMEOUT]);
    let workers = workers(&run);
    // The main thread trains. The thread that sends heartbeats continues.
    let frozen = FrozenThread::new(workers[1]).unwrap();
    let line = wait_until_rank_1_is_reported(&job, &run);
    assert!(line.contains("made no progress") && line.contains("step "), "{line}");
    run.wait_for_stderr(&format!("rank 1 (process {}) is traced by python", workers[1]));
    assert!(evidence(&job, 1).contains("a debugger is attached"), "{}", evidence(&job, 1));
    drop(frozen);
    wait_until_training_continues(&job);
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
}

fn stacks_show_phase_and_threads_of_a_training_job() {
    let job = Job::new();
    let run = start_training(&job, &["--nproc", "2", "--set", ENDLESS]);
    let text = Process::spawn(&mut job.command(&["stacks", "train"])).wait();
    assert_eq!(text.code, 0, "{}", text.stderr);
    for words in ["rank 0\n", "rank 1\n", "phase: ", "last collective: ", " loader ", " control "] {
        assert!(text.stdout.contains(words), "{words} in {}", text.stdout);
    }
    let one = Process::spawn(&mut job.command(&["stacks", "--rank", "1", "--json"])).wait();
    let one: Value = serde_json::from_str(&one.stdout).unwrap();
    let ranks = one["ranks"].as_array().unwrap();
    assert_eq!(
        (ranks.len(), &ranks[0]["rank"], &ranks[0]["processes"][0]["pid"]),
        (1, &1.into(), &workers(&run)[1].into())
    );
    assert!(ranks[0]["activity"]["step"].as_u64().is_some_and(|step| step > 0), "{one}");
    let unknown = Process::spawn(&mut job.command(&["stacks", "--rank", "7"])).wait();
    assert!(unknown.code == 1 && unknown.stderr.contains("rank 7 is not running"), "{}", unknown.stderr);
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
}

fn process_goes_on_after_a_debugger_that_is_killed_while_it_attaches() {
    let mut job = Job::new();
    // Stops the process, as attaching does, and takes longer than a debugger may.
    let debugger = job.path().join("gdb");
    let script =
        "#!/bin/sh\nfor pid; do [ \"$last\" = -p ] && kill -STOP $pid; last=$pid; done; exec sleep 1000";
    std::fs::write(&debugger, script).unwrap();
    std::fs::set_permissions(&debugger, PermissionsExt::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap();
    job.set_env("PATH", &format!("{}:{path}", job.path().display()));
    let run = start_training(&job, &["--nproc", "2", "--set", ENDLESS]);
    let shown = Process::spawn(&mut job.command(&["stacks", "train"])).wait();
    assert!(
        shown.code == 0 && shown.stdout.contains("stopped after 10 s"),
        "{}{}",
        shown.stdout,
        shown.stderr
    );
    wait_until_training_continues(&job);
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
}

fn stacks_show_the_whole_process_tree_of_a_command() {
    let launch = Launch::new();
    let run = launch.spawn_shell(&[], 2, "sleep 1000 & echo ready; wait");
    wait_for("both ranks", || (run.stdout().matches("ready").count() == 2).then_some(()));
    let shown = launch.run(&["stacks", "--json"]);
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
    for rank in shown["ranks"].as_array().unwrap() {
        let processes = rank["processes"].as_array().unwrap();
        let names: Vec<_> = processes.iter().map(|process| process["name"].as_str().unwrap()).collect();
        assert_eq!((names.as_slice(), &rank["activity"]), (&["sh", "sleep"][..], &Value::Null));
        let threads = processes[1]["threads"].as_array().unwrap();
        assert_eq!((threads.len(), &threads[0]["tid"]), (1, &processes[1]["pid"]));
    }
    run.signal(Signal::INT);
    run.wait();
}
