//! Permission to join a job: tokens that are missing, short, wrong or readable by others, and places where the token
//! must not appear.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use xlaunch_tests::{Hosts, Process, requirements, wait_for, xlaunch_path};

use crate::TOKEN;

xlaunch_harness::tests! {
    needs requirements::hosts:
    node_that_does_not_prove_the_token_is_refused_and_the_others_wait_for_the_right_one,
    nodes_without_a_usable_token_are_told_what_to_do,
    token_is_seen_nowhere_but_in_the_launch_that_was_given_it;
}

/// Returns a launch of `script` on the host of this rank of two.
fn launch(hosts: &Hosts, rank: usize, flags: &[&str], script: &str) -> Command {
    let mut command = hosts[rank].command(xlaunch_path());
    command.args(["--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=h0"]).args(flags);
    command.arg(format!("--node-rank={rank}")).args(["--", "sh", "-c", script]);
    command
}

fn node_that_does_not_prove_the_token_is_refused_and_the_others_wait_for_the_right_one() {
    let hosts = Hosts::new(2);
    let first = Process::spawn_inside(launch(&hosts, 0, &[], "echo $RANK").env("XLAUNCH_TOKEN", TOKEN));
    let start = |flags: &[&str], token: &str| {
        let mut command = launch(&hosts, 1, flags, "echo $RANK");
        if !token.is_empty() {
            command.env("XLAUNCH_TOKEN", token);
        }
        Process::spawn_inside(&mut command).wait()
    };
    for (flags, token, why) in [
        (&[][..], "the token of another job", "its token differs; give all nodes the same `--token-file`"),
        (&["--rdzv-insecure"], "", "it expects TLS; give this node the job's token with `--token-file`"),
    ] {
        let refused = start(flags, token);
        assert_eq!(refused.code, 69, "{}", refused.stderr);
        let error = "error: failed to connect to the coordinator at h0:29500: ";
        assert!(refused.stderr.contains(&format!("{error}{why}")), "{}", refused.stderr);
        assert_eq!(refused.stdout, "");
    }
    let (second, first) = (start(&[], TOKEN), first.wait());
    assert_eq!((first.code, first.stdout.as_str()), (0, "0\n"), "{}", first.stderr);
    for why in ["its token differs", "it does not use TLS"] {
        // The address may be of either family.
        let mut lines = first.stderr.lines();
        let is_named =
            lines.any(|line| line.starts_with("xlaunch: refused a caller at ") && line.contains(why));
        assert!(is_named, "{why} in {}", first.stderr);
    }
    assert_eq!((second.code, second.stdout.as_str()), (0, "1\n"), "{}", second.stderr);

    // The reverse: the coordinator has no token.
    let mut open = Process::spawn_inside(&mut launch(&hosts, 0, &["--rdzv-insecure"], "true"));
    let refused = start(&[], TOKEN);
    let why = "it does not use TLS; give its node the token too, or use `--rdzv-insecure` on all nodes";
    assert!(refused.code == 69 && refused.stderr.contains(why), "{}", refused.stderr);
    assert!(open.is_running(), "{}", open.stderr());
    open.signal(Signal::INT);
    assert_eq!(open.wait().code, 130);
}

fn nodes_without_a_usable_token_are_told_what_to_do() {
    let hosts = Hosts::new(2);
    let file = |name: &str, text: &str, mode| {
        let path = hosts[0].write(name, text);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        format!("--token-file={}", path.display())
    };
    for (flag, token, words) in [
        (String::new(), "", &["--token-file FILE or XLAUNCH_TOKEN", "--rdzv-insecure"][..]),
        (String::new(), "fifteen bytes..", &["XLAUNCH_TOKEN has 15 bytes, expected at least 16"]),
        (file("short", "short\n", 0o600), "", &["short` has 5 bytes, expected at least 16"]),
        (file("open", TOKEN, 0o644), "", &["is open to other users (mode 0644); run `chmod 600`"]),
        ("--token-file=missing".into(), "", &["failed to read token file `missing`"]),
    ] {
        let flags: Vec<&str> = if flag.is_empty() { Vec::new() } else { vec![&flag] };
        let mut command = launch(&hosts, 0, &flags, "touch started");
        if !token.is_empty() {
            command.env("XLAUNCH_TOKEN", token);
        }
        let refused = Process::spawn_inside(&mut command).wait();
        assert_eq!(refused.code, 2, "{flag}: {}", refused.stderr);
        for word in words {
            assert!(refused.stderr.contains(word), "{flag}: {word} in {}", refused.stderr);
        }
        assert!(!refused.stderr.contains(TOKEN));
    }
    assert!(!hosts[0].path().join("started").exists());
}

fn token_is_seen_nowhere_but_in_the_launch_that_was_given_it() {
    let hosts = Hosts::new(2);
    // This includes a descendant of the worker.
    let script = "env; xargs -0 < /proc/self/environ; echo ready; sleep 1000 & wait";
    let file = hosts[0].write("token", TOKEN);
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    let logs = hosts.shared().join("logs");
    let flags = ["--tee=3", "--log-dir", logs.to_str().unwrap()];
    let by_file = ["--token-file", file.to_str().unwrap()];
    let launches = [
        Process::spawn_inside(&mut launch(&hosts, 0, &[&flags[..], &by_file].concat(), script)),
        Process::spawn_inside(launch(&hosts, 1, &flags, script).env("XLAUNCH_TOKEN", TOKEN)),
    ];
    for launch in &launches {
        wait_for("workers", || launch.stdout().contains("ready").then_some(()));
    }
    for (index, launch) in launches.iter().enumerate() {
        let processes = hosts[index].processes();
        assert!(processes.len() >= 4, "{processes:?}");
        for process in processes {
            assert!(!process.command.contains(TOKEN), "{process:?}");
            let environment = std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
            // A process cannot remove a variable that its parent has passed to it.
            let is_given = index == 1 && is_launch(&process.command);
            assert!(is_given || !contains(&environment, TOKEN), "{process:?}");
        }
        let mut status = hosts[index].command(xlaunch_path());
        let status = Process::spawn_inside(status.args(["status", "--json"])).wait();
        assert_eq!(status.code, 0, "{}", status.stderr);
        assert!(!status.stdout.contains(TOKEN), "{}", status.stdout);
        assert!(!launch.stdout().contains(TOKEN) && !launch.stderr().contains(TOKEN));
    }
    launches[0].signal(Signal::TERM);
    for launch in launches {
        let output = launch.wait();
        assert_eq!(output.code, 143, "{}", output.stderr);
        assert!(!output.stdout.contains(TOKEN) && !output.stderr.contains(TOKEN), "{output:?}");
    }
    let text = all_text(&logs);
    assert!(contains(&text, "ready") && !contains(&text, TOKEN));
}

/// Returns whether a command line belongs to a launch or its helper, not to a worker.
fn is_launch(command: &str) -> bool {
    command.starts_with(&xlaunch_path().display().to_string())
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Returns the contents of all files below a directory.
fn all_text(dir: &Path) -> Vec<u8> {
    let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| if path.is_dir() { all_text(&path) } else { std::fs::read(path).unwrap() })
        .collect()
}
