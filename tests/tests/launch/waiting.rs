//! The end of a launch that runs nothing yet: it waits for other nodes, or reads its configuration. Signals are also
//! sent to PID 1 of a namespace, as the launch in a container is: it gets none that it has no handler for.

use std::fs::read_dir;
use std::net::TcpListener;

use rustix::process::Signal;
use xlaunch_tests::{Launch, Output, Process, requirements, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    waiting_launch_ends_at_once_by_a_signal_that_it_names,
    waiting_launch_without_a_coordinator_is_shown_and_stopped,
    launch_terminated_in_its_first_moments_leaves_nothing_in_the_registry;
    needs requirements::pid_namespace:
    waiting_launch_that_is_pid_1_ends_at_once_by_a_signal_that_it_names,
    launch_that_is_pid_1_is_terminated_while_it_reads_its_configuration;
}

/// Enters a PID namespace as its first process.
const UNSHARE: [&str; 5] = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"];

const SIGNALS: [(Signal, &str, i32); 2] = [(Signal::TERM, "SIGTERM", 143), (Signal::INT, "SIGINT", 130)];

/// The part of a launch on two nodes of which only this one exists.
fn node(rank: &str) -> Vec<String> {
    // Other tests listen on 127.0.0.1, where the port could be taken again.
    let endpoint = TcpListener::bind("127.0.77.1:0").unwrap().local_addr().unwrap().to_string();
    let place = ["--nnodes", "2", "--node-rank", rank, "--rdzv-endpoint", &endpoint, "--rdzv-insecure"];
    [&place[..], &["--", "true"]].concat().into_iter().map(str::to_owned).collect()
}

/// Starts `xlaunch` as PID 1.
fn spawn_as_pid_1(launch: &Launch, arguments: &[String]) -> Process {
    let mut command = launch.command(&UNSHARE);
    Process::spawn_inside(command.arg(xlaunch_path()).args(arguments))
}

/// Queries are run by this directory's launcher, which may be another program.
fn query(launch: &Launch, subcommand: &str) -> Output {
    let mut command = std::process::Command::new(xlaunch_path());
    command.arg(subcommand).env("XDG_RUNTIME_DIR", launch.runtime_dir()).env("TMPDIR", launch.runtime_dir());
    Process::spawn(&mut command).wait()
}

fn wait_until_shown(launch: &Launch) {
    wait_for("the launch in `xlaunch status`", || (query(launch, "status").code == 0).then_some(()));
}

/// Entries of running launches.
fn entries(launch: &Launch) -> Vec<String> {
    let registries = read_dir(launch.runtime_dir()).unwrap().flatten();
    let entries = registries.flat_map(|registry| read_dir(registry.path()).unwrap().flatten());
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn assert_ended_by_signals(launch: &Launch, start: impl Fn(&[String]) -> Process) {
    for (signal, name, code) in SIGNALS {
        for rank in ["0", "1"] {
            let run = start(&node(rank));
            wait_until_shown(launch);
            run.signal(signal);
            let run = run.wait();
            let line = format!("stopped by {name} while waiting for other nodes: the job never began here");
            let lines = run.stderr.lines().filter(|line| line.contains(name)).collect::<Vec<_>>();
            assert_eq!(
                (run.code, lines),
                (code, vec![&*format!("xlaunch: {line}")]),
                "node {rank}: {}",
                run.stderr
            );
            assert!(entries(launch).is_empty(), "{:?}", entries(launch));
        }
    }
}

fn waiting_launch_ends_at_once_by_a_signal_that_it_names() {
    let launch = Launch::new();
    assert_ended_by_signals(&launch, |arguments| launch.spawn(arguments));
}

fn waiting_launch_that_is_pid_1_ends_at_once_by_a_signal_that_it_names() {
    let launch = Launch::with_program("unshare");
    assert_ended_by_signals(&launch, |arguments| spawn_as_pid_1(&launch, arguments));
}

fn waiting_launch_without_a_coordinator_is_shown_and_stopped() {
    for rank in ["0", "1"] {
        let launch = Launch::new();
        let run = launch.spawn(&node(rank));
        wait_until_shown(&launch);
        // The entry of node 0 is renamed once its coordinator has named the run.
        let explained = || query(&launch, "logs").stderr.contains("no rank has started yet");
        wait_for("an explanation", || explained().then_some(()));
        wait_for("a stop", || (query(&launch, "stop").code == 0).then_some(()));
        let run = run.wait();
        let expected = ["stop requested by ", "stopped by a user "];
        assert!(run.code == 143 && expected.iter().all(|text| run.stderr.contains(text)), "{}", run.stderr);
        assert!(entries(&launch).is_empty(), "{:?}", entries(&launch));
    }
}

fn launch_that_is_pid_1_is_terminated_while_it_reads_its_configuration() {
    let launch = Launch::with_program("unshare");
    let fifo = launch.path().join("train.toml");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let run = spawn_as_pid_1(&launch, &["train.toml".to_owned()]);
    wait_for("a handler of SIGTERM", || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", run.pid())).ok()?;
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?.trim().to_owned();
        (u64::from_str_radix(&caught, 16).ok()? >> (Signal::TERM.as_raw() - 1) & 1 == 1).then_some(())
    });
    run.signal(Signal::TERM);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    assert!(run.stderr.contains("stopped by SIGTERM before the workers had started"), "{}", run.stderr);
}

fn launch_terminated_in_its_first_moments_leaves_nothing_in_the_registry() {
    let launch = Launch::new();
    for milliseconds in 0..40 {
        let run = launch.spawn(&["--", "sleep", "1000"]);
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        run.signal(Signal::TERM);
        let run = run.wait();
        assert_eq!(run.code, 143, "after {milliseconds} ms: {}", run.stderr);
        assert!(entries(&launch).is_empty(), "after {milliseconds} ms: {:?}", entries(&launch));
    }
}
