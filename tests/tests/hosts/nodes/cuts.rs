//! Connections that fail temporarily.

use std::time::{Duration, Instant};

use serde_json::Value;
use xlaunch_tests::{Process, is_alive, requirements, wait_for, xlaunch_path};

use super::{Group, places};

xlaunch_harness::tests! {
    needs requirements::hosts:
    connections_that_fail_for_6_s_restart_nothing,
    workers_of_a_host_that_is_cut_off_end_before_others_start_and_it_comes_back,
    fixed_node_that_was_cut_off_takes_its_rank_again,
    spare_is_ready_while_it_reaches_the_coordinator_also_if_it_was_active_before,
    both_sides_of_a_cut_end_with_the_lease_where_nothing_restarts;
}

/// A short lease keeps the tests short.
const LEASE: &str = "--rdzv-conf keep_alive_max_attempt=4,last_call_timeout=1";

/// Returns the process ids of the workers on a host, and of processes that are about to start workers.
fn workers(group: &Group, host: usize) -> Vec<u32> {
    let processes = group.hosts[host].processes().into_iter();
    processes.filter(|process| process.command == "sh worker.sh").map(|process| process.pid).collect()
}

/// Returns the process ids of the two workers on a host.
fn two_workers(group: &Group, host: usize) -> Vec<u32> {
    wait_for("two workers", || Some(workers(group, host)).filter(|pids| pids.len() == 2))
}

fn connections_that_fail_for_6_s_restart_nothing() {
    type Fault = fn(&Group);
    // The first two end by themselves, the others are healed.
    let faults: [(&str, Fault); 7] = [
        ("h0-v6", |group| group.hosts[1].reset_connections(Duration::from_millis(500))),
        // In addition, no name resolves any more.
        ("h0", |group| {
            group.hosts[1].set_names("");
            group.hosts[1].reset_connections(Duration::from_millis(500));
        }),
        ("h0", |group| group.hosts[1].cut()),
        ("h0-v6", |group| group.hosts[0].cut()),
        ("h0", |group| group.hosts.cut_one_way(0, 1)),
        ("h0", |group| group.hosts.cut_one_way(1, 0)),
        ("h0", |group| group.hosts[1].loss(10)),
    ];
    // The groups run concurrently.
    let groups = faults.map(|(endpoint, fault)| {
        let group = Group::new(2, &format!("--nnodes 2 --rdzv-endpoint {endpoint} --max-restarts 1"));
        let launches = group.start_all(2);
        let pids = [0, 1].map(|host| two_workers(&group, host));
        (group, launches, pids.concat(), fault)
    });
    // Half of the lease's 12 s is left to a busy machine for healing and connecting again.
    std::thread::scope(|scope| {
        for (group, _, _, fault) in &groups {
            scope.spawn(|| {
                let begin = Instant::now();
                fault(group);
                std::thread::sleep(
                    (begin + Duration::from_secs(6)).saturating_duration_since(Instant::now()),
                );
                group.hosts[0].heal();
                group.hosts[1].heal();
            });
        }
    });
    // Failures to be detected so far would be noticed when the lease expires.
    std::thread::sleep(Duration::from_secs(7));
    for (index, (group, launches, pids, _)) in groups.into_iter().enumerate() {
        let errors = || launches.iter().map(Process::stderr).collect::<String>();
        assert!(pids.iter().all(|pid| is_alive(*pid)), "fault {index} ended workers: {}", errors());
        assert_eq!(group.starts().len(), 4, "fault {index}: {}", errors());
        // Messages arrive again.
        group.order(3, "exit 7");
        let starts = group.wait_for_starts(8, &launches);
        assert!(starts[4..].iter().all(|start| start.restarts == 1), "fault {index}: {starts:?}");
        group.expect_success(launches);
    }
}

fn workers_of_a_host_that_is_cut_off_end_before_others_start_and_it_comes_back() {
    let group = Group::elastic(2, "1:2", &format!("--max-restarts 3 {LEASE}"));
    // The workers of the host that is cut off do not end on request.
    let stubborn =
        super::WORKER.replace("trap 'exit 0' TERM", "[ $host = h0 ] && trap 'exit 0' TERM || trap '' TERM");
    std::fs::write(group.file("worker.sh"), stubborn).unwrap();
    let launches = group.start_all(2);
    group.hosts[1].cut();
    // The rest continues alone.
    let starts = group.wait_for_starts(6, &launches);
    assert_eq!(places(&starts[4..]), [(0, "h0"), (1, "h0")]);
    assert!(workers(&group, 1).is_empty(), "{}", launches[1].stderr());
    let (ended, started) = (group.last_beat("h1"), starts[4].at.min(starts[5].at));
    assert!(ended < started, "workers were alive at {ended} s, the others started at {started} s");
    assert!(starts[4..].iter().all(|start| (start.world, start.restarts) == (2, 1)), "{starts:?}");
    // The host's agent is still there.
    group.hosts[1].heal();
    let starts = group.wait_for_starts(10, &launches);
    assert_eq!(places(&starts[6..]), [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1")]);
    assert!(starts[6..].iter().all(|start| (start.world, start.restarts) == (4, 1)), "{starts:?}");
    group.expect_success(launches);
}

fn fixed_node_that_was_cut_off_takes_its_rank_again() {
    let group = Group::fixed(3, &format!("--max-restarts 1 {LEASE}"));
    let launches = group.start_all(3);
    group.hosts[1].cut();
    wait_for("workers to end", || (0..3).all(|host| workers(&group, host).is_empty()).then_some(()));
    group.hosts[1].heal();
    let starts = group.wait_for_starts(12, &launches);
    let last = &starts[6..];
    assert_eq!(places(last), [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1"), (4, "h2"), (5, "h2")]);
    assert!(last.iter().all(|start| start.restarts == 1), "{last:?}");
    group.expect_success(launches);
}

fn spare_is_ready_while_it_reaches_the_coordinator_also_if_it_was_active_before() {
    // With the default lease, so that a busy machine loses no node that was not cut off.
    let group = Group::elastic(3, "2", "--max-restarts 3 --rdzv-conf last_call_timeout=1");
    let query = |host: usize, option: &str| {
        Process::spawn_inside(group.hosts[host].command(xlaunch_path()).args(["status", option])).wait()
    };
    let wait_until = |host: usize, is_ready: bool| {
        wait_for(&format!("ready of h{host} to be {is_ready}"), || {
            ((query(host, "--ready").code == 0) == is_ready).then_some(())
        });
    };
    let mut launches = group.start_all(2);
    launches.push(group.start(2));
    wait_until(2, true);
    group.hosts[2].cut();
    wait_until(2, false);
    group.hosts[2].heal();
    wait_until(2, true);

    group.hosts[1].cut();
    let starts = group.wait_for_starts(8, &launches);
    assert_eq!(places(&starts[4..]), [(0, "h0"), (1, "h0"), (2, "h2"), (3, "h2")]);
    wait_until(1, false);
    group.hosts[1].heal();
    wait_until(1, true);
    let list = |status: &Value, name: &str, key: &str| -> Vec<Value> {
        status[name].as_array().into_iter().flatten().map(|it| it[key].clone()).collect()
    };
    // On a busy machine, the other nodes may answer too late for a query.
    let status = wait_for("a status with all nodes", || {
        let status: Value = serde_json::from_str(&query(1, "--json").stdout).ok()?;
        (list(&status, "nodes", "state").len() == 3 && list(&status, "ranks", "rank").len() == 4)
            .then_some(status)
    });
    let list = |name: &str, key: &str| list(&status, name, key);
    assert_eq!(list("nodes", "state"), ["active", "active", "spare"], "{status}");
    assert_eq!((list("ranks", "rank").len(), &status["attempt"]), (4, &1.into()), "{status}");
    assert!(list("ranks", "pid").iter().all(|pid| pid.as_u64() > Some(0)), "{status}");
    group.expect_success(launches);
}

fn both_sides_of_a_cut_end_with_the_lease_where_nothing_restarts() {
    let group = Group::new(2, &format!("--nnodes 2 --rdzv-endpoint h0 --max-restarts 0 {LEASE}"));
    let launches = group.start_all(2);
    let cut = std::time::Instant::now();
    group.hosts[1].cut();
    let outputs = group.expect_codes(launches, 75);
    // The lease is 4 s. A hang would last the minute for which others wait for the network.
    assert!(cut.elapsed() < Duration::from_secs(30), "{:?}", cut.elapsed());
    assert!(outputs[0].stderr.contains("node 1 (h1): the node was silent for "), "{outputs:#?}");
    for text in ["no contact with the coordinator for ", "ending the workers of this node", "h0"] {
        assert!(outputs[1].stderr.contains(text), "{text}: {outputs:#?}");
    }
}
