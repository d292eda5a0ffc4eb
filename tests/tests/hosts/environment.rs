//! The environment of workers on several hosts, for each way of describing the hosts to them, and the numbers with
//! which their lines are labelled.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use xlaunch_tests::{Hosts, Output, Process, requirements, xlaunch_path};

use crate::TOKEN;

xlaunch_harness::tests! {
    needs requirements::hosts:
    every_worker_has_torchruns_variables_in_every_attempt,
    address_and_interface_are_those_that_the_user_chose,
    variables_of_torchrun_stand_for_flags,
    called_as_torchrun_nodes_join_without_a_token_after_a_warning,
    lines_are_labelled_with_the_rank_in_the_job;
}

type Variables = BTreeMap<String, String>;

/// Writes the environment of a worker to `DIR/ATTEMPT.HOST.LOCAL_RANK`. When all `$2` workers of the first attempt have
/// done so, the worker of rank 2 fails.
const DUMP: &str = r#"
    env -0 > "$1/.$RANK" && mv "$1/.$RANK" "$1/$TORCHELASTIC_RESTART_COUNT.$(uname -n).$LOCAL_RANK"
    test "$TORCHELASTIC_RESTART_COUNT" = 0 -a "$2" -gt 0 || exit 0
    while test "$(ls "$1" | wc -l)" -lt "$2"; do sleep 0.05; done
    test "$RANK" = 2 && exit 3
    exec sleep 1000"#;

/// Runs one launch on each host to its end.
fn run(commands: impl IntoIterator<Item = Command>) -> Vec<Output> {
    let launches: Vec<Process> =
        commands.into_iter().map(|mut command| Process::spawn_inside(&mut command)).collect();
    launches.into_iter().map(Process::wait).collect()
}

/// Runs [`DUMP`] on the hosts, with these flags for each. `fails` is the number of workers after which one of them
/// fails.
fn dump(
    hosts: &Hosts,
    dir: &Path,
    fails: usize,
    command: impl Fn(usize) -> Command,
) -> BTreeMap<String, Variables> {
    std::fs::create_dir(dir).unwrap();
    let fails = fails.to_string();
    let launches = hosts.iter().enumerate().map(|(index, _)| {
        let mut command = command(index);
        command.args(["--", "sh", "-c", DUMP, "sh"]).arg(dir).arg(&fails);
        command
    });
    for output in run(launches) {
        assert_eq!(output.code, 0, "{}", output.stderr);
    }
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let variables = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        let pairs = text.split('\0').filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    files.map(|entry| (entry.file_name().into_string().unwrap(), variables(&entry.path()))).collect()
}

/// Returns the set of values that all workers have for a variable.
fn values<'a>(all: impl IntoIterator<Item = &'a Variables>, name: &str) -> BTreeSet<String> {
    all.into_iter().map(|variables| variables.get(name).cloned().unwrap_or_default()).collect()
}

fn every_worker_has_torchruns_variables_in_every_attempt() {
    let hosts = Hosts::new(3);
    let workers = [2, 1, 3];
    let found = dump(&hosts, &hosts.path().join("dump"), 6, |index| {
        let mut command = hosts[index].command(xlaunch_path());
        command.args(["--nnodes=3", "--rdzv-endpoint=10.77.0.10:29600", "--max-restarts=2", "--role=actor"]);
        command.args([format!("--node-rank={index}"), format!("--nproc-per-node={}", workers[index])]);
        command.env("XLAUNCH_TOKEN", TOKEN);
        if index == 2 {
            command.env("GLOO_SOCKET_IFNAME", "mine");
        }
        command
    });
    assert_eq!(found.len(), 12, "{:?}", found.keys());
    for attempt in ["0", "1"] {
        let mut rank = 0;
        for (node, workers) in workers.into_iter().enumerate() {
            for local_rank in 0..workers {
                let variables = &found[&format!("{attempt}.h{node}.{local_rank}")];
                for (name, value) in [
                    ("RANK", rank.to_string()),
                    ("LOCAL_RANK", local_rank.to_string()),
                    ("WORLD_SIZE", "6".into()),
                    ("LOCAL_WORLD_SIZE", workers.to_string()),
                    ("GROUP_RANK", node.to_string()),
                    ("GROUP_WORLD_SIZE", "3".into()),
                    ("ROLE_RANK", rank.to_string()),
                    ("ROLE_WORLD_SIZE", "6".into()),
                    ("ROLE_NAME", "actor".into()),
                    ("MASTER_ADDR", "10.77.0.10".into()),
                    ("TORCHELASTIC_RESTART_COUNT", attempt.into()),
                    ("TORCHELASTIC_MAX_RESTARTS", "2".into()),
                    ("GLOO_SOCKET_IFNAME", if node == 2 { "mine" } else { "eth0" }.into()),
                ] {
                    assert_eq!(
                        variables.get(name),
                        Some(&value),
                        "{name} of rank {rank} in attempt {attempt}"
                    );
                }
                for name in ["XLAUNCH_TOKEN", "NCCL_SOCKET_IFNAME"] {
                    assert_eq!(variables.get(name), None, "{name} of rank {rank}");
                }
                rank += 1;
            }
        }
    }
    let of_attempt = |attempt: &'static str| {
        found.iter().filter(move |(name, _)| name.starts_with(attempt)).map(|(_, variables)| variables)
    };
    let ports = ["0.", "1."].map(|attempt| values(of_attempt(attempt), "MASTER_PORT"));
    assert!(ports.iter().all(|ports| ports.len() == 1), "{ports:?}");
    assert_ne!(ports[0], ports[1]);
    let ids = values(found.values(), "TORCHELASTIC_RUN_ID");
    assert!(ids.len() == 1 && !ids.contains("") && !ids.contains("none"), "{ids:?}");
}

fn address_and_interface_are_those_that_the_user_chose() {
    let hosts = Hosts::new(2);
    let token = hosts[0].write("token", TOKEN);
    std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let dynamic = ["--rdzv-backend=c10d", "--rdzv-endpoint=[fd77::10]:29600", "--rdzv-id=seven"];
    let plain = ["--rdzv-endpoint=h0-v4"];
    for (case, flags, own, expected) in [
        // Either of the two may be first.
        ("ipv6", &dynamic[..], ["", ""], ["", "eth0", ""]),
        ("names", &plain, ["--local-addr=h0-v6", "--local-addr=h1-v6"], ["h0-v6", "eth0", ""]),
        ("interface", &plain, ["--interface=eth0"; 2], ["10.77.0.10", "eth0", "eth0"]),
    ] {
        let found = dump(&hosts, &hosts.path().join(case), 0, |index| {
            let mut command = hosts[index].command(xlaunch_path());
            command.args(["--nnodes=2", "--nproc-per-node=2"]).arg("--token-file").arg(&token).args(flags);
            command.arg(format!("--node-rank={index}"));
            command.args(own.iter().skip(index).take(1).filter(|flag| !flag.is_empty()));
            command
        });
        assert_eq!(found.len(), 4, "{case}: {:?}", found.keys());
        let names = ["MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];
        let mut seen = names.map(|name| values(found.values(), name));
        if case == "ipv6" {
            let first = found.iter().find(|(_, variables)| variables["RANK"] == "0").unwrap().0;
            let address = if first.contains("h0") { "fd77::10" } else { "fd77::11" };
            assert_eq!(seen[0], [address.to_owned()].into());
            seen[0] = [String::new()].into();
            assert_eq!(values(found.values(), "TORCHELASTIC_RUN_ID"), ["seven".to_owned()].into());
        }
        assert_eq!(seen, expected.map(|value| [value.to_owned()].into()), "{case}");
        assert_eq!(values(found.values(), "RANK").len(), 4, "{case}");
    }
}

fn variables_of_torchrun_stand_for_flags() {
    let hosts = Hosts::new(2);
    let found = dump(&hosts, &hosts.path().join("dump"), 0, |index| {
        let mut command = hosts[index].command(xlaunch_path());
        command.env("XLAUNCH_TOKEN", TOKEN).env("PET_NNODES", "2").env("PET_NODE_RANK", index.to_string());
        command
            .env("PET_MASTER_ADDR", "h0-v4")
            .env("PET_MASTER_PORT", "29600")
            .env("PET_NPROC_PER_NODE", "2");
        command
    });
    let names: Vec<&String> = found.keys().collect();
    assert_eq!(names, ["0.h0.0", "0.h0.1", "0.h1.0", "0.h1.1"]);
    assert_eq!(values(found.values(), "WORLD_SIZE"), ["4".to_owned()].into());
    assert_eq!(values(found.values(), "MASTER_ADDR"), ["10.77.0.10".to_owned()].into());
}

fn called_as_torchrun_nodes_join_without_a_token_after_a_warning() {
    let hosts = Hosts::new(2);
    let torchrun = hosts.path().join("torchrun");
    symlink(xlaunch_path(), &torchrun).unwrap();
    let script = hosts[0].write("worker.sh", "echo $RANK of $WORLD_SIZE\n");
    let outputs = run(hosts.iter().map(|host| {
        let mut command = host.command(&torchrun);
        command.args([
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=h0:29600",
        ]);
        command.args(["--rdzv-id=7", "--no-python", "sh"]).arg(&script);
        command
    }));
    let mut lines: Vec<String> = outputs.iter().map(|output| output.stdout.clone()).collect();
    lines.sort();
    assert_eq!(lines, ["0 of 2\n", "1 of 2\n"], "{outputs:?}");
    for output in outputs {
        assert_eq!(output.code, 0, "{}", output.stderr);
        assert!(output.stderr.contains("warning: plain TCP without authentication"), "{}", output.stderr);
    }
}

fn lines_are_labelled_with_the_rank_in_the_job() {
    let hosts = Hosts::new(2);
    let outputs = run(hosts.iter().enumerate().map(|(index, host)| {
        let mut command = host.command(xlaunch_path());
        command.args([
            "--nnodes=2",
            "--nproc-per-node=2",
            "--rdzv-endpoint=h0",
            &format!("--node-rank={index}"),
        ]);
        command.args([
            "--log-line-prefix-template=${rank}/${local_rank}: ",
            "--",
            "sh",
            "-c",
            "echo is $RANK",
        ]);
        command.env("XLAUNCH_TOKEN", TOKEN);
        command
    }));
    for (output, expected) in outputs.iter().zip([["0/0: is 0", "1/1: is 1"], ["2/0: is 2", "3/1: is 3"]]) {
        let mut lines: Vec<&str> = output.stdout.lines().collect();
        lines.sort_unstable();
        assert_eq!((output.code, lines.as_slice()), (0, &expected[..]), "{}", output.stderr);
    }
}
