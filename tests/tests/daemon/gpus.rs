//! Allocation of GPUs to jobs, on simulated GPUs.

use std::process::Command;

use serde_json::Value;
use xlaunch_tests::{Node, Process, wait_for};

xlaunch_harness::tests! {
    jobs_hold_distinct_gpus_and_see_only_those,
    sick_drained_excluded_and_foreign_gpus_get_no_job,
    gpu_that_fails_during_a_job_is_shown_and_gets_no_other_job,
    request_for_more_gpus_than_the_node_has_is_refused;
}

/// Returns state and job of each GPU.
fn gpus(node: &Node) -> Vec<(String, u64)> {
    let reply = node.json(&["node"]);
    let gpu = |gpu: &Value| {
        let state = gpu["state"].as_str().unwrap_or_default().to_owned();
        (state, gpu["job"].as_u64().unwrap_or(0))
    };
    reply["gpus"].as_array().unwrap_or_else(|| panic!("{reply}")).iter().map(gpu).collect()
}

fn states(node: &Node) -> Vec<String> {
    gpus(node).into_iter().map(|(state, _)| state).collect()
}

/// Asserts that a job waits for GPUs, for a reason with these numbers.
fn assert_waits(node: &Node, job: u64, wanted: usize, free: usize) {
    let reason = wait_for("a reason", || {
        Some(node.job(job)["reason"].as_str()?.to_owned()).filter(|reason| !reason.is_empty())
    });
    // GPUs may be in service but in use, or too few may be in service.
    let numbers =
        [format!("{free} are free"), format!("{free} free"), format!("{wanted} wanted, {free} usable")];
    assert!(reason.contains(&format!("{wanted} ")), "{reason}");
    assert!(numbers.iter().any(|words| reason.contains(words)), "{numbers:?} in {reason}");
}

fn jobs_hold_distinct_gpus_and_see_only_those() {
    let node = Node::with_gpus(&["GPU-a 0", "GPU-b 0", "GPU-c 0"], "");
    let script = "echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES; while ! [ -e end ]; do sleep 0.02; done";
    let submit = |gpus: &str| node.submit(&["--gpus", gpus, "--nproc", gpus, "--", "sh", "-c", script]);
    let jobs = [submit("2"), submit("1"), submit("2")];
    for job in &jobs[..2] {
        node.wait(*job, "running");
    }
    assert_eq!(node.job(jobs[0])["gpus"], serde_json::json!(["GPU-a", "GPU-b"]));
    assert_waits(&node, jobs[2], 2, 0);
    let held = [("held".to_owned(), jobs[0]), ("held".to_owned(), jobs[0]), ("held".to_owned(), jobs[1])];
    assert_eq!(gpus(&node), held);
    node.write("end", "");
    for job in jobs {
        node.wait(job, "done");
    }
    let stdout = |job: u64, rank: &str| node.run(&["logs", &job.to_string(), "--rank", rank]).stdout;
    assert_eq!(stdout(jobs[0], "0"), "0 GPU-a,GPU-b\n");
    assert_eq!(stdout(jobs[0], "1"), "1 GPU-a,GPU-b\n");
    assert_eq!(stdout(jobs[1], "0"), "0 GPU-c\n");
    assert_eq!(states(&node), ["free", "free", "free"]);
}

fn sick_drained_excluded_and_foreign_gpus_get_no_job() {
    let mut foreign = Process::spawn(Command::new("sleep").arg("1000"));
    let used = format!("GPU-c 0 {}", foreign.pid());
    let gpus = ["GPU-a 2", "GPU-b 0", used.as_str(), "GPU-d 0", "GPU-e 0"];
    let node = Node::with_gpus(&gpus, "leave_gpus = [\"GPU-d\"]");
    assert_eq!(node.run(&["drain", "--gpu", "1", "--reason", "fan"]).code, 0);
    assert_eq!(states(&node), ["sick", "drained", "foreign", "drained", "free"]);
    let one = node.submit(&["--gpus", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]);
    node.wait(one, "done");
    assert_eq!(node.run(&["logs", &one.to_string()]).stdout, "GPU-e\n");
    let three = node.submit(&["--gpus", "3", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]);
    assert_waits(&node, three, 3, 1);
    assert_eq!(node.run(&["drain", "--gpu", "1", "--undo"]).code, 0);
    assert!(foreign.is_running());
    drop(foreign);
    node.wait(three, "done");
    assert_eq!(node.run(&["logs", &three.to_string(), "--rank", "0"]).stdout, "GPU-b,GPU-c,GPU-e\n");
}

fn gpu_that_fails_during_a_job_is_shown_and_gets_no_other_job() {
    let node = Node::with_gpus(&["GPU-a 0"], "");
    let job = node.submit(&["--gpus", "1", "--", "sh", "-c", "while ! [ -e end ]; do sleep 0.02; done"]);
    node.wait(job, "running");
    node.set_gpus(&["GPU-a 7"]);
    let is_shown = || node.run(&["node"]).stdout.contains("7 uncorrected").then_some(());
    wait_for("the errors to be shown", is_shown);
    assert_eq!(gpus(&node), [("held".to_owned(), job)]);
    node.write("end", "");
    node.wait(job, "done");
    assert_eq!(states(&node), ["sick"]);
    let next = node.submit(&["--gpus", "1", "--", "true"]);
    assert_waits(&node, next, 1, 0);
}

fn request_for_more_gpus_than_the_node_has_is_refused() {
    let node = Node::with_gpus(&["GPU-a 0", "GPU-b 0"], "");
    let run = node.run(&["submit", "--gpus", "3", "--", "true"]);
    assert!(run.code != 0 && run.stderr.contains("can get at most 2 on this node"), "{}", run.stderr);
}
