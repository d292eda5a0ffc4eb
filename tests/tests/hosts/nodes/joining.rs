//! Nodes that are missing, late, or do not belong to the job.

use xlaunch_tests::{Process, requirements, xlaunch_path};

use super::{Group, places};

xlaunch_harness::tests! {
    needs requirements::hosts:
    missing_node_is_named_at_the_deadline,
    late_node_is_named_every_10_s_and_joins,
    node_that_differs_is_refused_with_both_values_and_the_others_keep_waiting,
    name_of_the_coordinator_may_resolve_late,
    pods_of_an_indexed_job_join_by_names_that_resolve_late,
    node_that_cannot_connect_says_why_within_seconds,
    first_node_whose_endpoint_is_another_hosts_is_told,
    dynamic_nodes_find_a_coordinator_although_names_are_wrong_or_missing_at_first;
}

fn missing_node_is_named_at_the_deadline() {
    let group = Group::fixed(3, "--rdzv-conf join_timeout=3");
    let outputs = group.expect_codes(vec![group.start(0), group.start(2)], 69);
    assert!(outputs.iter().all(|output| output.stderr.contains("node 1 of 3")), "{outputs:#?}");
    // The coordinator's node may be the missing one.
    let outputs = group.expect_codes(vec![group.start(1)], 69);
    assert!(outputs[0].stderr.contains("the coordinator at h0"), "{}", outputs[0].stderr);
}

fn late_node_is_named_every_10_s_and_joins() {
    let group = Group::fixed(2, "");
    let mut launches = vec![group.start(0)];
    launches[0].wait_for_stderr("waiting for node 1 of 2");
    launches.push(group.start(1));
    group.wait_for_starts(4, &launches);
    group.expect_success(launches);
}

fn node_that_differs_is_refused_with_both_values_and_the_others_keep_waiting() {
    let group = Group::fixed(3, "--rdzv-id job");
    let mut launches = vec![group.start(0), group.start(1)];
    // Both must be members before others claim their place.
    launches[0].wait_for_stderr("waiting for node 2 of 3");
    let shell = |host: usize, flags: &[&str], script: &str| {
        let mut command = group.command(host);
        command.args(flags).args(["--nproc-per-node", "2", "--", "sh", script]);
        Process::spawn_inside(&mut command).wait()
    };
    let wrong: [(&[&str], &str, [&str; 2]); 4] = [
        (&[], "other.sh", ["`sh other.sh`", "`sh worker.sh`"]),
        (&["--rdzv-id", "other"], "worker.sh", ["`other`", "`job`"]),
        (&["--nnodes", "4"], "worker.sh", ["node 2 (h2) has --nnodes 4", "node 0 (h0) has 3"]),
        (&["--node-rank", "1"], "worker.sh", ["node rank 1 of h2 (", ") is taken by h1 ("]),
    ];
    for (flags, script, values) in wrong {
        let refused = shell(2, flags, script);
        assert_eq!(refused.code, 69, "{}", refused.stderr);
        for value in values {
            assert!(refused.stderr.contains(value), "{value} in {}", refused.stderr);
        }
    }
    assert!(launches.iter_mut().all(Process::is_running));
    launches.push(group.start(2));
    let starts = group.wait_for_starts(6, &launches);
    assert_eq!(places(&starts), [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1"), (4, "h2"), (5, "h2")]);
    group.expect_success(launches);
}

fn name_of_the_coordinator_may_resolve_late() {
    let group = Group::fixed(2, "");
    group.hosts[1].set_names("");
    let mut launches = vec![group.start(1)];
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(launches[0].is_running(), "{}", launches[0].stderr());
    launches.push(group.start(0));
    group.hosts[1].set_names(&group.hosts.names());
    group.wait_for_starts(4, &launches);
    group.expect_success(launches);
}

/// Uses the environment and arguments of `deploy/kubernetes/indexed-job.yaml`, with a command in place of the
/// configuration.
fn pods_of_an_indexed_job_join_by_names_that_resolve_late() {
    let manifest = include_str!("../../../../deploy/kubernetes/indexed-job.yaml");
    let (_, args) = manifest.split_once("args: [").unwrap();
    let (args, _) = args.split_once(", /etc/xlaunch/train.toml]").unwrap();
    let args: Vec<&str> = args.split(", ").map(|arg| arg.trim_matches('"')).collect();
    let group = Group::new(2, "");
    group.hosts.iter().for_each(|host| host.set_names(""));
    let pod = |index: usize| {
        let mut command = group.hosts[index].command_in(&group.hosts.shared(), xlaunch_path());
        command.env("KUBERNETES_SERVICE_HOST", "10.96.0.1").env("XLAUNCH_TOKEN", "a token of the tests");
        command.env("JOB_COMPLETION_INDEX", index.to_string()).args(&args);
        Process::spawn_inside(command.args(["--nproc-per-node", "2", "--", "sh", "worker.sh"]))
    };
    let mut launches = vec![pod(1), pod(0)];
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(launches.iter_mut().all(Process::is_running), "{}", launches[0].stderr());
    // A headless service resolves the names of its pods once they exist.
    let names: String =
        (0..2).map(|index| format!("{} train-{index}.train\n", group.hosts[index].address())).collect();
    group.hosts.iter().for_each(|host| host.set_names(&names));
    let starts = group.wait_for_starts(4, &launches);
    assert_eq!(places(&starts), [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1")]);
    group.expect_success(launches);
}

fn node_that_cannot_connect_says_why_within_seconds() {
    let group = Group::fixed(2, "");
    group.hosts[1].set_names("");
    let waiting = group.start(1);
    waiting.wait_for_stderr("coordinator at h0:29500: the name does not resolve");
    group.hosts[1].set_names(&group.hosts.names());
    // The name resolves, but no process listens.
    waiting
        .wait_for_stderr("coordinator at h0:29500: connection refused; check the port of `--rdzv-endpoint`");
    waiting.wait_for_stderr("; trying for another ");
    let launches = vec![group.start(0), waiting];
    group.wait_for_starts(4, &launches);
    group.expect_success(launches);
}

fn first_node_whose_endpoint_is_another_hosts_is_told() {
    let group = Group::new(2, "--nnodes 2 --rdzv-endpoint h1");
    let first = group.start(0);
    first.wait_for_stderr("is not an address of this host");
    assert!(first.stderr().contains("this node runs the coordinator, but `h1` ("), "{}", first.stderr());
}

fn dynamic_nodes_find_a_coordinator_although_names_are_wrong_or_missing_at_first() {
    // Initial results of each host's resolver for `head`: the address of one of the hosts, or none.
    for wrong in [[Some(1), Some(0)], [None, Some(1)], [Some(0), Some(1)]] {
        let group = Group::new(2, "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head --rdzv-id job");
        let names = |head: Option<usize>| {
            let head = head.map(|head| format!("{} head\n", group.hosts[head].address()));
            group.hosts.names() + &head.unwrap_or_default()
        };
        for (host, head) in wrong.into_iter().enumerate() {
            group.hosts[host].set_names(&names(head));
        }
        let mut launches = vec![group.start(0), group.start(1)];
        std::thread::sleep(std::time::Duration::from_secs(2));
        assert!(launches.iter_mut().all(Process::is_running), "{}", launches[0].stderr());
        assert_eq!(group.starts(), [], "{wrong:?}");
        (0..2).for_each(|host| group.hosts[host].set_names(&names(Some(0))));
        group.wait_for_starts(4, &launches);
        group.expect_success(launches);
    }
}
