//! Launches on several hosts over ssh, with a client that runs commands on this machine.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use xlaunch_tests::{Launch, Output, Process, children, free_endpoint, is_alive, sorted_lines, wait_for};

use crate::FAKE_SSH;

xlaunch_harness::tests! {
    every_host_runs_the_command_with_its_slots_directory_arguments_and_environment,
    host_file_and_torchruns_name_are_accepted,
    hosts_that_fail_early_are_all_named_and_none_starts,
    host_whose_sshd_is_not_up_yet_is_waited_for_until_the_join_timeout,
    different_program_missing_directory_or_closed_input_is_named_with_its_host,
    exit_code_is_that_of_the_job,
    launchers_own_error_file_names_the_host_that_failed,
    lines_of_hosts_stay_whole_and_own_lines_of_other_hosts_are_marked,
    first_interrupt_stops_the_job_on_all_hosts,
    second_interrupt_kills_the_job_on_all_hosts,
    interrupt_while_connecting_ends_the_launch,
    killed_launcher_leaves_no_process_on_any_host,
    lost_connection_ends_the_job_on_all_hosts,
    more_hosts_than_connect_at_once_are_started;
}

/// Starts `script` on these hosts of the fake client.
fn spawn(launch: &Launch, hosts: &str, options: &[&str], script: &str) -> Process {
    let endpoint = free_endpoint();
    let flags = ["--hosts", hosts, "--ssh", FAKE_SSH, "--rdzv-endpoint", &endpoint];
    launch.spawn(&[&flags, options, &["--", "sh", "-c", script]].concat())
}

fn run(launch: &Launch, hosts: &str, options: &[&str], script: &str) -> Output {
    spawn(launch, hosts, options, script).wait()
}

/// Returns the process ids that workers have written to these files.
fn pids(launch: &Launch, names: &[&str]) -> Vec<u32> {
    wait_for("process ids of workers", || {
        names.iter().map(|name| launch.read(name).trim().parse().ok()).collect()
    })
}

/// Waits until two workers have written `ready`. Fails if the launch ends before.
fn wait_for_both_workers(run: &Process) {
    wait_for("both workers", || {
        assert!(is_alive(run.pid()), "{}", run.stderr());
        (run.stderr().matches("ready").count() == 2).then_some(())
    });
}

fn wait_until_dead(pids: &[u32]) {
    wait_for("workers to be killed", || (!pids.iter().any(|pid| is_alive(*pid))).then_some(()));
}

fn every_host_runs_the_command_with_its_slots_directory_arguments_and_environment() {
    let launch = Launch::new();
    let script = r#"echo "$HOSTNAME $RANK/$WORLD_SIZE $EXTRA ${SECRET-none} $NCCL_DEBUG $(pwd -P)|$1|$2|""#;
    let endpoint = free_endpoint();
    let flags =
        ["--hosts", "a:2,chatty", "--ssh", FAKE_SSH, "--rdzv-endpoint", &endpoint, "--export", "EXTRA"];
    let arguments = ["--", "sh", "-c", script, "sh", "it's a \"test\" $HOME \\", "ü"];
    let mut command = launch.command(&[&flags[..], &arguments].concat());
    command.env("EXTRA", "two words").env("SECRET", "x").env("NCCL_DEBUG", "WARN");
    let run = Process::spawn(&mut command).wait();
    let dir = launch.path().canonicalize().unwrap();
    let line =
        |host: &str| format!("{host} two words none WARN {}|it's a \"test\" $HOME \\|ü|", dir.display());
    let expected = ["a 0/3", "a 1/3", "chatty 2/3"].map(line);
    assert_eq!(
        (run.code, sorted_lines(&run.stdout)),
        (0, expected.iter().map(String::as_str).collect()),
        "{}",
        run.stderr
    );
    assert_eq!(run.stderr, "", "ssh and hosts were silent");
}

fn host_file_and_torchruns_name_are_accepted() {
    let launch = Launch::new();
    launch.write("hosts", "# two\na slots=2\nb\na\n");
    let script = launch.write("hello.sh", "echo $HOSTNAME $RANK\n");
    let torchrun = launch.path().join("torchrun");
    std::os::unix::fs::symlink(xlaunch_tests::xlaunch_path(), &torchrun).unwrap();
    let mut command = Command::new(torchrun);
    command.args(["--hostfile", "hosts", "--ssh", FAKE_SSH, "--rdzv-endpoint", &free_endpoint()]);
    command.args(["--no-python", "sh"]).arg(script);
    command.current_dir(launch.path()).env("XDG_RUNTIME_DIR", launch.runtime_dir());
    let run = Process::spawn(&mut command).wait();
    assert_eq!(
        (run.code, sorted_lines(&run.stdout)),
        (0, vec!["a 0", "a 1", "a 2", "b 3"]),
        "{}",
        run.stderr
    );
}

fn hosts_that_fail_early_are_all_named_and_none_starts() {
    let launch = Launch::new();
    let run = run(&launch, "a,unknown,denied,b", &[], "touch started");
    assert_eq!(run.code, 69, "{}", run.stderr);
    for line in [
        "error: ssh to `unknown` failed: No ED25519 host key is known for unknown.; Host key verification failed.\n",
        "error: ssh to `denied` failed: ada@denied: Permission denied (publickey).\n",
        "help: this must work without a prompt: ",
    ] {
        assert!(run.stderr.contains(line), "{}", run.stderr);
    }
    assert!(!run.stderr.contains("`a`") && !run.stderr.contains("`b`"), "{}", run.stderr);
    assert!(!launch.path().join("started").exists());
    let missing = launch.run(&["--hosts", "a,b", "--ssh", "./no-such-ssh", "--", "true"]);
    assert_eq!(missing.code, 2, "{}", missing.stderr);
    assert!(missing.stderr.starts_with("error: failed to run `./no-such-ssh`: "), "{}", missing.stderr);
}

fn host_whose_sshd_is_not_up_yet_is_waited_for_until_the_join_timeout() {
    let launch = Launch::new();
    let started = spawn(&launch, "a,booting", &[], "echo $HOSTNAME");
    started.wait_for_stderr(
        "xlaunch: waiting for `booting` (ssh: connect to host booting port 22: Connection refused)",
    );
    launch.write("up", "");
    let run = started.wait();
    assert_eq!((run.code, sorted_lines(&run.stdout)), (0, vec!["a", "booting"]), "{}", run.stderr);
    std::fs::remove_file(launch.path().join("up")).unwrap();
    let run = run_until(&launch, "a,booting", "join_timeout=1");
    let error = "error: ssh to `booting` failed: ssh: connect to host booting port 22: Connection refused\n";
    assert!(run.code == 69 && run.stderr.contains(error), "{}", run.stderr);
}

fn run_until(launch: &Launch, hosts: &str, conf: &str) -> Output {
    run(launch, hosts, &["--rdzv-conf", conf], "true")
}

fn different_program_missing_directory_or_closed_input_is_named_with_its_host() {
    let launch = Launch::new();
    for (host, message) in [
        ("old", "error: `old` has xlaunch 0.0.1 at `"),
        ("bare", "error: `bare` cannot run `"),
        ("apart", "error: `apart`: directory `/no/such/directory`: No such file"),
        ("deaf", "error: `deaf`: the ssh client passed on no standard input\nhelp: give `--ssh '"),
    ] {
        let run = run(&launch, &format!("a,{host}"), &[], "touch started");
        assert_eq!(run.code, 2, "{}", run.stderr);
        assert!(run.stderr.starts_with(message) && run.stderr.contains("\nhelp: "), "{}", run.stderr);
        assert!(!launch.path().join("started").exists());
    }
}

fn exit_code_is_that_of_the_job() {
    let launch = Launch::new();
    let script = "test $HOSTNAME = a || exit 42";
    assert_eq!(run(&launch, "a,b", &["--propagate-exit-code"], script).code, 42);
    assert_eq!(run(&launch, "a,b,c", &[], "exit 42").code, 1);
    // A mistake in the rest of the command line is detected without contacting a host.
    let refused = launch.run(&["--hosts", "unknown", "--ssh", FAKE_SSH, "--nproc", "no", "--", "true"]);
    assert_eq!(
        (
            refused.code,
            refused.stderr.contains("--nproc-per-node=no") || refused.stderr.contains("expected a number")
        ),
        (2, true),
        "{}",
        refused.stderr
    );
    assert!(!refused.stderr.contains("ssh"), "{}", refused.stderr);
}

fn lines_of_hosts_stay_whole_and_own_lines_of_other_hosts_are_marked() {
    let launch = Launch::new();
    // One write for each line: the start of a line whose rest comes 100 ms later would be printed alone.
    let script = "for i in $(seq 2000); do printf \"$HOSTNAME %0100d\\n\" $i; done; \
        echo \"warning: $HOSTNAME\" >&2; printf \"$HOSTNAME: no end\" >&2";
    let run = run(&launch, "a,b,c", &[], script);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let is_whole = |line: &&str| line.len() == 102 && line.contains(" 0");
    assert_eq!(run.stdout.lines().filter(is_whole).count(), 6000);
    for host in ["a", "b", "c"] {
        let of_host = run.stdout.lines().filter(|line| line.starts_with(host));
        assert!(of_host.is_sorted(), "lines of {host} are in order");
    }
    let lines = sorted_lines(&run.stderr);
    for line in ["warning: a", "[b] warning: b", "[c] warning: c"] {
        assert!(lines.contains(&line), "{lines:?}");
    }
    assert!(["a", "b", "c"].iter().all(|host| run.stderr.contains(&format!("{host}: no end"))), "{lines:?}");
}

fn first_interrupt_stops_the_job_on_all_hosts() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15)] {
        let launch = Launch::new();
        let script = format!(
            "trap 'echo $HOSTNAME stops; exit 0' {number}; echo ready >&2; while :; do sleep 0.1; done"
        );
        let run = spawn(&launch, "a,b", &[], &script);
        wait_for_both_workers(&run);
        run.signal(signal);
        let run = run.wait();
        let found = (run.code, sorted_lines(&run.stdout));
        assert_eq!(found, (128 + number, vec!["a stops", "b stops"]), "{}", run.stderr);
    }
}

fn second_interrupt_kills_the_job_on_all_hosts() {
    let launch = Launch::new();
    let script = "trap '' INT TERM; echo $$ > pid.$HOSTNAME; echo ready >&2; while :; do sleep 0.1; done";
    let run = spawn(&launch, "a,b", &[], script);
    wait_for_both_workers(&run);
    let workers = pids(&launch, &["pid.a", "pid.b"]);
    run.signal(Signal::INT);
    // The agents must not take two signals for one.
    std::thread::sleep(Duration::from_millis(300));
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 130, "{}", run.stderr);
    wait_until_dead(&workers);
}

fn interrupt_while_connecting_ends_the_launch() {
    let launch = Launch::new();
    let run = spawn(&launch, "a,mute", &[], "touch started");
    let clients = wait_for("both clients", || {
        let clients = children(run.pid());
        (clients.len() == 2).then_some(clients)
    });
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 130, "{}", run.stderr);
    wait_until_dead(&clients);
    assert!(!launch.path().join("started").exists());
}

fn killed_launcher_leaves_no_process_on_any_host() {
    let launch = Launch::new();
    // The second process has its own session, like a daemon.
    let script = "setsid sh -c 'trap \"\" TERM HUP; echo $$ > daemon.$HOSTNAME; exec sleep 1000' >/dev/null 2>&1 & \
        trap '' TERM HUP; echo $$ > pid.$HOSTNAME; while :; do sleep 0.1; done";
    let run = spawn(&launch, "a,b", &[], script);
    let workers = pids(&launch, &["pid.a", "pid.b", "daemon.a", "daemon.b"]);
    run.signal(Signal::KILL);
    wait_until_dead(&workers);
    wait_for("an empty runtime directory", || (runtime_files(&launch.runtime_dir()) == 0).then_some(()));
}

/// Files below a directory.
fn runtime_files(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { runtime_files(&entry.path()) } else { 1 }).sum()
}

fn lost_connection_ends_the_job_on_all_hosts() {
    let launch = Launch::new();
    let script =
        "trap 'echo $HOSTNAME stops; exit 0' TERM; echo $$ > pid.$HOSTNAME; while :; do sleep 0.1; done";
    let run = spawn(&launch, "a,b", &[], script);
    let workers = pids(&launch, &["pid.a", "pid.b"]);
    let clients = children(run.pid());
    let host = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let of_b = clients.iter().find(|pid| host(**pid).split('\0').nth(1) == Some("b")).copied().unwrap();
    xlaunch_tests::send_signal(of_b, Signal::KILL);
    let run = run.wait();
    assert_eq!((run.code, run.stdout.as_str()), (69, "a stops\n"), "{}", run.stderr);
    let message = "error: ssh to `b` failed: its client ended by signal: 9 (SIGKILL); \
        the other hosts are told to stop\n";
    assert!(run.stderr.contains(message), "{}", run.stderr);
    wait_until_dead(&workers);
}

fn more_hosts_than_connect_at_once_are_started() {
    let hosts: Vec<String> = (0..80).map(|n| format!("h{n:02}")).collect();
    // There are fewer file descriptors than needed: the launcher raises its own limit.
    let shell = Launch::with_program("sh");
    let mut command = shell.command(&["-c", "ulimit -Sn 128; exec \"$@\"", "sh"]);
    command.arg(xlaunch_tests::xlaunch_path());
    command.args(["--hosts", &hosts.join(","), "--ssh", FAKE_SSH, "--rdzv-endpoint", &free_endpoint()]);
    command.args(["--", "sh", "-c", "echo $HOSTNAME"]);
    let run = Process::spawn(&mut command).wait();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(sorted_lines(&run.stdout), hosts, "{}", run.stderr);
}

fn launchers_own_error_file_names_the_host_that_failed() {
    let launch = Launch::new();
    let file = launch.path().join("own.json");
    let start = |hosts: &str, script: &str| {
        let endpoint = free_endpoint();
        let flags = ["--hosts", hosts, "--ssh", FAKE_SSH, "--rdzv-endpoint", &endpoint];
        let mut command = launch.command(&[&flags[..], &["--", "sh", "-c", script]].concat());
        Process::spawn(command.env("TORCHELASTIC_ERROR_FILE", &file)).wait()
    };
    assert_eq!(start("a,b", "true").code, 0);
    assert!(!file.exists());
    let run = start("a,b", "exit 3");
    let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!((run.code, &written["message"]["errorCode"]), (1, &1.into()), "{}", run.stderr);
    assert_eq!(written["message"]["message"], "the job failed on `a`: exit code 1: a worker failed");
}
