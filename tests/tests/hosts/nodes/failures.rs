//! Workers, agents and hosts that are killed.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use xlaunch_tests::{Output, Process, requirements, xlaunch_path};

use super::{CRASH, Group, places};

xlaunch_harness::tests! {
    needs requirements::hosts:
    killed_worker_is_reported_once_and_ends_all_nodes_alike,
    failed_workers_of_all_nodes_share_one_budget_of_restarts,
    killed_agent_ends_the_job_on_all_nodes,
    killed_agent_that_had_not_read_everything_is_lost_at_once,
    killed_agent_of_the_coordinator_ends_the_others,
    new_agent_takes_the_place_of_a_killed_one,
    power_cut_ends_the_job_or_lets_the_host_come_back;
    needs requirements::python3_on_hosts:
    restart_on_two_nodes_forks_from_the_processes_that_have_preloaded;
}

/// A module that records its imports and the importing process.
const MODULE: &str = "
import os
PROCESS = os.getpid()
with open('imports', 'a') as file:
    file.write(f'{os.uname().nodename} {PROCESS}\\n')
";
/// Rank 3 fails in the first attempt.
const SCRIPT: &str = "
import os, recorded, time
host, attempt = os.uname().nodename, os.environ['TORCHELASTIC_RESTART_COUNT']
with open('forks', 'a') as file:
    file.write(f'{attempt} {host} {recorded.PROCESS}\\n')
while open('forks').read().count('\\n') < 4:
    time.sleep(0.05)
if (os.environ['RANK'], attempt) == ('3', '0'):
    os.abort()
while open('forks').read().count('\\n') < 8:
    time.sleep(0.05)
";

/// Returns the outputs with a report of the failure, and those without.
fn reports(outputs: &[Output]) -> (Vec<&Output>, Vec<&Output>) {
    outputs.iter().partition(|output| !output.failure_report().is_empty())
}

fn killed_worker_is_reported_once_and_ends_all_nodes_alike() {
    // Both the coordinator's node and another one, with both families of addresses.
    for (endpoint, master, rank) in [("h0-v4", "10.77.0.10", 3), ("[fd77::10]:29500", "fd77::10", 1)] {
        let group = Group::new(3, &format!("--nnodes 3 --rdzv-endpoint {endpoint}"));
        let launches = group.start_all(3);
        let starts = group.starts();
        let hosts = [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1"), (4, "h2"), (5, "h2")];
        assert_eq!(places(&starts), hosts);
        for start in &starts {
            assert_eq!((start.node_rank, start.local_rank), (start.rank / 2, start.rank % 2));
            assert_eq!((start.world, start.restarts), (6, 0));
            // The endpoint is a name in one case, and an address in the other.
            assert!([master, endpoint].contains(&&*start.master.0), "{start:?}");
            assert_eq!(start.master, starts[0].master);
        }
        group.order(rank, CRASH);
        let outputs = group.expect_codes(launches, 1);
        let (reporting, silent) = reports(&outputs);
        assert_eq!((reporting.len(), silent.len()), (1, 2), "{outputs:#?}");
        let (node, host) = (rank / 2, format!("h{}", rank / 2));
        let root = reporting[0].root_cause();
        let texts = [format!("rank {rank}"), "local rank 1".into(), format!("node {node}"), host.clone()];
        for text in texts {
            assert!(root.contains(&text), "{text} in {root}");
        }
        assert!(root.contains("SIGKILL"), "{root}");
        for output in silent {
            let line = format!("node {node} ({host}): rank {rank}: ");
            assert_eq!(output.stderr.matches(&line).count(), 1, "{}", output.stderr);
        }
    }
}

fn failed_workers_of_all_nodes_share_one_budget_of_restarts() {
    let group = Group::fixed(2, "--max-restarts 2");
    let launches = group.start_all(2);
    for (restarts, rank) in [(1, 0), (2, 3)] {
        group.order(rank, "exit 7");
        let starts = group.wait_for_starts(4 * (restarts + 1), &launches);
        let last = &starts[4 * restarts..];
        assert_eq!(places(last), [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1")]);
        assert!(last.iter().all(|start| start.restarts as usize == restarts), "{last:?}");
        assert!(last.iter().all(|start| start.master == last[0].master), "{last:?}");
    }
    group.order(2, "exit 7");
    let outputs = group.expect_codes(launches, 1);
    assert_eq!(reports(&outputs).0.len(), 1, "{outputs:#?}");
    assert_eq!(group.starts().len(), 12);
}

fn killed_agent_ends_the_job_on_all_nodes() {
    let group = Group::fixed(3, "");
    let mut launches = group.start_all(3);
    launches[1].signal(Signal::KILL);
    assert_eq!(launches.remove(1).wait().code, 137);
    let outputs = group.expect_codes(launches, 75);
    assert!(outputs.iter().all(|output| output.stderr.contains("node 1 (h1)")), "{outputs:#?}");
}

/// The agent's kernel then sends a reset, as a network may.
fn killed_agent_that_had_not_read_everything_is_lost_at_once() {
    // The lease alone would take longer than any deadline here.
    let group = Group::fixed(2, "--rdzv-conf keep_alive_max_attempt=60");
    let mut launches = group.start_all(2);
    launches[1].signal(Signal::STOP);
    // This also queries the other node, which does not read the query.
    let mut status = group.hosts[0].command(xlaunch_path());
    Process::spawn_inside(status.args(["status"])).wait();
    let killed = Instant::now();
    launches[1].signal(Signal::KILL);
    assert_eq!(launches.remove(1).wait().code, 137);
    let outputs = group.expect_codes(launches, 75);
    assert!(outputs[0].stderr.contains("node 1 (h1)"), "{}", outputs[0].stderr);
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
}

fn killed_agent_of_the_coordinator_ends_the_others() {
    let group = Group::fixed(2, "--max-restarts 3");
    let mut launches = group.start_all(2);
    launches[0].signal(Signal::KILL);
    assert_eq!(launches.remove(0).wait().code, 137);
    let outputs = group.expect_codes(launches, 75);
    assert!(outputs[0].stderr.contains("the coordinator was lost"), "{}", outputs[0].stderr);
}

fn new_agent_takes_the_place_of_a_killed_one() {
    let group = Group::fixed(3, "--max-restarts 3");
    let mut launches = group.start_all(3);
    launches[1].signal(Signal::KILL);
    assert_eq!(std::mem::replace(&mut launches[1], group.start(1)).wait().code, 137);
    let starts = group.wait_for_starts(12, &launches);
    let last = &starts[6..];
    assert_eq!(places(last), [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1"), (4, "h2"), (5, "h2")]);
    assert!(last.iter().all(|start| start.restarts == 1), "{last:?}");
    group.expect_success(launches);
}

fn power_cut_ends_the_job_or_lets_the_host_come_back() {
    let lease = "--rdzv-conf keep_alive_max_attempt=3";
    let [ending, restarting] = [0, 1].map(|most| Group::fixed(2, &format!("--max-restarts {most} {lease}")));
    let [mut ended, mut restarted] = [&ending, &restarting].map(|group| group.start_all(2));
    ending.hosts[1].kill();
    restarting.hosts[1].kill();
    assert_eq!([ended.remove(1), restarted.remove(1)].map(|launch| launch.wait().code), [137, 137]);

    restarting.hosts[1].boot();
    // This happens before the coordinator knows that the host is lost.
    restarted.push(restarting.start(1));
    let outputs = ending.expect_codes(ended, 75);
    assert!(outputs[0].stderr.contains("node 1 (h1): the node was silent for "), "{}", outputs[0].stderr);

    let starts = restarting.wait_for_starts(8, &restarted);
    assert_eq!(places(&starts[4..]), [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1")]);
    restarting.expect_success(restarted);
}

fn restart_on_two_nodes_forks_from_the_processes_that_have_preloaded() {
    let group = Group::fixed(2, "--max-restarts 1 --nproc-per-node 2");
    std::fs::write(group.file("recorded.py"), MODULE).unwrap();
    std::fs::write(group.file("train.py"), SCRIPT).unwrap();
    let launches = [0, 1].map(|host| {
        let mut command = group.command(host);
        Process::spawn_inside(command.arg("train.py").env("PET_PRELOAD", "recorded"))
    });
    group.expect_codes(launches.into(), 0);
    let lines = |name: &str| -> Vec<String> {
        let text = std::fs::read_to_string(group.file(name)).unwrap();
        let mut lines: Vec<_> = text.lines().map(String::from).collect();
        lines.sort_unstable();
        lines
    };
    let imports = lines("imports");
    assert!(
        imports.len() == 2 && imports[0].starts_with("h0 ") && imports[1].starts_with("h1 "),
        "{imports:?}"
    );
    let attempt = |number: u32| imports.iter().flat_map(move |import| vec![format!("{number} {import}"); 2]);
    assert_eq!(lines("forks"), attempt(0).chain(attempt(1)).collect::<Vec<_>>());
}
