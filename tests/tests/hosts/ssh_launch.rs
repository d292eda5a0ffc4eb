//! `xlaunch --hosts` over OpenSSH, started on `h0`.

use rustix::process::Signal;
use xlaunch_tests::{Hosts, Job, Output, Process, Sshd, requirements, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::sshd:
    workers_run_on_the_host_over_ipv4_and_ipv6,
    group_of_two_hosts_runs_a_command_on_one_console,
    interrupt_stops_training_on_two_hosts_after_a_checkpoint,
    unknown_host_key_and_refused_user_are_explained,
    killed_launcher_leaves_no_process_on_any_host,
    host_that_is_cut_off_is_named;
}

/// Starts `script` on the hosts `list`, with additional options of ssh.
fn spawn(hosts: &Hosts, sshd: &Sshd, list: &str, options: &str, script: &str) -> Process {
    let client = format!("ssh {options} -F {}", sshd.config().display());
    let mut command = hosts[0].command(xlaunch_path());
    command.args(["--hosts", list, "--ssh", &client, "--", "sh", "-c", script]);
    Process::spawn_inside(&mut command)
}

fn run(hosts: &Hosts, sshd: &Sshd, list: &str, options: &str, script: &str) -> Output {
    spawn(hosts, sshd, list, options, script).wait()
}

/// Returns the commands on a host that are not part of its ssh server.
fn commands(hosts: &Hosts, index: usize) -> Vec<String> {
    let processes = hosts[index].processes().into_iter();
    processes.filter(|process| !process.name.starts_with("sshd")).map(|process| process.command).collect()
}

fn workers_run_on_the_host_over_ipv4_and_ipv6() {
    let hosts = Hosts::new(2);
    let sshd = Sshd::start(&hosts);
    for list in ["h1:2", "root@10.77.0.11:2", "[fd77::11]:2"] {
        let run = run(&hosts, &sshd, list, "", "echo $(uname -n) $WORLD_SIZE $(pwd)");
        let line = format!("h1 2 {}\n", hosts[0].path().display());
        assert_eq!((run.code, run.stdout), (0, line.repeat(2)), "{list}: {}", run.stderr);
    }
}

fn group_of_two_hosts_runs_a_command_on_one_console() {
    let hosts = Hosts::new(3);
    let sshd = Sshd::start(&hosts);
    // The launching host may be one of them.
    for (list, expected) in [
        ("h1:2,h2", ["h1 0/3 0", "h1 1/3 0", "h2 2/3 1"]),
        ("fd77::10,[fd77::12]:2", ["h0 0/3 0", "h2 1/3 1", "h2 2/3 1"]),
    ] {
        let run = run(&hosts, &sshd, list, "", "echo $(uname -n) $RANK/$WORLD_SIZE $GROUP_RANK");
        let mut lines: Vec<&str> = run.stdout.lines().collect();
        lines.sort_unstable();
        assert_eq!((run.code, lines.as_slice()), (0, &expected[..]), "{list}: {}", run.stderr);
        // A busy machine may take longer than usual to start ssh.
        let is_unexpected = |line: &&str| !line.starts_with("xlaunch: waiting for `");
        assert_eq!(run.stderr.lines().find(is_unexpected), None, "{list}");
    }
    // A failure is reported once, regardless of its location.
    let failed = run(&hosts, &sshd, "h1,h2", "", "test $RANK = 1 && exit 3; sleep 1000");
    assert_eq!(failed.code, 1, "{}", failed.stderr);
    assert_eq!(failed.stderr.matches("the job failed\n").count(), 1, "{}", failed.stderr);
    assert!(
        failed.stderr.contains("rank 1 (local rank 0, pid ")
            && failed.stderr.contains(" on node 1 (h2): exit code 3"),
        "{}",
        failed.stderr
    );
}

fn interrupt_stops_training_on_two_hosts_after_a_checkpoint() {
    let hosts = Hosts::new(2);
    let sshd = Sshd::start(&hosts);
    let job = Job::new();
    let mut command = hosts[0].command_in(job.path(), xlaunch_path());
    let client = format!("ssh -F {}", sshd.config().display());
    command.args(["--hosts", "h0,h1", "--ssh", &client, "train.toml", "--set", "train.steps=1000000"]);
    let run = Process::spawn_inside(&mut command);
    wait_for("training", || run.stderr().contains("  loss ").then_some(()));
    run.signal(Signal::INT);
    let run = run.wait();
    assert_eq!(run.code, 143, "{}", run.stderr);
    let checkpoints = std::fs::read_dir(job.run_dir().join("checkpoints")).unwrap();
    assert_eq!(checkpoints.count(), 1, "{}", run.stderr);
    for index in [0, 1] {
        wait_for("all processes to end", || commands(&hosts, index).is_empty().then_some(()));
    }
}

fn unknown_host_key_and_refused_user_are_explained() {
    let hosts = Hosts::new(2);
    let sshd = Sshd::start(&hosts);
    for (options, reason) in [
        ("-o StrictHostKeyChecking=yes", "Host key verification failed."),
        ("-o PubkeyAuthentication=no", "Permission denied"),
    ] {
        let run = run(&hosts, &sshd, "h1", options, "touch started");
        let explained = run.stderr.starts_with("error: ssh to `h1` failed: ") && run.stderr.contains(reason);
        assert!(run.code == 69 && explained, "{}", run.stderr);
    }
    assert!(!hosts[0].path().join("started").exists());
}

fn killed_launcher_leaves_no_process_on_any_host() {
    let hosts = Hosts::new(3);
    let sshd = Sshd::start(&hosts);
    let script =
        "setsid sh -c 'trap \"\" TERM HUP; exec sleep 1000' & trap '' TERM HUP; echo ready; sleep 1000";
    let run = spawn(&hosts, &sshd, "h1:2,h2:1", "", script);
    wait_for("all workers", || (run.stdout().matches("ready").count() == 3).then_some(()));
    assert!(commands(&hosts, 1).len() >= 6, "{:?}", commands(&hosts, 1));
    run.signal(Signal::KILL);
    for host in hosts.iter().enumerate() {
        wait_for("all processes to end", || commands(&hosts, host.0).is_empty().then_some(()));
        assert!(host.1.listeners().iter().all(|listener| listener.port() == 22), "{:?}", host.1.listeners());
    }
}

/// Takes the 30 s after which xlaunch's own options of ssh give up a silent host.
fn host_that_is_cut_off_is_named() {
    let hosts = Hosts::new(2);
    let sshd = Sshd::start(&hosts);
    let run = spawn(&hosts, &sshd, "h1", "", "echo ready; sleep 1000");
    wait_for("the worker", || run.stdout().contains("ready").then_some(()));
    hosts[1].cut();
    let run = run.wait();
    assert_eq!(run.code, 69, "{}", run.stderr);
    assert!(run.stderr.contains("error: ssh to `h1` failed: the connection was lost"), "{}", run.stderr);
}
