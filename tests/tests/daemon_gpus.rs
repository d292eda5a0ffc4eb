//! Who gets which GPUs of a node, by what an NVML of our own says of them.

use serde_json::Value;
use xlaunch_tests::{Node, Running, wait_for};

/// What the node says of its GPUs: state and holder.
fn gpus(node: &Node) -> Vec<(String, u64)> {
    let run = node.run(&["node", "--json"]);
    let reply: Value = serde_json::from_str(&run.stdout).unwrap_or_else(|_| panic!("{}", run.stderr));
    let gpu = |gpu: &Value| {
        let state = gpu["state"].as_str().unwrap_or_default().to_owned();
        (state, gpu["job"].as_u64().unwrap_or(0))
    };
    reply["gpus"].as_array().unwrap_or_else(|| panic!("{reply}")).iter().map(gpu).collect()
}

fn states(node: &Node) -> Vec<String> {
    gpus(node).into_iter().map(|(state, _)| state).collect()
}

/// Why a job waits.
fn reason(node: &Node, job: u64) -> String {
    let find = || Some(node.job(job)["reason"].as_str()?.to_owned()).filter(|reason| !reason.is_empty());
    wait_for("a reason", find)
}

#[test]
fn jobs_hold_gpus_of_their_own_and_see_no_others() {
    let node = Node::with_gpus(&["GPU-a 0", "GPU-b 0", "GPU-c 0"], "");
    let script = "echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES; while ! [ -e end ]; do sleep 0.02; done";
    let submit = |gpus: &str| node.submit(&["--gpus", gpus, "--nproc", gpus, "--", "sh", "-c", script]);
    let jobs = [submit("2"), submit("1"), submit("2")];
    for job in &jobs[..2] {
        node.wait(*job, "running");
    }
    assert_eq!(node.job(jobs[0])["gpus"], serde_json::json!(["GPU-a", "GPU-b"]));
    assert_eq!(reason(&node, jobs[2]), "waits for GPUs: 2 wanted, 0 free");
    let held = [("held".to_owned(), jobs[0]), ("held".to_owned(), jobs[0]), ("held".to_owned(), jobs[1])];
    assert_eq!(gpus(&node), held);
    node.write("end", "");
    for job in jobs {
        node.wait(job, "done");
    }
    let said = |job: u64, rank: &str| node.run(&["logs", &job.to_string(), "--rank", rank]).stdout;
    assert_eq!(
        (said(jobs[0], "0"), said(jobs[0], "1")),
        ("0 GPU-a,GPU-b\n".into(), "1 GPU-a,GPU-b\n".into())
    );
    assert_eq!(said(jobs[1], "0"), "0 GPU-c\n");
    assert_eq!(states(&node), ["free", "free", "free"]);
}

#[test]
fn gpus_that_are_sick_drained_used_or_left_to_others_get_no_job() {
    let mut stranger = Running::start(std::process::Command::new("sleep").arg("1000"));
    let used = format!("GPU-c 0 {}", stranger.pid());
    let gpus = ["GPU-a 2", "GPU-b 0", used.as_str(), "GPU-d 0", "GPU-e 0"];
    let node = Node::with_gpus(&gpus, "leave_gpus = [\"GPU-d\"]");
    assert_eq!(node.run(&["drain", "--gpu", "1", "--reason", "fan"]).code, 0);
    assert_eq!(states(&node), ["sick", "drained", "foreign", "drained", "free"]);
    let one = node.submit(&["--gpus", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]);
    node.wait(one, "done");
    assert_eq!(node.run(&["logs", &one.to_string()]).stdout, "GPU-e\n");
    let three = node.submit(&["--gpus", "3", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]);
    assert_eq!(reason(&node, three), "waits for GPUs: 3 wanted, 1 free");
    assert_eq!(node.run(&["drain", "--gpu", "1", "--undo"]).code, 0);
    assert!(stranger.runs());
    drop(stranger);
    node.wait(three, "done");
    assert_eq!(node.run(&["logs", &three.to_string(), "--rank", "0"]).stdout, "GPU-b,GPU-c,GPU-e\n");
}

#[test]
fn a_gpu_that_falls_ill_under_a_job_is_shown_and_gets_no_other() {
    let node = Node::with_gpus(&["GPU-a 0"], "");
    let job = node.submit(&["--gpus", "1", "--", "sh", "-c", "while ! [ -e end ]; do sleep 0.02; done"]);
    node.wait(job, "running");
    node.set_gpus(&["GPU-a 7"]);
    let ill = || node.run(&["node"]).stdout.contains("7 uncorrected ECC errors").then_some(());
    wait_for("the errors", ill);
    assert_eq!(gpus(&node), [("held".to_owned(), job)]);
    node.write("end", "");
    node.wait(job, "done");
    assert_eq!(states(&node), ["sick"]);
    let next = node.submit(&["--gpus", "1", "--", "true"]);
    assert_eq!(reason(&node, next), "waits for GPUs: 1 wanted, 0 free");
}

#[test]
fn more_gpus_than_the_node_has_are_refused() {
    let node = Node::with_gpus(&["GPU-a 0", "GPU-b 0"], "");
    let run = node.run(&["submit", "--gpus", "3", "--", "true"]);
    assert!(run.code != 0 && run.stderr.contains("can get at most 2 here"), "{}", run.stderr);
}
