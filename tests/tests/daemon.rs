//! The daemon of a node: jobs of any kind, in their order, whatever happens to the daemon, and to whom they belong.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Node, Running, alive, wait_for};

/// A small job of the trainer: text to learn from, and its configuration.
fn training(node: &Node, steps: u64) -> String {
    node.write("text.txt", &"It was a dark and stormy night. ".repeat(2000));
    let text = format!(
        "[model]\npreset = \"byte-tiny\"\n[data]\ntrain = [\"text.txt\"]\n[train]\nsteps = {steps}\nbatch = 1\n\
         warmup = 2\neval_every = 0\nsample = 0\n[checkpoint]\nevery = 0\n"
    );
    node.write("tiny.toml", &text).display().to_string()
}

/// Steps and losses of the newest run.
fn metrics(node: &Node) -> Vec<(u64, f64)> {
    let lines = node.lines("runs/tiny/latest/metrics.jsonl");
    let read = |line: &String| {
        let line: Value = serde_json::from_str(line).unwrap_or_default();
        (line["_step"].as_u64().unwrap_or(u64::MAX), line["train/loss"].as_f64().unwrap_or(f64::NAN))
    };
    lines.iter().map(read).collect()
}

#[test]
fn a_job_runs_where_it_was_submitted_and_all_of_it_is_told() {
    let node = Node::new("");
    // A rank that fails ends the others: each waits for the other's words.
    let script = "echo hello $RANK $GREETING; echo oops >&2; pwd > where; touch said$RANK; \
                  while ! [ -e said0 -a -e said1 ]; do sleep 0.02; done; exit 3";
    let mut submit = node.client(&["submit", "--name", "greet", "--nproc", "2", "--", "sh", "-c", script]);
    let run = Running::start(submit.env("GREETING", "world")).finish();
    assert_eq!(run.stdout, "job 1\n", "{}", run.stderr);
    let job = node.wait(1, "failed");
    assert_eq!(
        (&job["name"], &job["exit_code"], &job["workers"]),
        (&"greet".into(), &1.into(), &Value::Null)
    );
    assert!(job["report"].as_str().unwrap().contains("exit code 3"), "{job}");
    assert_eq!(node.run(&["logs", "1", "--rank", "1"]).stdout, "hello 1 world\n");
    assert_eq!(node.run(&["logs", "1", "--stderr"]).stdout, "oops\n");
    assert_eq!(node.lines("where"), [node.path().display().to_string()]);
    assert!(node.run(&["jobs", "--all"]).stdout.contains("greet"));
}

#[test]
fn whoever_waits_for_a_job_gets_its_exit_code_and_report() {
    let node = Node::new("");
    let wait =
        |script: &str| node.run(&["submit", "--wait", "--propagate-exit-code", "--", "sh", "-c", script]);
    assert_eq!(wait("sleep 0.2").code, 0);
    let failed = wait("exit 9");
    assert!(failed.code == 9 && failed.stderr.contains("exit code 9"), "{}", failed.stderr);
}

#[test]
fn restarts_are_told_with_their_causes_also_by_the_next_daemon() {
    let mut node = Node::new("");
    let script = "if [ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && [ $RANK = 1 ]; then exit 7; fi; \
                  while ! [ -e end ]; do sleep 0.02; done; exit $RANK";
    let job = node.submit(&["--nproc", "2", "--max-restarts", "2", "--", "sh", "-c", script]);
    let restarts = |node: &Node| node.job(job)["status"]["past_restarts"].clone();
    let told = |restarts: &Value| -> Vec<(u64, u64, String)> {
        let each = restarts.as_array().into_iter().flatten();
        each.map(|it| {
            let number = |key: &str| it[key].as_u64().unwrap_or(u64::MAX);
            (number("attempt"), number("rank"), it["cause"].as_str().unwrap_or_default().to_owned())
        })
        .collect()
    };
    let expected = [(0, 1, "exit code 7".to_owned()), (1, 1, "exit code 7".to_owned())];
    let all = wait_for("two restarts", || Some(told(&restarts(&node))).filter(|told| told.len() == 2));
    assert_eq!(all, expected);
    for attempt in [0, 1] {
        node.daemon().wait_for_stderr(&format!("attempt {attempt} of job {job} has failed"));
    }
    let log = node.daemon().stderr();
    assert!(log.contains("rank=1") && log.contains("attempt=1"), "{log}");
    node.kill_and_start();
    node.wait(job, "running");
    let again = wait_for("its status", || Some(told(&restarts(&node))).filter(|told| !told.is_empty()));
    assert_eq!(again, expected);
    node.write("end", "");
    node.wait(job, "failed");
    node.daemon().wait_for_stderr(&format!("rank 1 of job {job} has failed in attempt 2"));
    assert!(!node.daemon().stderr().contains("attempt 1 of job"), "{}", node.daemon().stderr());
    node.kill_and_start();
    assert_eq!(told(&restarts(&node)), expected);
}

#[test]
fn jobs_that_do_not_fit_wait_for_their_turn() {
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
    let full = node.run(&["submit", "--", "true"]);
    assert!(full.code != 0 && full.stderr.contains("3 queued or running jobs"), "{}", full.stderr);
    let large = node.run(&["submit", "--nproc", "2", "--", "true"]);
    assert!(large.code == 2 && large.stderr.contains("2 CPU workers"), "{}", large.stderr);
    node.write("go", "");
    node.wait(low, "done");
    assert_eq!(node.lines("order"), ["first", "next", "low"]);
}

#[test]
fn a_cancelled_job_ends_with_all_that_it_has_started() {
    let node = Node::new("");
    let runs = node.submit_shell("echo $$ > pid; (setsid sleep 1000 & echo $! > hidden); exec sleep 1000");
    let pid = |name: &str| wait_for(name, || node.lines(name).first().and_then(|line| line.parse().ok()));
    let pids = [pid("pid"), pid("hidden")];
    assert!(node.run(&["cancel", &runs.to_string()]).code == 0);
    let job = node.wait(runs, "cancelled");
    assert_eq!(job["exit_code"], 143, "{job}");
    wait_for("the end of its processes", || pids.iter().all(|pid| !alive(*pid)).then_some(()));
    let again = node.run(&["cancel", &runs.to_string(), "--json"]);
    assert_eq!((again.code, &node.job(runs)["state"]), (0, &"cancelled".into()), "{}", again.stderr);
    let told: Value = serde_json::from_str(&again.stdout).unwrap_or_else(|_| panic!("{}", again.stdout));
    assert_eq!((&told[0]["id"], &told[0]["state"]), (&runs.into(), &"cancelled".into()));
    let drained = node.run(&["drain", "--reason", "new fans", "--json"]);
    let told: Value = serde_json::from_str(&drained.stdout).unwrap_or_else(|_| panic!("{}", drained.stderr));
    assert_eq!(told["drained"], "new fans");
    let waits = node.submit_shell("true");
    assert!(node.job(waits)["reason"].as_str().unwrap().contains("new fans"));
    node.run(&["cancel", &waits.to_string()]);
    assert_eq!(node.wait(waits, "cancelled")["exit_code"], Value::Null);
}

#[test]
fn training_goes_on_while_the_daemon_is_killed_and_nothing_of_it_is_lost() {
    let undisturbed = Node::new("");
    let config = training(&undisturbed, 60);
    undisturbed.wait(undisturbed.submit(&[&config]), "done");
    let mut node = Node::new("");
    let config = training(&node, 60);
    let job = node.submit(&[&config]);
    for step in [5, 20, 40] {
        wait_for("steps", || (metrics(&node).len() > step).then_some(()));
        let agents = node.agents();
        node.kill_and_start();
        assert!(agents.iter().all(|agent| alive(*agent)) || node.job(job)["state"] == "done");
        let state = node.job(job)["state"].clone();
        assert!(["starting", "running", "done"].iter().any(|known| state == *known), "{state}");
    }
    let ended = node.wait(job, "done");
    assert_eq!(ended["exit_code"], 0);
    assert_eq!(metrics(&node), metrics(&undisturbed));
    node.kill_and_start();
    let history: Vec<_> =
        node.job(job)["history"].as_array().unwrap().iter().map(|it| it["step"].clone()).collect();
    assert_eq!(history, (1..=60).map(Value::from).collect::<Vec<_>>());
    assert_eq!(metrics(&node).len(), 60);
    assert_eq!(node.agents(), [0; 0]);
}

#[test]
fn a_hundred_restarts_under_load_lose_no_job_and_run_none_twice() {
    let mut node = Node::new("");
    let mut jobs = Vec::new();
    for round in 0..100_u64 {
        jobs.push(node.submit_shell("echo $$ >> ran; sleep 0.1"));
        // Between the order and its end, anywhere.
        std::thread::sleep(std::time::Duration::from_millis(round * 7 % 40));
        match round % 3 {
            0 => drop(node.end(Signal::TERM)),
            _ => drop(node.end(Signal::KILL)),
        }
        node.start();
    }
    for job in &jobs {
        let ended = node.wait(*job, "done");
        assert_eq!(ended["exit_code"], 0, "{ended}");
    }
    assert_eq!(node.lines("ran").len(), jobs.len());
}

#[test]
fn an_agent_that_is_killed_leaves_a_lost_job_and_no_process() {
    let node = Node::new("");
    let job = node.submit_shell("echo $$ > pid; exec sleep 1000");
    let worker = wait_for("pid", || node.lines("pid").first().and_then(|line| line.parse().ok()));
    node.wait(job, "running");
    for agent in node.agents() {
        Command::new("kill").args(["-KILL", &agent.to_string()]).status().unwrap();
    }
    let lost = node.wait(job, "lost");
    assert_eq!(lost["exit_code"], Value::Null, "{lost}");
    wait_for("the end of its worker", || (!alive(worker)).then_some(()));
}

#[test]
fn a_job_of_another_start_of_the_system_is_lost_and_no_process_is_touched() {
    let mut node = Node::new("");
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let agents = node.agents();
    node.end(Signal::KILL);
    let path = node.state().join("journal");
    let journal = std::fs::read_to_string(&path).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let mut lines = String::new();
    for line in journal.replace(boot.trim(), "another").lines() {
        let record = &line[9..];
        lines += &format!("{:08x} {record}\n", crc32(record.as_bytes()));
    }
    std::fs::write(&path, lines).unwrap();
    node.start();
    let lost = node.wait(job, "lost");
    assert!(lost["reason"].as_str().unwrap().contains("rebooted"), "{lost}");
    assert!(agents.iter().all(|agent| alive(*agent)));
}

/// CRC-32 (IEEE), bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

#[test]
fn one_daemon_has_a_directory_and_a_broken_configuration_is_shown() {
    let node = Node::new("");
    let mut second = Command::new(xlaunch_tests::xlaunch());
    second.args(["daemon", "--foreground", "--state-dir"]).arg(node.state());
    second.arg("--socket").arg(node.path().join("other.sock"));
    let run = Running::start(second.arg("--config").arg(node.path().join("daemon.toml"))).finish();
    assert!(run.code == 2 && run.stderr.contains("another daemon"), "{}", run.stderr);
    node.configure("alow_root = true");
    node.daemon().signal(Signal::HUP);
    node.daemon().wait_for_stderr("allow_root");
    assert_eq!(node.run(&["submit", "--", "true"]).code, 0);
}

#[test]
fn users_have_their_own_jobs_and_run_them_as_themselves() {
    if !rustix::process::getuid().is_root() {
        eprintln!("skipped: only root can be two users");
        return;
    }
    let node = Node::new("");
    std::os::unix::fs::chown(node.socket(), Some(65_534), None).unwrap();
    let theirs = node.path().join("theirs");
    std::fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(65_534), Some(65_534)).unwrap();
    let nobody = |args: &[&str]| {
        let mut client = node.client(args);
        Running::start(client.uid(65_534).gid(65_534).current_dir(&theirs)).finish()
    };
    let ours = node.submit_shell("exec sleep 1000");
    let run = nobody(&["submit", "--", "sh", "-c", "id -u; id -g; touch made; exec sleep 1000"]);
    assert_eq!(run.stdout, "job 2\n", "{}", run.stderr);
    node.wait(2, "running");
    wait_for("its output", || (node.run(&["logs", "2"]).stdout == "65534\n65534\n").then_some(()));
    use std::os::unix::fs::MetadataExt;
    let made = wait_for("its file", || std::fs::metadata(theirs.join("made")).ok());
    assert_eq!(made.uid(), 65_534);
    let seen = nobody(&["jobs", "--all", "--json"]).stdout;
    let seen: Value = serde_json::from_str(&seen).unwrap();
    let seen = seen.as_array().or_else(|| seen["jobs"].as_array()).unwrap().len();
    assert_eq!(seen, 1);
    for order in [&["status", "1"][..], &["cancel", "1"], &["logs", "1"]] {
        let refused = nobody(order);
        assert!(refused.code != 0 && refused.stderr.contains("there is no job 1"), "{}", refused.stderr);
    }
    assert!(nobody(&["drain"]).stderr.contains("administrators"));
    assert!(nobody(&["submit", "--priority", "1", "--", "true"]).stderr.contains("administrators"));
    assert_eq!(nobody(&["cancel", "2"]).code, 0);
    node.wait(2, "cancelled");
    assert_eq!(node.job(ours)["state"], "running");
    assert!(node.run(&["cancel", "1"]).code == 0);
}

#[test]
fn a_job_that_cannot_start_says_why() {
    let node = Node::new("");
    let gone = node.path().join("gone");
    std::fs::create_dir(&gone).unwrap();
    let mut client = node.client(&["submit", "--priority", "-1", "--", "true"]);
    node.run(&["drain"]);
    assert_eq!(Running::start(client.current_dir(&gone)).finish().code, 0);
    std::fs::remove_dir(&gone).unwrap();
    node.run(&["drain", "--undo"]);
    let failed = node.wait(1, "failed");
    assert!(failed["report"].as_str().unwrap().contains("gone: No such file"), "{failed}");
    let missing = node.submit(&["--", "no-such-program"]);
    assert!(node.wait(missing, "failed")["report"].as_str().unwrap().contains("no-such-program"));
}

#[test]
fn what_has_ended_is_forgotten_when_there_is_too_much_of_it() {
    let node = Node::new("keep = 2");
    for job in 1..=4 {
        assert_eq!(node.submit_shell("true"), job);
        node.wait(job, "done");
    }
    wait_for("the first to be forgotten", || {
        node.run(&["status", "2"]).stderr.contains("no job 2").then_some(())
    });
    assert!(!node.state().join("jobs/2").exists() && node.state().join("jobs/3").exists());
}
