//! Views of a job on several nodes for users of each node, and of a coordinator outside of all nodes. Nodes are agents
//! on loopback with separate runtime directories.

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Launch, Process, free_endpoint, wait_for};

use crate::FAKE_WORKER;

xlaunch_harness::tests! {
    either_node_shows_all_ranks_and_stops_the_job,
    log_of_another_node_is_followed_through_a_restart_to_the_last_line,
    node_is_ready_while_its_workers_run,
    spare_answers_for_the_job_and_is_ready,
    coordinator_outside_of_the_nodes_survives_the_loss_of_any_of_them,
    coordinator_that_is_terminated_says_so,
    nodes_of_a_command_that_grows_have_one_run_id_and_logs_of_their_own,
    nodes_of_a_run_whose_id_was_used_before_share_a_new_directory,
    secret_argument_is_not_shown_to_a_node_that_has_another;
}

/// Two nodes and the port of their coordinator.
struct Nodes {
    nodes: [Launch; 2],
    endpoint: String,
}

impl Nodes {
    fn new() -> Self {
        Self { nodes: [Launch::new(), Launch::new()], endpoint: free_endpoint() }
    }

    /// Starts the agent of a node with `nproc` workers that run a shell script.
    fn spawn(&self, node: usize, options: &[&str], nproc: u32, script: &str) -> Process {
        let rank = node.to_string();
        let place = ["--nnodes", "2", "--node-rank", &rank, "--rdzv-endpoint", &self.endpoint];
        self.nodes[node].spawn_shell(&[&place[..], &["--rdzv-insecure"], options].concat(), nproc, script)
    }

    /// Returns the output of a subcommand on a node.
    fn query(&self, node: usize, args: &[&str]) -> String {
        let output = self.nodes[node].run(args);
        assert_eq!(output.code, 0, "{args:?}: {}", output.stderr);
        output.stdout
    }

    fn status(&self, node: usize) -> Value {
        serde_json::from_str(&self.query(node, &["status", "--json"])).unwrap()
    }

    /// Waits until the log of a rank contains this text.
    fn wait_for_log(&self, node: usize, rank: &str, text: &str) {
        wait_for(text, || {
            let output = self.nodes[node].run(&["logs", "--rank", rank]);
            output.stdout.contains(text).then_some(())
        });
    }
}

fn wait_for_stdout(process: &Process, text: &str) {
    wait_for(text, || process.stdout().contains(text).then_some(()));
}

/// Returns rank and state of each node.
fn states(status: &Value) -> Vec<(Option<u64>, String)> {
    let nodes = status["nodes"].as_array().into_iter().flatten();
    nodes.map(|node| (node["node_rank"].as_u64(), node["state"].as_str().unwrap().to_owned())).collect()
}

fn either_node_shows_all_ranks_and_stops_the_job() {
    let nodes = Nodes::new();
    let script = "trap 'echo last $RANK; exit 0' TERM; echo first $RANK; while :; do sleep 0.1; done";
    let agents = [nodes.spawn(0, &[], 2, script), nodes.spawn(1, &[], 2, script)];
    // This was written by ranks of the other node.
    nodes.wait_for_log(0, "3", "first 3\n");
    nodes.wait_for_log(1, "0", "first 0\n");
    nodes.wait_for_log(1, "1", "first 1\n");
    nodes.wait_for_log(0, "2", "first 2\n");

    let seen = [0, 1].map(|node| nodes.status(node));
    let ranks = |status: &Value| -> Vec<[Value; 5]> {
        let keys = ["rank", "local_rank", "node_rank", "pid", "state"];
        let ranks = status["ranks"].as_array().into_iter().flatten();
        ranks.map(|rank| keys.map(|key| rank[key].clone())).collect()
    };
    assert_eq!(ranks(&seen[0]), ranks(&seen[1]));
    let places: Vec<_> = ranks(&seen[0]).iter().map(|rank| [0, 1, 2].map(|key| rank[key].as_u64())).collect();
    let expected = [[0, 0, 0], [1, 1, 0], [2, 0, 1], [3, 1, 1]].map(|rank| rank.map(Some));
    assert_eq!(places, expected);
    for (status, agent) in seen.iter().zip(&agents) {
        assert_eq!(states(status), [(Some(0), "active".into()), (Some(1), "active".into())]);
        assert_eq!((&status["world_size"], &status["launcher_pid"]), (&4.into(), &agent.pid().into()));
    }
    let table = nodes.query(1, &["status"]);
    assert!(table.contains("\nNODE  STATE ") && table.contains("\n1     active  2-3 "), "{table}");
    let unknown = nodes.nodes[0].run(&["logs", "--rank", "4"]);
    assert!(unknown.code == 1 && unknown.stderr.contains("this launch has 4 ranks"), "{}", unknown.stderr);
    let stacks: Value = serde_json::from_str(&nodes.query(1, &["stacks", "--json"])).unwrap();
    let mut stacks: Vec<_> =
        stacks["ranks"].as_array().unwrap().iter().filter_map(|rank| rank["rank"].as_u64()).collect();
    stacks.sort_unstable();
    assert_eq!(stacks, [0, 1, 2, 3]);
    let refused = nodes.nodes[1].run(&["checkpoint"]);
    assert!(refused.code == 1 && refused.stderr.contains("runs a command"), "{}", refused.stderr);

    let followed =
        [(0, "3"), (1, "0")].map(|(node, rank)| nodes.nodes[node].spawn(&["logs", "--rank", rank, "-f"]));
    let tail = nodes.query(1, &["logs", "--rank", "1", "--tail", "1"]);
    assert_eq!(tail, "first 1\n");
    followed.iter().for_each(|followed| wait_for_stdout(followed, "first"));
    nodes.query(1, &["stop"]);
    let codes = agents.map(|agent| agent.wait().code);
    assert_eq!(codes[0], codes[1]);
    let logs = followed.map(|followed| followed.wait().stdout);
    assert_eq!(logs, ["first 3\nlast 3\n", "first 0\nlast 0\n"]);
}

fn log_of_another_node_is_followed_through_a_restart_to_the_last_line() {
    let nodes = Nodes::new();
    let go = nodes.nodes[0].path().join("go");
    let attempt = "$TORCHELASTIC_RESTART_COUNT";
    let script = format!(
        "echo begin {attempt}; while [ ! -e {}-{attempt} ]; do sleep 0.1; done; echo end {attempt}; \
         if [ $RANK = 1 ]; then exit $((3 - 3 * {attempt})); fi",
        go.display()
    );
    let options = ["--max-restarts", "1"];
    let agents = [nodes.spawn(0, &options, 1, &script), nodes.spawn(1, &options, 1, &script)];
    nodes.wait_for_log(0, "1", "begin 0\n");
    let followed = nodes.nodes[0].spawn(&["logs", "--rank", "1", "-f"]);
    wait_for_stdout(&followed, "begin 0");
    nodes.nodes[0].write("go-0", "");
    wait_for_stdout(&followed, "begin 1");
    nodes.nodes[0].write("go-1", "");
    assert_eq!(agents.map(|agent| agent.wait().code), [0, 0]);
    let followed = followed.wait();
    assert_eq!((followed.code, followed.stdout.as_str()), (0, "begin 0\nend 0\nbegin 1\nend 1\n"));
}

fn node_is_ready_while_its_workers_run() {
    let nodes = Nodes::new();
    let ready = |node: usize| nodes.nodes[node].run(&["status", "--ready"]);
    let first = nodes.spawn(0, &[], 1, "exec sleep 1000");
    first.wait_for_stderr("plain TCP");
    let early = ready(0);
    assert_eq!((early.code, early.stderr.lines().count()), (1, 1), "{}", early.stderr);
    let second = nodes.spawn(1, &[], 1, "exec sleep 1000");
    for node in [0, 1] {
        let output = wait_for("the node to be ready", || Some(ready(node)).filter(|output| output.code == 0));
        assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("", ""));
    }
    nodes.query(0, &["stop"]);
    first.wait();
    second.wait();
    assert_eq!(ready(1).code, 1);

    // Ranks of a training job that has not joined yet.
    let job = Job::scripted(FAKE_WORKER, "stderr:waiting sleep");
    let run = job.spawn(&[]);
    run.wait_for_stderr("waiting");
    let output = Process::spawn(&mut job.command(&["status", "--ready"])).wait();
    assert!(output.code == 1 && output.stderr.contains("is in state `rendezvous`"), "{}", output.stderr);
}

fn spare_answers_for_the_job_and_is_ready() {
    let (nodes, endpoint) = ([Launch::new(), Launch::new(), Launch::new()], free_endpoint());
    let script = "trap 'exit 0' TERM; echo rank $RANK, attempt $TORCHELASTIC_RESTART_COUNT; \
        while :; do sleep 0.1; done";
    let place = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-insecure", "--max-restarts", "3"];
    let agent = |node: usize| {
        let place = [&place[..], &["--rdzv-endpoint", &endpoint]].concat();
        nodes[node].spawn_shell(&place, 1, script)
    };
    let run = |node: usize, args: &[&str]| nodes[node].run(args);
    let ready = |node: usize| run(node, &["status", "--ready"]).code == 0;
    let status = |node: usize| -> Value {
        serde_json::from_str(&run(node, &["status", "--json"]).stdout).unwrap_or_default()
    };
    let first = agent(0);
    first.wait_for_stderr("plain TCP");
    // The launch is shown from its beginning, the node once its coordinator has answered.
    let waiting = wait_for("an answer", || Some(status(0)).filter(|it| !states(it).is_empty()));
    assert_eq!(waiting["state"], "starting");
    assert_eq!(states(&waiting), [(None, "waiting".into())]);
    assert!(!ready(0), "it waits for the others");

    let second = agent(1);
    wait_for("both nodes", || (ready(0) && ready(1)).then_some(()));
    let spare = agent(2);
    spare.wait_for_stderr("this node is a spare: the job has 2 of 2 nodes");
    assert!(ready(2), "{}", run(2, &["status", "--ready"]).stderr);
    let seen = status(2);
    let expected = [(Some(0), "active"), (Some(1), "active"), (None, "spare")];
    assert_eq!(states(&seen), expected.map(|(rank, state)| (rank, state.to_owned())));
    assert_eq!((&seen["state"], &seen["world_size"]), (&"running".into(), &2.into()), "{seen}");
    assert!(seen["ranks"].as_array().unwrap().iter().all(|rank| rank["pid"].as_u64() > Some(0)), "{seen}");
    assert_eq!(run(2, &["logs", "--rank", "1"]).stdout, "rank 1, attempt 0\n");
    let unknown = run(2, &["logs", "--rank", "2"]);
    assert!(unknown.code == 1 && unknown.stderr.contains("this launch has 2 ranks"), "{}", unknown.stderr);
    let refused = run(2, &["checkpoint"]);
    assert!(refused.code == 1 && refused.stderr.contains("runs a command"), "{}", refused.stderr);

    // A log that is followed through the spare continues when the spare itself runs the rank.
    let followed = nodes[2].spawn(&["logs", "--rank", "1", "-f"]);
    wait_for_stdout(&followed, "rank 1, attempt 0\n");
    second.signal(Signal::KILL);
    second.wait();
    wait_for_stdout(&followed, "rank 1, attempt 1\n");
    let another = agent(1);
    another.wait_for_stderr("this node is a spare");
    assert_eq!(status(1)["attempt"], 1);
    let stopped = run(1, &["stop"]);
    assert_eq!(stopped.code, 0, "{}", stopped.stderr);
    let codes = [first, spare, another].map(|agent| agent.wait().code);
    assert!(codes.iter().all(|code| *code == codes[0]), "{codes:?}");
    assert_eq!(followed.wait().code, 0);
}

fn coordinator_outside_of_the_nodes_survives_the_loss_of_any_of_them() {
    let (nodes, head) = ([Launch::new(), Launch::new(), Launch::new()], Launch::new());
    let endpoint = free_endpoint();
    let coordinator = head.spawn(&["rendezvous", "--listen", &endpoint, "--rdzv-id", "7", "--rdzv-insecure"]);
    coordinator.wait_for_stderr("coordinating one job");
    let script = "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then echo again; exit 0; fi; exec sleep 1000";
    let place = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "is_host=0", "--rdzv-endpoint"];
    let agent = |node: &Launch, id: &str| {
        let options = ["--rdzv-id", id, "--rdzv-insecure", "--max-restarts", "1"];
        node.spawn_shell(&[&place[..], &[endpoint.as_str()], &options[..]].concat(), 1, script)
    };
    let other = agent(&nodes[2], "8").wait();
    assert!(other.code == 69 && other.stderr.contains("has the run id `8`"), "{}", other.stderr);
    let (survivor, victim) = (agent(&nodes[0], "7"), agent(&nodes[1], "7"));
    let states_when = |what: &str, done: fn(&str) -> bool| {
        wait_for(what, || {
            let status = serde_json::from_str(&nodes[0].run(&["status", "--json"]).stdout).ok()?;
            Some(states(&status)).filter(|states| states.len() == 2 && states.iter().any(|(_, it)| done(it)))
        })
    };
    states_when("both nodes", |state| state == "active");
    victim.signal(Signal::KILL);
    let states = states_when("the loss", |state| state == "lost");
    assert!(states.iter().any(|(_, state)| state == "active"), "{states:?}");
    let replacement = agent(&nodes[2], "7");
    for (process, who) in [(survivor, "survivor"), (replacement, "replacement")] {
        let output = process.wait();
        assert!(output.code == 0 && output.stdout.contains("again"), "{who}: {}", output.stderr);
    }
    assert_eq!(coordinator.wait().code, 0);
    victim.wait();
}

fn coordinator_that_is_terminated_says_so() {
    let head = Launch::new();
    let coordinator = head.spawn(&["rendezvous", "--listen", &free_endpoint(), "--rdzv-insecure"]);
    coordinator.wait_for_stderr("coordinating one job");
    coordinator.signal(Signal::TERM);
    assert_eq!(coordinator.wait().code, 143);
    let refused = head.run(&["rendezvous", "--listen", "127.0.0.1:29400"]);
    assert!(refused.code == 2 && refused.stderr.contains("--token-file"), "{}", refused.stderr);
    let elsewhere = head.run(&["rendezvous", "--listen", "192.0.2.1:29400", "--rdzv-insecure"]);
    assert!(
        elsewhere.code == 69 && elsewhere.stderr.contains("not an address of this host"),
        "{}",
        elsewhere.stderr
    );
}

/// First there is one node, then two, then only the other one, which then has rank 0. All of them log to one directory.
fn nodes_of_a_command_that_grows_have_one_run_id_and_logs_of_their_own() {
    let head = Launch::new();
    let endpoint = free_endpoint();
    let coordinator = head.spawn(&["rendezvous", "--listen", &endpoint, "--rdzv-insecure"]);
    coordinator.wait_for_stderr("coordinating one job");
    let nodes = [Launch::new(), Launch::new()];
    let logs = head.path().join("logs");
    let logs = logs.to_str().unwrap();
    let script = "trap 'exit 0' TERM; echo $TORCHELASTIC_RUN_ID $RANK $WORLD_SIZE $GLOO_SOCKET_IFNAME; \
                  while :; do sleep 0.05; done";
    let agent = |node: usize| {
        let place = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint];
        let conf =
            ["--rdzv-conf", "is_host=0,last_call_timeout=0", "--rdzv-insecure", "--local-addr", "127.0.0.1"];
        nodes[node].spawn_shell(&[&place[..], &conf, &["--log-dir", logs, "--tee", "3"]].concat(), 1, script)
    };
    let wait_for_line = |process: &Process, end: &str| {
        wait_for(end, || process.stdout().lines().any(|line| line.ends_with(end)).then_some(()));
    };
    let first = agent(0);
    wait_for_line(&first, " 0 1");
    let second = agent(1);
    // Both nodes find each other by the interface of their address, including the one that began alone.
    wait_for_line(&first, " 0 2 lo");
    wait_for_line(&second, " 1 2 lo");
    first.signal(Signal::TERM);
    let mut outputs = vec![first.wait()];
    wait_for_line(&second, " 0 1");
    // The directory of the run leads to the node that now has rank 0.
    let run = std::fs::read_dir(logs).unwrap().next().unwrap().unwrap().path();
    let status = nodes[1].run(&["status", "--json", run.to_str().unwrap()]);
    assert_eq!(status.code, 0, "{}", status.stderr);
    second.signal(Signal::TERM);
    outputs.push(second.wait());
    let lines = outputs.iter().flat_map(|output| output.stdout.lines());
    let ids: std::collections::BTreeSet<&str> =
        lines.filter_map(|line| line.rsplit(':').next()?.split(' ').next()).collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let written = |name: &str| std::fs::read_to_string(run.join(name).join("0/stdout.log")).unwrap();
    assert!(
        written("node_0/attempt_0").ends_with(" 0 1\n") && written("node_0/attempt_1").ends_with(" 0 2 lo\n")
    );
    assert!(
        written("node_1/attempt_1").ends_with(" 1 2 lo\n") && written("node_1/attempt_2").ends_with(" 0 1\n")
    );
    assert_eq!(std::fs::read_dir(logs).unwrap().count(), 1, "one directory for all nodes");
    coordinator.wait();
}

fn nodes_of_a_run_whose_id_was_used_before_share_a_new_directory() {
    let logs = Launch::new();
    let shared = [logs.path().join("shared"), logs.path().join("shared")];
    let separate = [logs.path().join("zero"), logs.path().join("one")];
    // Node 1 has taken part in another run with this id.
    std::fs::create_dir_all(separate[1].join("night/node_0")).unwrap();
    for (dirs, ids) in [(shared, ["night", "night-2"]), (separate, ["night-2", "night-3"])] {
        for id in ids {
            let nodes = Nodes::new();
            let agents = [0, 1].map(|node| {
                let options = ["--rdzv-id", "night", "--log-dir", dirs[node].to_str().unwrap(), "--tee", "3"];
                nodes.spawn(node, &options, 1, "echo $TORCHELASTIC_RUN_ID")
            });
            for (node, run) in agents.into_iter().map(Process::wait).enumerate() {
                assert!(run.code == 0 && run.stdout.ends_with("night\n"), "{}{}", run.stdout, run.stderr);
                let log = dirs[node].join(format!("{id}/node_{node}/attempt_0/0/stdout.log"));
                assert_eq!(std::fs::read_to_string(&log).unwrap_or_default(), "night\n", "{}", log.display());
                assert!(!dirs[node].join(format!("{id}/node_{node}-2")).exists(), "{}", log.display());
            }
        }
    }
}

fn secret_argument_is_not_shown_to_a_node_that_has_another() {
    let nodes = [Launch::new(), Launch::new()];
    let endpoint = free_endpoint();
    let start = |node: usize, key: &str| {
        let rank = node.to_string();
        let place = ["--nnodes", "2", "--node-rank", &rank, "--rdzv-endpoint", &endpoint, "--rdzv-insecure"];
        nodes[node].spawn(&[&place[..], &["--", "true", "--api-key", key]].concat())
    };
    let agents = [start(0, "tr0ub4dor"), start(1, "correct-horse")];
    agents[1].wait_for_stderr("a different configuration");
    agents[0].signal(Signal::TERM);
    for run in agents.map(Process::wait) {
        assert!(!run.stderr.contains("tr0ub4dor") && !run.stderr.contains("correct-horse"), "{}", run.stderr);
        if run.code == 69 {
            assert!(run.stderr.contains("in `true --api-key '[redacted]'`"), "{}", run.stderr);
        }
    }
}
