//! Ranks of a command that hang on one of several nodes.

use xlaunch_tests::{Output, Process, requirements};

use super::Group;

xlaunch_harness::tests! {
    needs requirements::hosts:
    rank_that_hangs_is_found_among_those_of_all_nodes,
    rank_is_found_after_those_of_the_first_node_have_exited,
    stopped_process_on_another_node_is_named;
}

/// A shell function that returns when all ranks of the attempt have called it with the same argument. Ranks of a
/// training job meet in every step, so that a busy host makes none of them silent much earlier than the others.
const MEET: &str = "meet() { at=at-$TORCHELASTIC_RESTART_COUNT-$1; touch $at-$RANK; \
    for rank in 0 1 2 3; do until [ -e $at-$rank ]; do sleep 0.05; done; done; }; ";

/// Starts a job of two ranks on each of two nodes. The script can call [`MEET`].
fn start(group: &Group, script: &str) -> Vec<Process> {
    let script = format!("{MEET}{script}");
    let launch = |host| {
        let mut command = group.command(host);
        Process::spawn_inside(command.args(["--nproc-per-node", "2", "--", "sh", "-c", &script]))
    };
    [0, 1].map(launch).into()
}

fn line<'a>(output: &'a Output, part: &str) -> &'a str {
    let found = output.stderr.lines().find(|line| line.contains(part));
    found.unwrap_or_else(|| panic!("{part:?} in {}", output.stderr))
}

/// In the first attempt rank 3 hangs in step 5, and the others wait for it in step 6.
fn rank_that_hangs_is_found_among_those_of_all_nodes() {
    let script = "step=0; while [ $step -lt 8 ]; do meet $step; step=$((step + 1)); sleep 0.2; \
        [ $RANK-$TORCHELASTIC_RESTART_COUNT-$step = 3-0-5 ] && exec sleep 1000; \
        echo $step > $XLAUNCH_HEARTBEAT; done";
    let group = Group::fixed(2, "--hang-timeout 5 --max-restarts 1 --rdzv-id job --log-dir logs");
    let outputs = group.expect_codes(start(&group, script), 0);
    let found = line(&outputs[0], "sent no heartbeat for ");
    assert!(
        found.starts_with("xlaunch: node 1 (h1): rank 3 (local rank 1) sent no heartbeat for "),
        "{found}"
    );
    assert!(found.ends_with(" s (step 4); ranks 0-2 are waiting for it"), "{found}");
    assert!(line(&outputs[1], "evidence of the hang: ").ends_with("/1/hang.txt"), "{}", outputs[1].stderr);
    assert!(!outputs[0].stderr.contains("evidence"), "{}", outputs[0].stderr);
    let mut evidence = Vec::new();
    for run in std::fs::read_dir(group.file("logs")).unwrap().flatten() {
        for place in ["node_0/attempt_0/0", "node_0/attempt_0/1", "node_1/attempt_0/0", "node_1/attempt_0/1"]
        {
            evidence.extend(std::fs::read_to_string(run.path().join(place).join("hang.txt")));
        }
    }
    let of = |words: &str| evidence.iter().filter(|text| text.contains(words)).count();
    assert_eq!((of("ranks of another node: sent no"), of("rank 3: sent no")), (2, 2), "{evidence:#?}");
    for output in &outputs {
        let restart = line(output, "restarting");
        assert!(restart.starts_with("xlaunch: node 1 (h1): rank 3: sent no heartbeat for "), "{restart}");
        assert!(
            !output.stderr.contains("rank 1 sent") && !output.stderr.contains("ranks 0-1 sent"),
            "{output:?}"
        );
    }
}

fn rank_is_found_after_those_of_the_first_node_have_exited() {
    let script = "echo 1 > $XLAUNCH_HEARTBEAT; meet 1; [ $RANK = 2 ] && exec sleep 1000; exit 0";
    let group = Group::fixed(2, "--hang-timeout 4");
    let outputs = group.expect_codes(start(&group, script), 75);
    let found = line(&outputs[0], "sent no heartbeat for ");
    assert!(
        found.starts_with("xlaunch: node 1 (h1): rank 2 (local rank 0) sent no heartbeat for "),
        "{found}"
    );
    assert!(found.ends_with(" s (step 1)"), "{found}");
    assert!(outputs[1].root_cause().contains("sent no heartbeat for "), "{}", outputs[1].stderr);
}

/// Rank 3 is a step ahead, so that only the state of its process shows that it hangs.
fn stopped_process_on_another_node_is_named() {
    let script = "for step in 1 2 3; do meet $step; echo $step > $XLAUNCH_HEARTBEAT; sleep 0.2; done; \
        [ $RANK = 3 ] && echo 4 > $XLAUNCH_HEARTBEAT && kill -STOP $$; exec sleep 1000";
    let group = Group::fixed(2, "--hang-timeout 4 --shutdown-timeout 1");
    let outputs = group.expect_codes(start(&group, script), 75);
    let found = line(&outputs[0], "sent no heartbeat for ");
    assert!(
        found.starts_with("xlaunch: node 1 (h1): rank 3 (local rank 1) sent no heartbeat for "),
        "{found}"
    );
    assert!(found.ends_with(" s (step 4); its process is stopped; ranks 0-2 are waiting for it"), "{found}");
}
