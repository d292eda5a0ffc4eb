//! Nodes that join, leave, or wait to replace others.

use rustix::process::Signal;
use xlaunch_tests::{Process, requirements};

use super::{Group, places};

xlaunch_harness::tests! {
    needs requirements::hosts:
    node_that_joins_below_max_starts_a_new_attempt_outside_the_budget,
    node_leaves_on_sigterm_where_the_others_are_enough,
    sigterm_stops_the_job_where_no_node_can_leave,
    spare_takes_the_rank_of_a_node_that_is_lost,
    two_jobs_run_on_the_same_hosts;
}

const LAST_CALL: &str = "--rdzv-conf last_call_timeout=1";

fn node_that_joins_below_max_starts_a_new_attempt_outside_the_budget() {
    let group = Group::elastic(2, "1:2", LAST_CALL);
    let mut launches = vec![group.start(0)];
    let first = group.wait_for_starts(2, &launches);
    assert!(first.iter().all(|start| (start.world, &*start.host) == (2, "h0")), "{first:?}");
    launches.push(group.start(1));
    let starts = group.wait_for_starts(6, &launches);
    assert_eq!(places(&starts[2..]), [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1")]);
    assert!(starts[2..].iter().all(|start| (start.world, start.restarts) == (4, 0)), "{starts:?}");
    assert!(launches[0].stderr().contains("joins"), "{}", launches[0].stderr());
    group.expect_success(launches);
}

fn node_leaves_on_sigterm_where_the_others_are_enough() {
    let group = Group::elastic(3, "2:3", LAST_CALL);
    let mut launches = group.start_all(3);
    let last = group.starts().into_iter().find(|start| start.node_rank == 1).unwrap();
    let leaving = usize::from(last.host == "h2") + 1;
    launches[leaving].signal(Signal::TERM);
    let left = launches.remove(leaving).wait();
    assert_eq!(left.code, 143, "{}", left.stderr);
    let starts = group.wait_for_starts(10, &launches);
    // Survivors keep their order; ranks move down.
    let other = if leaving == 1 { "h2" } else { "h1" };
    assert_eq!(places(&starts[6..]), [(0, "h0"), (1, "h0"), (2, other), (3, other)]);
    assert!(starts[6..].iter().all(|start| (start.world, start.restarts) == (4, 0)), "{starts:?}");
    group.expect_success(launches);
}

fn sigterm_stops_the_job_where_no_node_can_leave() {
    let fixed = Group::fixed(2, "--max-restarts 3");
    let elastic = Group::elastic(2, "2:3", LAST_CALL);
    for group in [fixed, elastic] {
        let launches = group.start_all(2);
        launches[1].signal(Signal::TERM);
        group.expect_codes(launches, 143);
        assert_eq!(group.starts().len(), 4);
    }
}

fn spare_takes_the_rank_of_a_node_that_is_lost() {
    let group = Group::elastic(3, "2", "--max-restarts 1");
    let mut launches = group.start_all(2);
    launches.push(start_spare(&group, 2));
    launches[1].signal(Signal::KILL);
    assert_eq!(launches.remove(1).wait().code, 137);
    let starts = group.wait_for_starts(8, &launches);
    assert_eq!(places(&starts[4..]), [(0, "h0"), (1, "h0"), (2, "h2"), (3, "h2")]);
    assert!(starts[4..].iter().all(|start| start.restarts == 1), "{starts:?}");
    // Another spare leaves when the job ends. It must be a member by then: otherwise it would wait for the next job.
    launches.push(start_spare(&group, 1));
    let outputs = group.expect_success(launches);
    let spare = &outputs.last().unwrap().stderr;
    assert!(spare.contains("the job is done; this node was not needed"), "{spare}");
    assert!(!spare.contains("error: "), "{spare}");
}

/// Starts the launch of a host. Returns when the coordinator has admitted it as a spare.
fn start_spare(group: &Group, host: usize) -> Process {
    let spare = group.start(host);
    spare.wait_for_stderr("this node is a spare");
    spare
}

fn two_jobs_run_on_the_same_hosts() {
    let group = Group::new(2, "--nnodes 2");
    let job = |id: &str, port: &str, script: &str| -> Vec<Process> {
        let start = |host| {
            let mut command = group.command(host);
            command.args(["--rdzv-endpoint", &format!("h0:{port}"), "--rdzv-id", id]);
            command.args(["--nproc-per-node", "2", "--", "sh", "-c", script]);
            Process::spawn_inside(&mut command)
        };
        [0, 1].map(start).into()
    };
    let wait = "while [ ! -e done ]; do sleep 0.05; done; echo $TORCHELASTIC_RUN_ID $RANK";
    let (good, bad) =
        (job("good", "29500", wait), job("bad", "29600", "[ $RANK != 2 ] || exit 7; sleep 1000"));
    let codes: Vec<i32> = bad.into_iter().map(|launch| launch.wait().code).collect();
    assert_eq!(codes, [1, 1]);
    group.finish();
    let mut lines: Vec<String> = Vec::new();
    for output in group.expect_codes(good, 0) {
        lines.extend(output.stdout.lines().map(String::from));
    }
    lines.sort_unstable();
    assert_eq!(lines, ["good 0", "good 1", "good 2", "good 3"]);
}
