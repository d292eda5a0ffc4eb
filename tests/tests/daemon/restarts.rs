//! Jobs survive restarts and crashes of the daemon. A job whose result cannot be known is reported as lost.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Node, Process, is_alive, send_signal, wait_for};

xlaunch_harness::tests! {
    past_restarts_of_a_job_survive_restart_of_the_daemon,
    training_is_not_disturbed_by_kills_of_the_daemon,
    hundred_daemon_restarts_neither_lose_nor_repeat_jobs,
    job_that_ends_without_a_daemon_keeps_its_result_and_end,
    killed_agent_leaves_lost_job_and_no_process,
    agent_terminated_from_outside_is_not_cancelled_and_its_job_is_requeued,
    job_of_an_earlier_boot_is_lost_and_no_process_is_signalled,
    followed_log_waits_for_the_job_and_goes_on_after_a_restart_of_the_daemon;
}

/// Returns attempt, rank and cause of each restart of a job.
fn past_restarts(node: &Node, job: u64) -> Vec<(u64, u64, String)> {
    let job = node.job(job);
    let restarts = job["status"]["past_restarts"].as_array().into_iter().flatten();
    let restart = |restart: &Value| {
        let number = |key: &str| restart[key].as_u64().unwrap_or(u64::MAX);
        (number("attempt"), number("rank"), restart["cause"].as_str().unwrap_or_default().to_owned())
    };
    restarts.map(restart).collect()
}

fn past_restarts_of_a_job_survive_restart_of_the_daemon() {
    let mut node = Node::new("");
    let script = "if [ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && [ $RANK = 1 ]; then exit 7; fi; \
                  while ! [ -e end ]; do sleep 0.02; done; exit $RANK";
    let job = node.submit(&["--nproc", "2", "--max-restarts", "2", "--", "sh", "-c", script]);
    let expected = [(0, 1, "exit code 7".to_owned()), (1, 1, "exit code 7".to_owned())];
    let found =
        wait_for("two restarts", || Some(past_restarts(&node, job)).filter(|restarts| restarts.len() == 2));
    assert_eq!(found, expected);
    let is_logged = |node: &Node, attempt: u64| {
        node.daemon()
            .stderr()
            .lines()
            .any(|line| line.contains(&format!("attempt={attempt}")) && line.contains("rank=1"))
    };
    for attempt in [0, 1] {
        wait_for("the restart in the daemon's log", || is_logged(&node, attempt).then_some(()));
    }
    node.kill_and_restart_daemon();
    assert_eq!(node.job(job)["state"], "running", "the first answer of the new daemon");
    let found = wait_for("the job's status", || {
        Some(past_restarts(&node, job)).filter(|restarts| !restarts.is_empty())
    });
    assert_eq!(found, expected);
    node.write("end", "");
    node.wait(job, "failed");
    wait_for("the failure in the daemon's log", || is_logged(&node, 2).then_some(()));
    assert!(!is_logged(&node, 1), "an earlier restart is logged again: {}", node.daemon().stderr());
    node.kill_and_restart_daemon();
    assert_eq!(past_restarts(&node, job), expected);
}

/// Returns steps and losses of the newest run.
fn metrics(node: &Node) -> Vec<(u64, f64)> {
    let lines = node.lines("runs/tiny/latest/metrics.jsonl");
    let read = |line: &String| {
        let line: Value = serde_json::from_str(line).unwrap_or_default();
        (line["_step"].as_u64().unwrap_or(u64::MAX), line["train/loss"].as_f64().unwrap_or(f64::NAN))
    };
    lines.iter().map(read).collect()
}

fn training_is_not_disturbed_by_kills_of_the_daemon() {
    let undisturbed = Node::new("");
    let config = undisturbed.write_tiny_job(60);
    undisturbed.wait(undisturbed.submit(&[&config]), "done");
    let mut node = Node::new("");
    let config = node.write_tiny_job(60);
    let job = node.submit(&[&config]);
    for step in [5, 20, 40] {
        wait_for("steps", || (metrics(&node).len() > step).then_some(()));
        let agents = node.agents();
        node.kill_and_restart_daemon();
        // An agent may have ended by itself; the daemon then records the end of the job a moment later.
        if !agents.iter().all(|agent| is_alive(*agent)) {
            node.wait(job, "done");
        }
        let state = node.job(job)["state"].clone();
        assert!(["starting", "running", "done"].iter().any(|known| state == *known), "{state}");
    }
    assert_eq!(node.wait(job, "done")["exit_code"], 0);
    assert_eq!(metrics(&node), metrics(&undisturbed));
    node.kill_and_restart_daemon();
    let done = node.job(job);
    let steps = done["history"].as_array().unwrap().iter().filter_map(|point| point["step"].as_u64());
    assert_eq!(steps.collect::<Vec<u64>>(), (1..=60).collect::<Vec<u64>>());
    assert_eq!(metrics(&node).len(), 60);
    assert_eq!(node.agents(), [0; 0]);
}

fn hundred_daemon_restarts_neither_lose_nor_repeat_jobs() {
    let mut node = Node::new("");
    let mut jobs = Vec::new();
    for round in 0..100_u64 {
        jobs.push(node.submit_shell("echo $$ >> ran; sleep 0.1"));
        // Anywhere between the submission and the end of the job.
        std::thread::sleep(Duration::from_millis(round * 7 % 40));
        node.stop_daemon(if round % 3 == 0 { Signal::TERM } else { Signal::KILL });
        node.start_daemon();
    }
    for job in &jobs {
        let done = node.wait(*job, "done");
        assert_eq!(done["exit_code"], 0, "{done}");
    }
    assert_eq!(node.lines("ran").len(), jobs.len());
}

/// Tests jobs whose time limit passes after their end, before the next daemon is started or continued.
fn job_that_ends_without_a_daemon_keeps_its_result_and_end() {
    let mut node = Node::new("");
    for (signal, file) in [(Signal::KILL, "killed"), (Signal::STOP, "suspended")] {
        let script = format!("while ! [ -e {file} ]; do sleep 0.02; done");
        let job = node.submit(&["--time", "8s", "--", "sh", "-c", &script]);
        let next = node.submit(&["--after", &job.to_string(), "--", "true"]);
        node.wait(job, "running");
        if signal == Signal::KILL {
            drop(node.stop_daemon(signal))
        } else {
            node.daemon().signal(signal)
        }
        node.write(file, "");
        std::thread::sleep(Duration::from_millis(8200));
        if signal == Signal::KILL {
            node.start_daemon()
        } else {
            node.daemon().signal(Signal::CONT)
        }
        let done = node.wait(job, "done");
        let time = |key: &str| done[key].as_u64().unwrap();
        assert_eq!(done["exit_code"], 0, "{done}");
        assert!(time("ended_unix_ms") - time("started_unix_ms") < 8000, "{done}");
        node.wait(next, "done");
    }
}

fn killed_agent_leaves_lost_job_and_no_process() {
    let node = Node::new("");
    let job = node.submit_shell("echo $$ > pid; exec sleep 1000");
    let worker = wait_for("pid", || node.lines("pid").first().and_then(|line| line.parse().ok()));
    node.wait(job, "running");
    node.agents().into_iter().for_each(|agent| send_signal(agent, Signal::KILL));
    let lost = node.wait(job, "lost");
    assert_eq!(lost["exit_code"], Value::Null, "{lost}");
    wait_for("the worker to be killed", || (!is_alive(worker)).then_some(()));
}

/// Tests what systemd does to the agents in a service that it stops, and to all of them when the node shuts down.
fn agent_terminated_from_outside_is_not_cancelled_and_its_job_is_requeued() {
    let node = Node::new("");
    let script = "echo up >> starts; exec sleep 1000";
    let started = |count| wait_for("a start", || (node.lines("starts").len() == count).then_some(()));
    let terminate = || node.agents().into_iter().for_each(|agent| send_signal(agent, Signal::TERM));
    let job = node.submit_shell(script);
    started(1);
    terminate();
    let failed = node.wait(job, "failed");
    assert_eq!(failed["exit_code"], 143, "{failed}");
    assert!(failed["reason"].as_str().unwrap().contains("not by the daemon"), "{failed}");
    let again = node.submit(&["--requeue", "--", "sh", "-c", script]);
    started(2);
    terminate();
    started(3);
    assert_eq!(node.job(again)["requeues"], 1);
    node.run(&["cancel", &again.to_string()]);
    node.wait(again, "cancelled");
}

fn job_of_an_earlier_boot_is_lost_and_no_process_is_signalled() {
    let mut node = Node::new("");
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let agents = node.agents();
    node.stop_daemon(Signal::KILL);
    // Simulates a reboot of the system: the journal names another boot id. Lines start with a CRC of the rest.
    let path = node.state_dir().join("journal");
    let journal = std::fs::read_to_string(&path).unwrap();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let mut lines = String::new();
    for line in journal.replace(boot_id.trim(), "another").lines() {
        let record = &line[9..];
        lines += &format!("{:08x} {record}\n", crc32(record.as_bytes()));
    }
    std::fs::write(&path, lines).unwrap();
    node.start_daemon();
    let lost = node.wait(job, "lost");
    assert!(lost["reason"].as_str().unwrap().contains("rebooted"), "{lost}");
    assert!(agents.iter().all(|agent| is_alive(*agent)));
}

/// Computes the CRC-32 (IEEE), bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

fn followed_log_waits_for_the_job_and_goes_on_after_a_restart_of_the_daemon() {
    let mut node = Node::new("cpu_workers = 1");
    let first = node.submit_shell("while ! [ -e begin ]; do sleep 0.02; done");
    let script = "echo zero; echo one; while ! [ -e two ]; do sleep 0.02; done; \
                  echo two; while ! [ -e end ]; do sleep 0.02; done; echo three";
    let job = node.submit_shell(script);
    let text = job.to_string();
    let mut all = Process::spawn(&mut node.client(&["logs", "--follow", &text]));
    node.wait(first, "running");
    node.write("begin", "");
    wait_for("the first line", || all.stdout().contains("one").then_some(()));
    let mut last = Process::spawn(&mut node.client(&["logs", "--follow", "--tail", "1", &text]));
    wait_for("the last line", || last.stdout().contains("one").then_some(()));
    node.stop_daemon(Signal::KILL);
    node.write("two", "");
    std::thread::sleep(Duration::from_millis(300));
    assert!(all.is_running() && last.is_running());
    node.start_daemon();
    wait_for("the second line", || all.stdout().contains("two").then_some(()));
    node.write("end", "");
    node.wait(job, "done");
    assert_eq!(all.wait().stdout, "zero\none\ntwo\nthree\n");
    assert_eq!(last.wait().stdout, "one\ntwo\nthree\n", "it goes on after what it began with");
}
