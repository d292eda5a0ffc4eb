//! Times at which jobs run: holds, time limits, dependencies, arrays, and requeueing of lost jobs that requested it.

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Node, send_signal, wait_for};

xlaunch_harness::tests! {
    held_job_starts_when_it_is_released,
    job_at_its_time_limit_gets_the_signal_then_is_stopped,
    time_limit_that_passes_while_the_daemon_is_down_is_enforced,
    dependent_job_starts_or_is_cancelled_by_how_the_other_ends,
    array_runs_a_bounded_number_of_its_jobs_at_a_time,
    lost_job_is_requeued_also_if_the_daemon_was_killed,
    requeued_training_job_resumes_from_its_newest_checkpoint;
}

fn held_job_starts_when_it_is_released() {
    let node = Node::new("");
    let job = node.submit(&["--hold", "--", "sh", "-c", "touch ran"]);
    let held = node.job(job);
    assert!(held["held"] == true && held["state"] == "queued", "{held}");
    assert!(held["reason"].as_str().unwrap().starts_with("held by user "), "{held}");
    let later = node.submit_shell("true");
    node.wait(later, "done");
    let (text, job_text) = ("1-2", job.to_string());
    let some_ended = node.run(&["hold", text]);
    assert!(some_ended.code == 2 && some_ended.stderr.contains("job 2 has ended"), "{}", some_ended.stderr);
    assert_eq!(node.json(&["reprioritise", &job_text, "--priority", "-7"])[0]["priority"], -7);
    assert!(node.lines("ran").is_empty() && !node.path().join("ran").exists());
    assert_eq!(node.run(&["release", "--all"]).stdout, format!("job {job} is released\n"));
    node.wait(job, "done");
    assert!(node.path().join("ran").exists());
    let none = node.run(&["cancel", "--all"]);
    assert!(none.code == 0 && none.stderr.contains("none of your own jobs"), "{}", none.stderr);
    let array = node.run(&["submit", "--hold", "--array", "0-98:2", "--", "true"]);
    assert_eq!(array.stdout, "jobs 3-52\n", "{}", array.stderr);
    let cancelled = node.run(&["cancel", "--all"]).stdout;
    let expected = |job: u64| format!("job {job} ");
    let lines: Vec<&str> = cancelled.lines().collect();
    let in_order = lines.iter().zip(3..).all(|(line, job)| line.starts_with(&expected(job)));
    assert!(lines.len() == 50 && in_order, "{cancelled}");
}

/// Writes `ready`, then writes each signal that it receives to `signals`, and exits with 0 at SIGTERM.
const TRAPS: &str = "trap 'echo USR1 >> signals' USR1; trap 'echo TERM >> signals; exit 0' TERM; \
                     touch ready; while :; do sleep 0.05; done";

fn job_at_its_time_limit_gets_the_signal_then_is_stopped() {
    let node = Node::new("max_time = \"1h\"");
    let too_long = node.run(&["submit", "--time", "2h", "--", "true"]);
    assert!(too_long.code == 2 && too_long.stderr.contains("jobs.max_time"), "{}", too_long.stderr);
    let no_time = node.run(&["submit", "--time", "soon", "--", "true"]);
    assert!(no_time.code == 2 && no_time.stderr.contains("D-HH:MM:SS"), "{}", no_time.stderr);
    let job = node.submit(&["--time", "6s", "--signal", "USR1@4", "--", "sh", "-c", TRAPS]);
    node.wait(job, "running");
    assert_eq!(node.job(job)["time_limit_seconds"], 6);
    let failed = node.wait(job, "failed");
    assert_eq!(failed["reason"], "time limit of 6s reached", "{failed}");
    assert_eq!(node.lines("signals"), ["USR1", "TERM"]);
    let defaulted = node.submit_shell("true");
    assert_eq!(node.job(defaulted)["time_limit_seconds"], 3600);
}

fn time_limit_that_passes_while_the_daemon_is_down_is_enforced() {
    let mut node = Node::new("");
    let warned = node.submit(&["--time", "1h", "--signal", "USR1@3595", "--", "sh", "-c", TRAPS]);
    node.wait(warned, "running");
    wait_for("the warning", || (node.lines("signals") == ["USR1"]).then_some(()));
    let late = node.submit(&["--time", "2s", "--", "sh", "-c", "trap '' TERM; exec sleep 1000"]);
    node.wait(late, "running");
    node.stop_daemon(Signal::KILL);
    std::thread::sleep(std::time::Duration::from_secs(3));
    node.start_daemon();
    let stopping = node.wait(late, "stopping");
    assert_eq!(stopping["reason"], "time limit of 2s reached", "{stopping}");
    node.kill_and_restart_daemon();
    assert_eq!(node.run(&["cancel", "--force", &late.to_string()]).code, 0);
    wait_for("its end", || (!node.job(late)["ended_unix_ms"].is_null()).then_some(()));
    assert_eq!(node.job(warned)["state"], "running");
    assert_eq!(node.lines("signals"), ["USR1"], "warned again by the next daemon");
    node.run(&["cancel", &warned.to_string()]);
}

fn dependent_job_starts_or_is_cancelled_by_how_the_other_ends() {
    let node = Node::new("");
    let first = node.submit_shell("while ! [ -e go ]; do sleep 0.05; done; exit 3");
    let after = |condition: &str| {
        node.submit(&[
            "--after",
            &format!("{first}:{condition}"),
            "--",
            "sh",
            "-c",
            "echo $0 >> ran",
            condition,
        ])
    };
    let (ok, any, fail) = (after("ok"), after("any"), after("fail"));
    let next = node.submit(&["--after", &ok.to_string(), "--", "true"]);
    assert_eq!(node.job(any)["reason"], format!("waits for job {first} to end"));
    let unknown = node.run(&["submit", "--after", "99", "--", "true"]);
    assert!(unknown.stderr.contains("there is no job 99"), "{}", unknown.stderr);
    node.write("go", "");
    node.wait(any, "done");
    node.wait(fail, "done");
    let cancelled = node.wait(ok, "cancelled");
    assert_eq!(cancelled["reason"], format!("dependency not met: job {first} did not succeed"));
    assert_eq!(
        node.wait(next, "cancelled")["reason"],
        format!("dependency not met: job {ok} did not succeed")
    );
    let mut ran = node.lines("ran");
    ran.sort();
    assert_eq!(ran, ["any", "fail"]);
}

fn array_runs_a_bounded_number_of_its_jobs_at_a_time() {
    let mut node = Node::new("cpu_workers = 8");
    let script =
        "echo $XLAUNCH_ARRAY_JOB $XLAUNCH_ARRAY_INDEX >> ran; while ! [ -e go ]; do sleep 0.05; done";
    let submitted = node.run(&["submit", "--array", "1,5-7%2", "--", "sh", "-c", script]);
    assert_eq!(submitted.stdout, "jobs 1-4\n", "{}", submitted.stderr);
    wait_for("two jobs", || (node.lines("ran").len() == 2).then_some(()));
    assert_eq!(node.job(4)["reason"], "2 of at most 2 jobs of its array run");
    assert!(node.state_dir().join("arrays/1.json").exists());
    node.kill_and_restart_daemon();
    assert_eq!(node.lines("ran").len(), 2);
    assert_eq!(node.run(&["cancel", "4-4"]).code, 0);
    node.write("go", "");
    for job in 1..=3 {
        node.wait(job, "done");
    }
    let mut ran = node.lines("ran");
    ran.sort();
    assert_eq!(ran, ["1 1", "1 5", "1 6"]);
    let array = node.job(3);
    assert_eq!((&array["array_job"], &array["array_index"]), (&1.into(), &6.into()));
    wait_for("its submission to be removed", || {
        (!node.state_dir().join("arrays/1.json").exists()).then_some(())
    });
}

fn lost_job_is_requeued_also_if_the_daemon_was_killed() {
    let mut node = Node::new("");
    let script = "echo $$ >> ran; while ! [ -e go ]; do sleep 0.05; done";
    let job = node.submit(&["--requeue", "--", "sh", "-c", script]);
    for starts in 1..=2 {
        wait_for("the job to run", || (node.lines("ran").len() == starts).then_some(()));
        node.wait(job, "running");
        let agents = node.agents();
        if starts == 2 {
            node.stop_daemon(Signal::KILL);
        }
        agents.into_iter().for_each(|agent| send_signal(agent, Signal::KILL));
        if starts == 2 {
            node.start_daemon();
        }
    }
    wait_for("the third start", || (node.lines("ran").len() == 3).then_some(()));
    node.write("go", "");
    let done = node.wait(job, "done");
    assert_eq!(done["requeues"], 2, "{done}");
    assert!(node.run(&["status", &job.to_string()]).stdout.contains("requeued 2 times"));
}

fn requeued_training_job_resumes_from_its_newest_checkpoint() {
    let node = Node::new("");
    let config = node.write_tiny_job(400);
    let flags = ["--set", "checkpoint.every=10"];
    // An earlier run of the same name does not belong to the lineage of the job.
    node.wait(node.submit(&[&config, "--set", "train.steps=5", flags[0], flags[1]]), "done");
    let job = node.submit(&["--requeue", &config, flags[0], flags[1]]);
    let step = |job: &Value| job["status"]["step"].as_u64().unwrap_or(0);
    wait_for("a checkpoint", || (step(&node.job(job)) > 20).then_some(()));
    node.agents().into_iter().for_each(|agent| send_signal(agent, Signal::KILL));
    let done = node.wait(job, "done");
    assert_eq!(done["requeues"], 1, "{done}");
    let log = node.state_dir().join(format!("jobs/{job}/agent/agent.log"));
    let log = std::fs::read_to_string(log).unwrap();
    let resumed = done["history"].as_array().unwrap().first().unwrap()["step"].as_u64().unwrap();
    assert!(resumed > 10, "resumed at step {resumed}\n{log}");
}
