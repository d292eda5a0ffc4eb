//! Examinations of idle GPUs. The GPUs are simulated, as are the workers that measure them.

use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use serde_json::{Value, json};
use xlaunch_tests::{Node, Process, is_alive, wait_for};

xlaunch_harness::tests! {
    gpu_that_fails_its_examination_is_drained_and_others_are_used_again,
    hanging_examination_ends_at_its_deadline,
    restarted_daemon_frees_the_gpus_of_an_examination;
}

/// Writes simulated workers, which run this shell script, then report plausible results.
fn write_worker(node: &Node, script: &str) {
    let program = env!("CARGO_BIN_EXE_fake_worker");
    let text = format!("#!/bin/sh\n{script}\nFAKE_WORKER=bench exec {program}\n");
    std::fs::write(node.examining_worker(), text).unwrap();
    std::fs::set_permissions(node.examining_worker(), PermissionsExt::from_mode(0o755)).unwrap();
}

/// Returns the states of the GPUs, with reasons.
fn gpus(node: &Node) -> Vec<(String, String)> {
    let reply = node.json(&["node"]);
    let text = |gpu: &Value, key: &str| gpu[key].as_str().unwrap_or_default().to_owned();
    reply["gpus"].as_array().unwrap().iter().map(|gpu| (text(gpu, "state"), text(gpu, "reason"))).collect()
}

fn states(node: &Node) -> Vec<String> {
    gpus(node).into_iter().map(|(state, _)| state).collect()
}

/// Submits a job that prints its GPUs.
fn job_on(node: &Node, gpus: &str) -> u64 {
    node.submit(&["--gpus", gpus, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"])
}

/// Starts an examination whose workers hang. Returns it with the process id of the first worker.
fn hanging_examination(node: &Node, args: &[&str]) -> (Process, u32) {
    let pid_file = node.path().join("pid");
    write_worker(node, &format!("echo $$ > {}; exec sleep 1000", pid_file.display()));
    let examination = Process::spawn(&mut node.client(&[&["doctor", "--daemon"], args].concat()));
    let worker = wait_for("the worker to start", || {
        std::fs::read_to_string(&pid_file).ok()?.strip_suffix('\n')?.parse().ok()
    });
    (examination, worker)
}

fn assert_ended(worker: u32) {
    wait_for("the worker to be killed", || (!is_alive(worker)).then_some(()));
}

fn gpu_that_fails_its_examination_is_drained_and_others_are_used_again() {
    let node = Node::with_gpus(&["GPU-a 0", "GPU-b 0", "GPU-c 0", "GPU-d 3"], "");
    let holds = node.submit(&["--gpus", "1", "--", "sh", "-c", "while ! [ -e end ]; do sleep 0.02; done"]);
    node.wait(holds, "running");
    write_worker(&node, "if [ $CUDA_VISIBLE_DEVICES = GPU-b ]; then echo no answer >&2; exit 76; fi");
    let run = node.run(&["doctor", "--daemon", "--json"]);
    assert_eq!(run.code, 76, "{}{}", run.stdout, run.stderr);
    assert!(run.stderr.contains("examining GPU 1, 2;"), "{}", run.stderr);
    let found: Value = serde_json::from_str(&run.stdout).unwrap();
    let result = |index: usize| {
        let gpu = &found["gpus"][index];
        (gpu["state"].as_str().unwrap(), gpu["reason"].as_str().unwrap())
    };
    assert_eq!((result(0), result(2)), (("skipped", "job 1 runs on it"), ("passed", "")), "{found:#}");
    assert_eq!((result(3).0, result(1).0, &found["healthy"]), ("skipped", "failed", &json!(false)));
    assert!(result(1).1.starts_with("doctor: worker: a worker failed on it: "), "{found:#}");
    let shown = gpus(&node);
    assert_eq!(shown[1], ("drained".to_owned(), result(1).1.to_owned()));
    assert_eq!(states(&node), ["held", "drained", "free", "sick"]);
    let next = job_on(&node, "1");
    node.wait(next, "done");
    assert_eq!(node.run(&["logs", &next.to_string()]).stdout, "GPU-c\n");

    // A repaired GPU passes, but stays drained until the administrator resumes it.
    write_worker(&node, "");
    let run = node.run(&["doctor", "--daemon", "--gpu", "1", "--gpu", "GPU-c"]);
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    for line in ["passed   GPU 1 (GPU-b)", "passed   GPU 2 (GPU-c)", "ok       all-reduce of 2 GPUs: "] {
        assert!(run.stdout.contains(line), "{line} in {}", run.stdout);
    }
    assert_eq!(states(&node)[1], "drained");
    assert_eq!(node.run(&["drain", "--gpu", "1", "--undo"]).code, 0);
    let both = job_on(&node, "2");
    node.wait(both, "done");
    node.write("end", "");
    node.wait(holds, "done");
}

fn hanging_examination_ends_at_its_deadline() {
    let node = Node::with_gpus(&["GPU-a 0", "GPU-b 0"], "");
    let (examination, worker) = hanging_examination(&node, &["--gpu", "0", "--timeout", "3s"]);
    assert_eq!(states(&node), ["examined", "free"]);
    let again = node.run(&["doctor", "--daemon"]);
    assert!(again.code == 75 && again.stderr.contains("examined already"), "{}", again.stderr);
    let waits = job_on(&node, "2");
    let reason = wait_for("the job to wait", || {
        Some(node.job(waits)["reason"].as_str()?.to_owned()).filter(|reason| !reason.is_empty())
    });
    assert!(reason.contains("2 wanted, 1 free"), "{reason}");
    let run = examination.wait();
    assert_eq!(run.code, 76, "{}{}", run.stdout, run.stderr);
    let expected = "failed   GPU 0 (GPU-a): drained, doctor: timeout: no result within 3 s\n";
    assert!(run.stdout.ends_with(expected), "{}", run.stdout);
    assert_ended(worker);
    assert_eq!(gpus(&node)[0], ("drained".to_owned(), "doctor: timeout: no result within 3 s".to_owned()));
    assert_eq!(node.run(&["drain", "--gpu", "0", "--undo"]).code, 0);
    node.wait(waits, "done");
}

fn restarted_daemon_frees_the_gpus_of_an_examination() {
    let mut node = Node::with_gpus(&["GPU-a 0", "GPU-b 0"], "");
    for signal in [Signal::KILL, Signal::TERM] {
        let _ = std::fs::remove_file(node.path().join("pid"));
        let (examination, worker) = hanging_examination(&node, &[]);
        let waits = job_on(&node, "2");
        assert_eq!(states(&node), ["examined", "examined"]);
        node.stop_daemon(signal);
        assert_ended(worker);
        let run = examination.wait();
        assert!(run.code != 0 && run.stderr.contains("daemon"), "{}", run.stderr);
        node.start_daemon();
        node.wait(waits, "done");
        assert_eq!(states(&node), ["free", "free"]);
    }
}
