//! The report names the rank that failed first, regardless of what happens to the others.

use rustix::process::Signal;
use xlaunch_tests::{Job, Launch, Output, Process, children, requirements, send_signal, wait_for};

xlaunch_harness::tests! {
    signal_to_a_rank_in_a_collective_is_its_failure_and_the_others_lose_it,
    two_ranks_that_are_killed_at_once_are_one_failure,
    data_that_vanishes_is_an_error_of_the_rank_that_reads_it,
    diverged_is_a_word_in_the_report;
    needs requirements::python3:
    rank_of_a_command_that_raised_is_the_cause_though_its_peer_exits_first,
    exception_of_a_rank_that_is_aborted_while_it_exits_is_the_cause,
    rank_of_a_command_that_is_done_too_early_is_the_cause;
}

const ENDLESS: [&str; 4] = ["--nproc", "3", "--set", "train.steps=1000000"];

/// Starts an endless job of three ranks and waits for its first step.
fn start_training(job: &Job) -> (Process, Vec<u32>) {
    let run = job.spawn(&ENDLESS);
    run.wait_for_stderr("step 1/");
    let workers = wait_for("the workers", || Some(children(run.pid())).filter(|all| all.len() == 3));
    (run, workers)
}

/// Checks that the root cause contains these words, and that the other ranks follow.
fn assert_root(run: &Output, words: &[&str], others: &[&str]) {
    for words in words {
        assert!(run.root_cause().contains(words), "{words} in {}", run.stderr);
    }
    for rank in others {
        assert!(run.consequences().contains(rank), "{rank} in {}", run.stderr);
    }
}

fn signal_to_a_rank_in_a_collective_is_its_failure_and_the_others_lose_it() {
    for (signal, name) in [(Signal::KILL, "SIGKILL"), (Signal::ABORT, "SIGABRT")] {
        let job = Job::new();
        let (run, workers) = start_training(&job);
        let pid = format!("(pid {})", workers[1]);
        send_signal(workers[1], signal);
        let run = run.wait();
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert_root(&run, &[&pid, name], &["rank ", "rank "]);
    }
}

fn two_ranks_that_are_killed_at_once_are_one_failure() {
    let job = Job::new();
    let (run, workers) = start_training(&job);
    send_signal(workers[2], Signal::KILL);
    send_signal(workers[1], Signal::KILL);
    let run = run.wait();
    let root = run.root_cause();
    let named = workers[1..].iter().any(|pid| root.contains(&format!("(pid {pid})")));
    assert!(named && root.contains("SIGKILL"), "{}", run.stderr);
}

fn data_that_vanishes_is_an_error_of_the_rank_that_reads_it() {
    let job = Job::new();
    let (run, _) = start_training(&job);
    job.write("text/a.txt", "");
    let run = run.wait();
    assert_eq!(run.code, 65, "{}", run.stderr);
    assert_root(&run, &["exit code 65 (bad data or checkpoint)", "a.txt"], &[]);
}

fn diverged_is_a_word_in_the_report() {
    let job = Job::new();
    let run = job.run(&["--set", "train.lr=1e30", "--set", "train.clip=0", "--set", "launch.max_restarts=2"]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("no restart: exit code 77 (training diverged) is final"), "{}", run.stderr);
    assert_root(&run, &["exit code 77 (training diverged)"], &[]);
}

/// Rank 1 connects to the others, which wait for it as in a collective.
const PEERS: &str = r#"
import atexit, os, socket, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    peers = []
    while len(peers) < 2:
        try:
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(f"peer{2 * len(peers)}")
            peers.append(peer)
        except OSError:
            time.sleep(0.01)
    def close():
        [peer.close() for peer in peers]
        time.sleep(float(sys.argv[2]))
        if sys.argv[1] == "abort":
            print("terminate called without an active exception", file=sys.stderr, flush=True)
            os.abort()
    atexit.register(close)
    if sys.argv[1] != "return":
        raise ValueError("the disk is on fire")
else:
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"peer{rank}")
    server.listen()
    peer, _ = server.accept()
    if not peer.recv(1):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
"#;

fn peers(how: &str, seconds: &str) -> Output {
    let launch = Launch::new();
    launch.write("peers.py", PEERS);
    launch.run(&["--nproc-per-node", "3", "peers.py", how, seconds])
}

fn rank_of_a_command_that_raised_is_the_cause_though_its_peer_exits_first() {
    for seconds in ["0.5", "0"] {
        let run = peers("raise", seconds);
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert_root(&run, &["rank 1 (pid", "ValueError: the disk is on fire"], &["rank 0", "rank 2"]);
    }
}

/// Simulates a thread of gloo that notices that the connections are closed.
fn exception_of_a_rank_that_is_aborted_while_it_exits_is_the_cause() {
    let launch = Launch::new();
    launch.write("peers.py", PEERS);
    let run = launch.run(&["--nproc-per-node", "3", "--max-restarts", "1", "peers.py", "abort", "0.5"]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert_root(
        &run,
        &["rank 1 (pid", "SIGABRT", "cause: ValueError: the disk is on fire ("],
        &["rank 0", "rank 2"],
    );
    let restart = "rank 1: signal 6 (SIGABRT: aborted): ValueError: the disk is on fire; restarting (1 of 1)";
    assert!(run.stderr.contains(restart), "{}", run.stderr);
}

fn rank_of_a_command_that_is_done_too_early_is_the_cause() {
    let run = peers("return", "0");
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert_root(&run, &["rank 1 (pid", "while other ranks needed it"], &["rank 0", "rank 2"]);
}
