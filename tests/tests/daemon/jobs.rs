//! Jobs of a node: submission, order, output, cancellation, and retention.

use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{
    Node, Process, in_shell, is_alive, read_state, send_signal, spawn_daemon, wait_for, xlaunch_path,
};

xlaunch_harness::tests! {
    job_runs_in_directory_and_environment_of_its_submission,
    submit_wait_returns_exit_code_and_report,
    changed_name_of_a_job_is_reported,
    queued_jobs_start_by_priority_and_order,
    job_that_starts_from_the_weights_of_another_takes_its_model_and_refuses_contradictions,
    checkpoint_and_stacks_of_a_training_job_are_taken_on_request,
    cancelled_training_job_without_checkpoint_is_cancelled_with_exit_code_75,
    cancel_kills_all_processes_of_the_job,
    forced_cancel_kills_a_job_that_ignores_sigterm,
    second_daemon_is_refused_and_invalid_configuration_is_reported,
    jobs_are_refused_if_the_state_directory_is_too_long_for_sockets,
    job_that_cannot_start_says_why,
    oldest_finished_jobs_are_forgotten,
    all_jobs_are_listed_however_long_their_command_lines_are,
    output_beyond_the_limit_is_cut_with_a_note,
    commands_that_are_no_longer_accepted_stay_in_the_queue;
}

fn job_runs_in_directory_and_environment_of_its_submission() {
    let node = Node::new("");
    // A failure stops the other rank, so each rank waits for the other's output.
    let script = "echo hello $RANK $GREETING; echo oops >&2; pwd > where; umask > mask; touch said$RANK; \
                  while ! [ -e said0 -a -e said1 ]; do sleep 0.02; done; exit 3";
    let mut submit = node.client(&["submit", "--name", "greet", "--nproc", "2", "--", "sh", "-c", script]);
    let run = Process::spawn(&mut in_shell("umask 027", submit.env("GREETING", "world"))).wait();
    assert_eq!(run.stdout, "job 1\n", "{}", run.stderr);
    let job = node.wait(1, "failed");
    let found = (&job["name"], &job["exit_code"], &job["workers"]);
    assert_eq!(found, (&"greet".into(), &3.into(), &Value::Null));
    assert!(job["report"].as_str().unwrap().contains("exit code 3"), "{job}");
    assert_eq!(node.run(&["logs", "1", "--rank", "1"]).stdout, "hello 1 world\n");
    assert_eq!(node.run(&["logs", "1", "--stderr"]).stdout, "oops\n");
    assert_eq!(node.lines("where"), [node.path().display().to_string()]);
    assert_eq!(node.lines("mask"), ["0027"]);
    assert!(node.run(&["jobs", "--all"]).stdout.contains("greet"));
}

fn submit_wait_returns_exit_code_and_report() {
    let node = Node::new("");
    let wait = |script: &str| node.run(&["submit", "--wait", "--", "sh", "-c", script]);
    assert_eq!(wait("sleep 0.2").code, 0);
    let failed = wait("exit 9");
    assert!(failed.code == 9 && failed.reports_exit_code(9), "{}", failed.stderr);
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let waiting = Process::spawn(&mut node.client(&["submit", "--wait", "--", "sleep", "1000"]));
        waiting.wait_for_stderr("running");
        waiting.signal(signal);
        let waited = waiting.wait();
        let job: u64 = waited.stdout.trim_start_matches("job ").trim().parse().unwrap();
        let goes_on = format!("job {job} goes on; `xlaunch cancel {job}` ends it");
        assert!(waited.code == code && waited.stderr.contains(&goes_on), "{}", waited.stderr);
        assert_eq!(node.job(job)["state"], "running");
        assert_eq!(node.run(&["cancel", "--force", &job.to_string()]).code, 0);
    }
}

fn changed_name_of_a_job_is_reported() {
    let node = Node::new("");
    let renamed = node.run(&["submit", "--hold", "--name", "\u{e9}t\u{e9} 1", "--", "true"]);
    assert!(renamed.stderr.contains("the job is named _t__1: "), "{}", renamed.stderr);
    let kept = node.run(&["submit", "--hold", "--name", "v1.2_b-3", "--", "true"]);
    assert!(!kept.stderr.contains("named"), "{}", kept.stderr);
}

fn queued_jobs_start_by_priority_and_order() {
    let node = Node::new("");
    node.configure("cpu_workers = 1\nmax_per_user = 3");
    node.daemon().signal(Signal::HUP);
    node.daemon().wait_for_stderr("reloaded");
    let first = node.submit_shell("while ! [ -e go ]; do sleep 0.05; done; echo first >> order");
    let low = node.submit(&["--priority", "-5", "--", "sh", "-c", "echo low >> order"]);
    let next = node.submit_shell("echo next >> order");
    node.wait(first, "running");
    assert_eq!(node.job(next)["queue_position"], 1);
    assert_eq!(node.job(low)["queue_position"], 2);
    let over_limit = node.run(&["submit", "--", "true"]);
    assert!(over_limit.code != 0 && over_limit.stderr.contains('3'), "{}", over_limit.stderr);
    let too_large = node.run(&["submit", "--nproc", "2", "--", "true"]);
    assert!(too_large.code == 2 && too_large.stderr.contains("2 CPU workers"), "{}", too_large.stderr);
    node.write("go", "");
    node.wait(low, "done");
    assert_eq!(node.lines("order"), ["first", "next", "low"]);
}

fn job_that_starts_from_the_weights_of_another_takes_its_model_and_refuses_contradictions() {
    let node = Node::new("");
    let first = node.submit(&[&node.write_tiny_job(2), "--nproc", "1"]);
    node.wait(first, "done");
    let runs = std::fs::read_dir(node.path().join("runs")).unwrap().next().unwrap().unwrap().path();
    let run = std::fs::canonicalize(runs.join("latest")).unwrap();
    let weights = |run: &Path, step: u64| {
        let mut state = read_state(&run.join(format!("checkpoints/step-{step:08}")));
        state.retain(|name, _| !name.starts_with("m.") && !name.starts_with("v."));
        state
    };
    // There is no `[model]`, and the step changes no weight. The path is relative to the submitter's directory.
    let init = run.strip_prefix(std::fs::canonicalize(node.path()).unwrap()).unwrap().display().to_string();
    let config = format!(
        "[data]\ntrain = [\"text.txt\"]\n[engine]\ndevice = \"cpu\"\n[checkpoint]\n\
         init = \"{init}\"\n[train]\nsteps = 1\n\
         warmup = 0\nlr = 1.2e-38\nweight_decay = 0\nbatch = 1\neval_every = 0\nsample = 0\n"
    );
    node.write("init.toml", &config);
    let job = node.submit(&["init.toml", "--nproc", "1", "--set", "job.name=second"]);
    node.wait(job, "done");
    let second = node.path().join("runs/second/latest");
    assert!(weights(&second, 1) == weights(&run, 2));
    let refused = node.run(&["submit", "init.toml", "--set", "model.layers=7"]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(
        refused.stderr.contains("model.layers=7: 7 contradicts checkpoint.init: it is 4 in "),
        "{}",
        refused.stderr
    );
    node.write("init.toml", &config.replace(&init, "nowhere"));
    let missing = node.submit(&["init.toml"]);
    let failed = node.wait(missing, "failed");
    assert!(failed["exit_code"] == 65 && failed.to_string().contains("nowhere"), "{failed}");
}

fn checkpoint_and_stacks_of_a_training_job_are_taken_on_request() {
    let node = Node::new("");
    let job = node.submit(&[&node.write_tiny_job(1_000_000), "--nproc", "2"]).to_string();
    let saved = wait_for("a checkpoint", || {
        let saved = node.run(&["checkpoint", &job]);
        let waits = ["has not started", "not training yet", "does not answer"];
        assert!(saved.code == 0 || waits.iter().any(|text| saved.stderr.contains(text)), "{}", saved.stderr);
        (saved.code == 0).then_some(saved.stdout)
    });
    let stacks = node.run(&["stacks", &job, "--rank", "1"]);
    let shown = stacks.stdout.starts_with("rank 1\n") && stacks.stdout.contains(" loader ");
    assert!(shown, "{} {}", stacks.stdout, stacks.stderr);
    let path = std::path::Path::new(saved.trim());
    assert!(path.is_absolute() && path.join("manifest.json").exists(), "{saved}");
    assert_eq!(node.run(&["cancel", &job]).code, 0);
    let ended = node.wait(1, "cancelled");
    assert_eq!(ended["exit_code"], 143, "{ended}");
    let refused = node.run(&["checkpoint", &job]);
    assert!(refused.code != 0 && refused.stderr.contains("job 1 has ended"), "{}", refused.stderr);
}

fn cancelled_training_job_without_checkpoint_is_cancelled_with_exit_code_75() {
    let node = Node::new("max_grace = \"1s\"");
    let job = node.submit(&[&node.write_tiny_job(1_000_000), "--nproc", "2"]);
    let rank = wait_for("a step", || {
        let status = &node.job(job)["status"];
        status["step"].as_u64().filter(|step| *step > 0)?;
        status["ranks"][1]["pid"].as_u64()
    });
    send_signal(u32::try_from(rank).unwrap(), Signal::STOP);
    assert_eq!(node.run(&["cancel", &job.to_string()]).code, 0);
    let ended = node.wait(job, "cancelled");
    assert_eq!(ended["exit_code"], 75, "{ended}");
    let reason = ended["reason"].as_str().unwrap();
    assert!(reason.starts_with("cancelled by user ") && reason.contains("without a checkpoint"), "{reason}");
}

fn forced_cancel_kills_a_job_that_ignores_sigterm() {
    let node = Node::new("max_grace = \"1h\"");
    let script = "trap '' TERM; echo up; sleep 1000 & wait; wait";
    let shell = ["--shutdown-timeout", "3600", "--no-python", "sh", "-c", script];
    let job = node.submit(&shell);
    let text = job.to_string();
    wait_for("output", || node.run(&["logs", &text]).stdout.contains("up").then_some(()));
    assert_eq!(node.run(&["cancel", &text]).code, 0);
    node.wait(job, "stopping");
    assert_eq!(node.run(&["cancel", "--force", &text]).code, 0);
    let killed = node.wait(job, "cancelled");
    assert!(
        killed["reason"].as_str().unwrap().starts_with("killed by `cancel --force` of user "),
        "{killed}"
    );
    let rank = &killed["status"]["ranks"][0];
    assert_eq!(
        (rank["state"].as_str(), rank["exit"].as_str()),
        (Some("exited"), Some("exit unknown")),
        "{killed}"
    );
}

fn cancel_kills_all_processes_of_the_job() {
    let node = Node::new("");
    let job = node.submit_shell("echo $$ > pid; (setsid sleep 1000 & echo $! > daemonized); exec sleep 1000");
    let pid = |name: &str| wait_for(name, || node.lines(name).first().and_then(|line| line.parse().ok()));
    let pids = [pid("pid"), pid("daemonized")];
    assert_eq!(node.run(&["cancel", &job.to_string()]).code, 0);
    let cancelled = node.wait(job, "cancelled");
    assert_eq!(cancelled["exit_code"], 143, "{cancelled}");
    wait_for("its processes to be killed", || pids.iter().all(|pid| !is_alive(*pid)).then_some(()));
    let again = node.json(&["cancel", &job.to_string()]);
    assert_eq!((&again[0]["id"], &again[0]["state"]), (&job.into(), &"cancelled".into()));

    assert_eq!(node.json(&["drain", "--reason", "new fans"])["drained"], "new fans");
    let queued = node.submit_shell("true");
    assert!(node.job(queued)["reason"].as_str().unwrap().contains("new fans"));
    node.run(&["cancel", &queued.to_string()]);
    assert_eq!(node.wait(queued, "cancelled")["exit_code"], Value::Null);
}

fn second_daemon_is_refused_and_invalid_configuration_is_reported() {
    let node = Node::new("");
    let mut second = Command::new(xlaunch_path());
    second.args(["daemon", "--foreground", "--config"]).arg(node.path().join("daemon.toml"));
    second.arg("--state-dir").arg(node.state_dir()).arg("--socket").arg(node.path().join("other.sock"));
    let run = Process::spawn(&mut second).wait();
    assert!(run.code == 2 && run.stderr.contains("another daemon"), "{}", run.stderr);
    node.configure("alow_root = true");
    node.daemon().signal(Signal::HUP);
    node.daemon().wait_for_stderr("allow_root");
    assert_eq!(node.run(&["submit", "--", "true"]).code, 0);
}

fn jobs_are_refused_if_the_state_directory_is_too_long_for_sockets() {
    /// A socket's path has at most 107 bytes, of which `/jobs/1/agent/agent.sock` takes 24.
    const LONGEST: usize = 83;
    let mut node = Node::new("");
    node.stop_daemon(Signal::TERM);
    let with_state_dir = |len: usize| {
        let mut command = node.daemon_command();
        let name = "x".repeat(len - node.path().as_os_str().len() - 1);
        command.arg("--state-dir").arg(node.path().join(name));
        command
    };
    let not_started = Process::spawn(&mut with_state_dir(LONGEST + 1)).wait();
    let is_explained = not_started.stderr.contains("/jobs/1/agent/agent.sock is too long for a socket");
    assert!(not_started.code != 0 && is_explained, "{not_started:?}");
    let _daemon = spawn_daemon(&mut with_state_dir(LONGEST));
    for job in 1..=9 {
        assert_eq!(node.submit(&["--hold", "--", "true"]), job);
    }
    let refused = node.run(&["submit", "--", "true"]);
    let is_explained = refused.stderr.contains("set daemon.state_dir to a shorter path");
    assert!(refused.code != 0 && is_explained, "{refused:?}");
}

fn job_that_cannot_start_says_why() {
    let node = Node::new("");
    let gone = node.path().join("gone");
    std::fs::create_dir(&gone).unwrap();
    let mut submit = node.client(&["submit", "--priority", "-1", "--", "true"]);
    node.run(&["drain"]);
    assert_eq!(Process::spawn(submit.current_dir(&gone)).wait().code, 0);
    std::fs::remove_dir(&gone).unwrap();
    node.run(&["drain", "--undo"]);
    let failed = node.wait(1, "failed");
    for text in [&failed["report"], &failed["reason"]] {
        assert!(text.as_str().unwrap().contains("gone: No such file"), "{failed}");
    }
    let missing = node.submit(&["--", "no-such-program"]);
    assert!(node.wait(missing, "failed")["report"].as_str().unwrap().contains("no-such-program"));
}

fn oldest_finished_jobs_are_forgotten() {
    let node = Node::new("keep = 2");
    for job in 1..=4 {
        assert_eq!(node.submit_shell("true"), job);
        node.wait(job, "done");
    }
    let is_forgotten = || node.run(&["status", "2"]).stderr.contains("no job 2").then_some(());
    wait_for("job 2 to be forgotten", is_forgotten);
    assert!(!node.state_dir().join("jobs/2").exists() && node.state_dir().join("jobs/3").exists());
}

fn all_jobs_are_listed_however_long_their_command_lines_are() {
    let node = Node::new("");
    let long = "x".repeat(8000);
    let array = node.run(&["submit", "--hold", "--array", "0-99", "--", "true", &long]);
    assert_eq!(array.stdout, "jobs 1-100\n", "{}", array.stderr);
    let jobs = node.json(&["jobs"]);
    assert_eq!(jobs.as_array().unwrap().len(), 100);
    assert_eq!(node.json(&["jobs", "--limit", "70"]).as_array().unwrap().len(), 70);
    let cancelled = node.run(&["cancel", "1-100"]);
    assert_eq!(cancelled.code, 0, "{}", cancelled.stderr);
    assert_eq!(node.json(&["history"]).as_array().unwrap().len(), 100);
}

fn output_beyond_the_limit_is_cut_with_a_note() {
    let node = Node::new("max_output = \"64K\"");
    let job = node.submit_shell("seq 100000");
    node.wait(job, "done");
    let logs = node.state_dir().join(format!("jobs/{job}/agent/logs/attempt_0/0"));
    let [old, new] =
        ["stdout.log.1", "stdout.log"].map(|name| std::fs::read_to_string(logs.join(name)).unwrap());
    assert!(old.len() + new.len() < 66 << 10 && new.ends_with("100000\n"), "{} {}", old.len(), new.len());
    let note = new.lines().next().unwrap();
    assert!(note.contains(" bytes of output came before this line; only stdout.log.1 and"), "{note}");
    let shown = node.run(&["logs", &job.to_string()]).stdout;
    assert!(shown.starts_with("[xlaunch: ") && shown.ends_with("100000\n"), "users see it, too");
}

fn commands_that_are_no_longer_accepted_stay_in_the_queue() {
    let node = Node::new("cpu_workers = 1");
    let first = node.submit_shell("while ! [ -e go ]; do sleep 0.05; done");
    let second = node.submit_shell("true");
    node.wait(first, "running");
    let reload = |allowed: bool| {
        let text = format!("[jobs]\nallow_root = true\nallow_commands = {allowed}\ncpu_workers = 1\n");
        node.write("daemon.toml", &text);
        node.daemon().signal(Signal::HUP);
    };
    reload(false);
    wait_for("the reason", || {
        node.job(second)["reason"].as_str()?.contains("jobs.allow_commands").then_some(())
    });
    node.write("go", "");
    node.wait(first, "done");
    assert_eq!(node.job(second)["state"], "queued");
    reload(true);
    node.wait(second, "done");
}
