//! Signals to the launcher of a command: forwarding, job control, exit codes.

use rustix::process::Signal;
use xlaunch_tests::{Launch, children, sorted_lines, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    sigtstp_stops_workers_and_sigcont_continues_them,
    terminating_signals_are_forwarded_and_set_exit_code,
    sigterm_during_a_restart_delay_sets_exit_code_and_is_named,
    sighup_ignored_by_nohup_stays_ignored,
    sigterm_stops_a_launch_whose_parent_blocks_it,
    sigusr1_reaches_only_processes_that_handle_it;
}

fn sigtstp_stops_workers_and_sigcont_continues_them() {
    let launch = Launch::new();
    let fifo = launch.path().join("go");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // A shell that waits for a program that it is starting, by vfork, is not shown as stopped.
    let script = "echo ready >&2; read -r _ < go; echo continued";
    let run = launch.spawn_shell(&[], 1, script);
    run.wait_for_stderr("ready");
    let worker = wait_for("a worker", || children(run.pid()).first().copied());
    run.signal(Signal::TSTP);
    let is_stopped =
        |pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") T "));
    wait_for("launcher and worker to stop", || (is_stopped(worker) && is_stopped(run.pid())).then_some(()));
    run.signal(Signal::CONT);
    launch.write("go", "\n");
    let run = run.wait();
    assert_eq!((run.code, run.stdout.trim()), (0, "continued"), "{}", run.stderr);
}

fn terminating_signals_are_forwarded_and_set_exit_code() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15), (Signal::HUP, 1), (Signal::QUIT, 3)] {
        let launch = Launch::new();
        let script =
            format!("trap 'echo got $RANK; exit 0' {number}; echo ready >&2; while :; do sleep 0.1; done");
        let run = launch.spawn_shell(&[], 2, &script);
        wait_for("both workers", || (run.stderr().matches("ready").count() == 2).then_some(()));
        run.signal(signal);
        let run = run.wait();
        let found = (run.code, sorted_lines(&run.stdout));
        assert_eq!(found, (128 + number, vec!["got 0", "got 1"]), "{}", run.stderr);
    }
}

fn sigterm_during_a_restart_delay_sets_exit_code_and_is_named() {
    let launch = Launch::new();
    // The first restart has no delay. A third attempt would mean that the delay had ended before the signal came.
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exec sleep 1000; exit 3";
    let run = launch.spawn_shell(&["--max-restarts", "3"], 1, script);
    run.wait_for_stderr("; restarting in ");
    run.signal(Signal::TERM);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    assert!(!run.stderr.contains("the job failed"), "{}", run.stderr);
    let stopped = "stopped by SIGTERM before the next attempt; the last one failed: rank 0: exit code 3";
    assert!(run.stderr.contains(stopped) || run.stderr.contains("stopping: the workers"), "{}", run.stderr);
}

fn sighup_ignored_by_nohup_stays_ignored() {
    let launch = Launch::with_program("sh");
    let xlaunch = xlaunch_path().display();
    let worker = "echo ready >&2; while [ ! -e go ]; do sleep 0.05; done; echo done";
    let run = launch.spawn(&["-c", &format!("trap '' HUP; exec {xlaunch} -- sh -c '{worker}'")]);
    run.wait_for_stderr("ready");
    run.signal(Signal::HUP);
    launch.write("go", "");
    let run = run.wait();
    assert_eq!((run.code, run.stdout.trim()), (0, "done"), "{}", run.stderr);
}

fn sigterm_stops_a_launch_whose_parent_blocks_it() {
    let launch = Launch::with_program("env");
    let xlaunch = xlaunch_path().display().to_string();
    let worker = "echo ready >&2; exec sleep 1000";
    let run = launch.spawn(&["--block-signal=TERM", &xlaunch, "--", "sh", "-c", worker]);
    run.wait_for_stderr("ready");
    run.signal(Signal::TERM);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
}

fn sigusr1_reaches_only_processes_that_handle_it() {
    let launch = Launch::new();
    // The last process does not handle the signal, and neither does the worker of rank 1.
    let script = "[ $RANK = 0 ] || exec sleep 1; sleep 1 & trap 'wait $!; echo saved $?; exit 0' USR1; echo ready >&2; \
                  while :; do sleep 0.1; done";
    let run = launch.spawn_shell(&[], 2, script);
    run.wait_for_stderr("ready");
    run.signal(Signal::USR1);
    let run = run.wait();
    assert_eq!((run.code, run.stdout.trim()), (0, "saved 0"), "{}", run.stderr);
}
