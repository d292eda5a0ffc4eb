//! Heartbeats of commands: hangs are named and ended, with the stacks of Python programs; preemption by exit code.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{
    Launch, Output, Process, children, is_alive, process_name, requirements, send_signal, wait_for,
};

xlaunch_harness::tests! {
    rank_whose_heartbeats_stop_is_named_and_the_job_restarts,
    stopped_process_is_named_and_ended,
    ranks_without_heartbeats_and_without_timeout_are_never_ended,
    suspended_launch_does_not_hang,
    status_shows_steps_and_the_rank_that_hangs,
    step_beyond_the_furthest_is_progress_and_a_repeated_one_is_not,
    requeue_code_exits_with_75_and_without_a_restart,
    flight_recorder_needs_a_directory_for_its_dumps;
    needs requirements::python3:
    stack_of_hanging_python_rank_is_in_the_report,
    ranks_of_pytorch_are_told_to_dump_their_flight_recorders;
    needs requirements::strace:
    rank_under_a_debugger_is_only_reported;
}

/// Both ranks take steps of 0.2 s. In the first attempt rank 1 hangs in step 5, and rank 0 waits for it in step 6.
const HANG: &str = "step=0; while [ $step -lt 8 ]; do step=$((step + 1)); sleep 0.2; \
    [ $TORCHELASTIC_RESTART_COUNT = 0 ] && [ $step = $((6 - RANK)) ] && exec sleep 1000; \
    echo $step > $XLAUNCH_HEARTBEAT; done";
const HANG_LINE: &str = "xlaunch: rank 1 sent no heartbeat for ";

fn line<'a>(output: &'a Output, part: &str) -> &'a str {
    let found = output.stderr.lines().find(|line| line.contains(part));
    found.unwrap_or_else(|| panic!("{part:?} in {}", output.stderr))
}

fn rank_whose_heartbeats_stop_is_named_and_the_job_restarts() {
    let launch = Launch::new();
    let run = launch.run_shell(&["--hang-timeout", "5", "--max-restarts", "1"], 2, HANG);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(line(&run, HANG_LINE).ends_with(" s (step 4); rank 0 is waiting for it"), "{}", run.stderr);
    assert!(line(&run, "evidence of the hang: ").ends_with("/1/hang.txt"), "{}", run.stderr);
    assert!(
        line(&run, "restarting").starts_with("xlaunch: rank 1: sent no heartbeat for "),
        "{}",
        run.stderr
    );
    let run = launch.run_shell(&["--hang-timeout", "3"], 2, HANG);
    assert_eq!(run.code, 75, "{}", run.stderr);
    assert!(run.root_cause().contains("sent no heartbeat for "), "{}", run.stderr);
    assert!(run.consequences().contains("rank 0"), "{}", run.stderr);
    // The launch's own directory is gone, but not the file that the report names.
    let evidence = line(&run, "  evidence: ").trim_start().trim_start_matches("evidence: ");
    let found = std::fs::read_to_string(evidence).unwrap_or_else(|error| panic!("{evidence}: {error}"));
    assert!(found.contains("rank 1"), "{found}");
    std::fs::remove_file(evidence).unwrap();
}

fn stack_of_hanging_python_rank_is_in_the_report() {
    let launch = Launch::new();
    let script = "\
import os, pathlib, time
heartbeat = pathlib.Path(os.environ['XLAUNCH_HEARTBEAT'])

def load_batch(step):
    while os.environ['RANK'] == '1' and step == 3:
        time.sleep(0.1)

for step in range(5):
    load_batch(step)
    heartbeat.write_text(str(step))
while True:
    time.sleep(0.1)
";
    launch.write("train.py", script);
    let options = ["--hang-timeout", "2", "--nproc-per-node", "2"];
    // Python is also found below a shell.
    for target in [&["train.py"][..], &["--", "sh", "-c", "python3 train.py; exit $?"]] {
        let run = launch.run(&[&options[..], target].concat());
        assert_eq!(run.code, 75, "{}", run.stderr);
        assert!(line(&run, HANG_LINE).contains(" s (step 2); rank 0 is waiting for it"), "{}", run.stderr);
        let report = run.failure_report();
        for words in
            ["rank 1 (pid ", "sent no heartbeat for ", "Fatal Python error: Aborted", "in load_batch"]
        {
            assert!(run.root_cause().contains(words), "{words} in {report}");
        }
        assert!(run.consequences().contains("(SIGTERM), sent by xlaunch"), "{report}");
    }
    let run = launch.run(&[&options[..], &["train.py"]].concat());
    assert!(line(&run, "location: ").contains("train.py, line 6"), "{}", run.stderr);
}

fn stopped_process_is_named_and_ended() {
    let launch = Launch::new();
    let script =
        "i=0; while :; do i=$((i + 1)); [ -e stop.$RANK ] || echo $i > $XLAUNCH_HEARTBEAT; sleep 0.1; done";
    let run = launch.spawn_shell(&["--hang-timeout", "3", "--shutdown-timeout", "1"], 2, script);
    wait_for("heartbeats of both ranks", || status(&launch)["step"].as_u64().filter(|step| *step > 2));
    let pid = u32::try_from(status(&launch)["ranks"][1]["pid"].as_u64().unwrap()).unwrap();
    send_signal(pid, Signal::STOP);
    launch.write("stop.0", "");
    let run = run.wait();
    assert_eq!(run.code, 75, "{}", run.stderr);
    assert!(line(&run, HANG_LINE).contains("; its process is stopped"), "{}", run.stderr);
    assert!(!is_alive(pid));
}

fn ranks_without_heartbeats_and_without_timeout_are_never_ended() {
    let silent = "[ $RANK = 0 ] || echo 1 > $XLAUNCH_HEARTBEAT; sleep 4";
    // Removing the file turns detection off.
    let removed = "echo 1 > $XLAUNCH_HEARTBEAT; sleep 1.5; rm $XLAUNCH_HEARTBEAT; sleep 4";
    let launches = [("0", 2, silent), ("1000", 2, silent), ("1", 2, "sleep 4"), ("3", 1, removed)];
    // They run at the same time, because they only wait.
    let runs = launches.map(|(timeout, ranks, script)| {
        let launch = Launch::new();
        let run = launch.spawn_shell(&["--hang-timeout", timeout], ranks, script);
        (launch, timeout, run)
    });
    for (_launch, timeout, run) in runs {
        let run = run.wait();
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "--hang-timeout {timeout}");
    }
}

fn suspended_launch_does_not_hang() {
    let launch = Launch::new();
    let script = "while [ ! -e end ]; do touch $XLAUNCH_HEARTBEAT; echo x > started; sleep 0.1; done";
    let run = launch.spawn_shell(&["--hang-timeout", "6"], 2, script);
    wait_for("the workers", || (!launch.read("started").is_empty()).then_some(()));
    std::thread::sleep(Duration::from_secs(2));
    run.signal(Signal::TSTP);
    std::thread::sleep(Duration::from_secs(9));
    run.signal(Signal::CONT);
    std::thread::sleep(Duration::from_secs(3));
    launch.write("end", "");
    let run = run.wait();
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
}

fn status(launch: &Launch) -> Value {
    let reply = launch.run(&["status", "--json"]);
    serde_json::from_str(&reply.stdout).unwrap_or_default()
}

fn status_shows_steps_and_the_rank_that_hangs() {
    let launch = Launch::new();
    let script = "for step in 1 2 3 4 5 6; do [ $RANK$step = 14 ] && break; echo $step > $XLAUNCH_HEARTBEAT; \
                  sleep 0.2; \
                  done; trap '' TERM; while :; do sleep 0.1; done";
    let run = launch.spawn_shell(&["--hang-timeout", "4", "--shutdown-timeout", "1000"], 2, script);
    let steps = || {
        let status = status(&launch);
        let steps = [&status["step"], &status["ranks"][0]["step"], &status["ranks"][1]["step"]];
        (steps.map(Value::as_u64) == [3, 6, 3].map(Some)).then_some(())
    };
    wait_for("steps in status", steps);
    let table = launch.run(&["status"]).stdout;
    assert!(table.contains("STEP") && table.contains("BEAT"), "{table}");
    let hint = |rank: usize| status(&launch)["ranks"][rank]["hint"].as_str().unwrap_or_default().to_owned();
    let hint_of_1 = wait_for("a hint", || Some(hint(1)).filter(|hint| !hint.is_empty()));
    assert!(
        hint_of_1.starts_with("sent no heartbeat for ") && hint_of_1.ends_with(" s (step 3)"),
        "{hint_of_1}"
    );
    assert_eq!(hint(0), "");
    run.signal(Signal::INT);
    run.signal(Signal::KILL);
    run.wait();
}

fn step_beyond_the_furthest_is_progress_and_a_repeated_one_is_not() {
    let run = |step: &str| {
        let script = format!("echo {step} > $XLAUNCH_HEARTBEAT; [ $TORCHELASTIC_RESTART_COUNT = 4 ]");
        Launch::new().run_shell(&["--max-restarts", "4"], 1, &script)
    };
    let advancing = run("$TORCHELASTIC_RESTART_COUNT");
    assert_eq!(advancing.code, 0, "{}", advancing.stderr);
    assert!(!advancing.stderr.contains("restarting in "), "no delay: {}", advancing.stderr);
    let repeating = run("7");
    assert_eq!(repeating.code, 0, "{}", repeating.stderr);
    assert!(line(&repeating, "restarting in ").ends_with(" (3 of 4)"), "{}", repeating.stderr);
}

fn requeue_code_exits_with_75_and_without_a_restart() {
    let launch = Launch::new();
    let options = ["--requeue-codes", "85,99", "--max-restarts", "5"];
    let run = launch.run_shell(&options, 2, "echo x; [ $RANK = 1 ] || exec sleep 1000; exit 99");
    assert_eq!(run.code, 75, "{}", run.stderr);
    assert_eq!(run.stdout, "x\nx\n", "no restart: {}", run.stderr);
    assert!(run.stderr.contains("the job was preempted"), "{}", run.stderr);
    line(&run, "exit code 99: preempted (--requeue-codes)");
    // A scheduler's SIGTERM makes the script save its state.
    let script = "trap 'exit 85' TERM; echo ready >&2; while :; do sleep 0.1; done";
    let run = launch.spawn_shell(&options, 2, script);
    wait_for("both workers", || (run.stderr().matches("ready").count() == 2).then_some(()));
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code, 75);
    assert_eq!(launch.run_shell(&["--requeue-codes", "85"], 1, "exit 86").code, 1);
}

/// The pipe, the file and the thread of a PyTorch process group of NCCL.
const FAKE_PYTORCH: &str = "\
import os, threading, time
rank = os.environ['RANK']
pipe = os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE'] + rank + '.pipe'
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

def monitor():
    while not os.read(reader, 128):
        time.sleep(0.1)
    with open(os.environ['TORCH_NCCL_DEBUG_INFO_TEMP_FILE'] + rank, 'w') as dump:
        dump.write('dump of ' + os.environ['TORCH_NCCL_TRACE_BUFFER_SIZE'])

threading.Thread(target=monitor, daemon=True).start()
open(os.environ['XLAUNCH_HEARTBEAT'], 'w').write(rank)
time.sleep(1000)
";

fn ranks_of_pytorch_are_told_to_dump_their_flight_recorders() {
    let launch = Launch::new();
    launch.write("train.py", FAKE_PYTORCH);
    let options = ["--flight-recorder", "--log-dir", "logs", "--rdzv-id", "run", "--hang-timeout", "2"];
    let run = launch.run(&[&options[..], &["--nproc-per-node", "2", "train.py"]].concat());
    assert_eq!(run.code, 75, "{}", run.stderr);
    line(&run, "told 2 ranks to dump their flight recorders");
    for rank in 0..2 {
        assert_eq!(launch.read(&format!("logs/run/attempt_0/{rank}/nccl_trace_rank_{rank}")), "dump of 2000");
    }
}

fn flight_recorder_needs_a_directory_for_its_dumps() {
    let run = Launch::new().run_shell(&["--flight-recorder"], 1, "true");
    assert!(run.code == 2 && run.stderr.contains("--log-dir"), "{}", run.stderr);
}

fn rank_under_a_debugger_is_only_reported() {
    let launch = Launch::new();
    let script = "while :; do echo 1 > $XLAUNCH_HEARTBEAT; [ -e hang ] && exec sleep 1000; sleep 0.1; done";
    let run = launch.spawn_shell(&["--hang-timeout", "2"], 1, script);
    // Other processes of xlaunch have its name until they get their own.
    let worker =
        wait_for("the worker", || children(run.pid()).into_iter().find(|child| process_name(*child) == "sh"));
    let mut strace = Command::new("strace");
    let debugger = Process::spawn(strace.args([
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=none",
        "-p",
        &worker.to_string(),
    ]));
    wait_for("the debugger", || {
        let status =
            std::fs::read_to_string(Path::new("/proc").join(worker.to_string()).join("status")).unwrap();
        status.contains(&format!("TracerPid:\t{}", debugger.pid())).then_some(())
    });
    launch.write("hang", "");
    run.wait_for_stderr(&format!("rank 0 (process {worker}) is traced by strace"));
    std::thread::sleep(Duration::from_secs(3));
    assert!(is_alive(worker), "{}", run.stderr());
    drop(debugger);
    run.signal(Signal::TERM);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
}
