//! Jobs can neither act on the terminal of another user nor forge log lines of the daemon.

use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use xlaunch_tests::{Node, Process, requirements, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    forged_result_cannot_imitate_log_lines_of_the_daemon,
    jobs_inherit_no_descriptor_of_the_daemon,
    submission_is_removed_when_the_job_has_ended,
    slot_of_a_start_that_its_user_blocks_can_be_freed,
    forged_files_neither_end_a_running_job_nor_free_its_slot,
    environment_of_a_job_reaches_its_workers_only;
    needs requirements::python3:
    deep_directory_of_a_job_neither_ends_nor_delays_the_daemon;
    needs requirements::root, requirements::terminal:
    job_of_another_user_cannot_send_escape_sequences_to_terminal;
}

/// Clears the screen and sets the clipboard.
const ESCAPE_SEQUENCES: &str = "\x1b[2J\x1b]52;c;cm0=\x07";

/// Returns the output of a client on a terminal.
fn on_terminal(node: &Node, args: &str) -> String {
    let line = format!("{} {args}", xlaunch_path().display());
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]).current_dir(node.path());
    script.envs(node.client(&[]).get_envs().filter_map(|(name, value)| Some((name, value?))));
    Process::spawn(&mut script).wait().stdout
}

fn job_of_another_user_cannot_send_escape_sequences_to_terminal() {
    let node = Node::new("");
    let dir = node.admit_nobody();
    let script = format!("printf '%s\\n' \"{ESCAPE_SEQUENCES}\" \"$0\"");
    let args = |name| ["submit", "--name", name, "--", "sh", "-c", &script, ESCAPE_SEQUENCES];
    let refused = node.run_as_nobody(&dir, &args(ESCAPE_SEQUENCES));
    assert!(refused.code != 0 && !refused.stderr.contains('\x1b'), "{}", refused.stderr);
    assert_eq!(node.run_as_nobody(&dir, &args("nobodys")).stdout, "job 1\n");
    assert_eq!(node.run(&args("roots")).stdout, "job 2\n");
    [1, 2].iter().for_each(|job| drop(node.wait(*job, "done")));
    // Bytes are copied to a pipe unchanged.
    assert_eq!(node.run(&["logs", "1"]).stdout, format!("{ESCAPE_SEQUENCES}\n{ESCAPE_SEQUENCES}\n"));
    let nobodys = on_terminal(&node, "logs 1");
    assert!(nobodys.contains("\\u{1b}[2J") && !nobodys.contains('\x1b'), "{nobodys:?}");
    // The output of a user's own job is not filtered.
    assert!(on_terminal(&node, "logs 2").contains(ESCAPE_SEQUENCES));
    for command in ["status 1", "jobs --all", "status 1 --json"] {
        let shown = on_terminal(&node, command);
        assert!(shown.contains("nobodys") && !shown.contains('\x1b'), "{command}: {shown:?}");
    }
}

fn jobs_inherit_no_descriptor_of_the_daemon() {
    // The descriptor is not close-on-exec, like one of a shell's redirection.
    let path = std::env::temp_dir().join(format!("secret-{}", std::process::id()));
    let (flags, mode) = (OFlags::CREATE | OFlags::RDWR, Mode::RUSR);
    let secret = rustix::fs::open(&path, flags, mode).unwrap();
    std::fs::remove_file(&path).unwrap();
    let node = Node::new("");
    drop(secret);
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let agent = node.agents()[0];
    let links = std::fs::read_dir(format!("/proc/{agent}/fd")).unwrap().flatten();
    let files: Vec<_> = links.filter_map(|link| std::fs::read_link(link.path()).ok()).collect();
    let names: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
    assert!(!names.iter().any(|name| name.contains("secret-")), "{names:?}");
    let output = |fd: u32| std::fs::read_link(format!("/proc/{agent}/fd/{fd}")).unwrap();
    assert!([1, 2].iter().all(|fd| output(*fd).ends_with("agent/agent.log")), "{names:?}");
}

fn deep_directory_of_a_job_neither_ends_nor_delays_the_daemon() {
    let node = Node::new("keep = 1");
    let agent = node.state_dir().join("jobs/1/agent");
    assert_eq!(node.submit_shell("true"), 1);
    node.wait(1, "done");
    // A user can write there after the end of the job. The daemon kills a running job when it sees many levels.
    // Deeper than the stack of a thread allows for a recursive removal.
    let nest = "import os\nfor _ in range(16000):\n os.mkdir('d')\n os.chdir('d')";
    let mut python = Command::new("python3");
    assert_eq!(Process::spawn(python.args(["-c", nest]).current_dir(&agent)).wait().code, 0);
    let next = node.submit_shell("true");
    node.wait(next, "done");
    wait_for("removal of job 1", || (!agent.exists()).then_some(()));
    assert_eq!(node.job(next)["state"], "done");
    let trash = node.state_dir().join("trash");
    wait_for("an empty trash", || (trash.read_dir().unwrap().count() == 0).then_some(()));
}

fn submission_is_removed_when_the_job_has_ended() {
    let node = Node::new("");
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let files = || {
        let names = node.state_dir().join(format!("jobs/{job}")).read_dir().unwrap().flatten();
        names.map(|entry| entry.file_name()).collect::<Vec<_>>()
    };
    assert!(files().iter().any(|name| name == "job.json"), "{:?}", files());
    node.run(&["cancel", &job.to_string()]);
    node.wait(job, "cancelled");
    assert!(!files().iter().any(|name| name == "job.json"), "{:?}", files());
}

fn slot_of_a_start_that_its_user_blocks_can_be_freed() {
    let node = Node::new("cpu_workers = 1");
    let first = node.submit_shell("exec sleep 1000");
    node.wait(first, "running");
    let blocked = node.submit_shell("true");
    let last = node.submit_shell("true");
    // The job's user can do this: the agent waits for a process that reads its log.
    let log = node.state_dir().join(format!("jobs/{blocked}/agent/agent.log"));
    rustix::fs::mknodat(CWD, &log, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    node.run(&["cancel", &first.to_string()]);
    node.wait(blocked, "starting");
    assert_eq!(node.run(&["cancel", "--force", &blocked.to_string()]).code, 0);
    node.wait(blocked, "cancelled");
    node.wait(last, "done");
}

fn forged_files_neither_end_a_running_job_nor_free_its_slot() {
    let mut node = Node::new("cpu_workers = 1");
    let job = node.submit_shell("exec sleep 1000");
    node.wait(job, "running");
    let (agent, dir) = (node.agents()[0], node.state_dir().join(format!("jobs/{job}/agent")));
    // All files that its user can write.
    let result = r#"{"exit":0,"reason":"forged","start":1}"#;
    std::fs::write(dir.join("result.json"), result).unwrap();
    std::fs::write(dir.join("agent.json"), r#"{"start":1,"process":{"pid":1,"started":1,"boot":""}}"#)
        .unwrap();
    std::fs::remove_file(dir.join("begun-1")).unwrap();
    // The agent listens only after it has begun, with which the job runs.
    wait_for("the agent's socket", || std::fs::remove_file(dir.join("agent.sock")).ok());
    let next = node.submit_shell("true");
    node.kill_and_restart_daemon();
    wait_for("a poll", || {
        let jobs = [job, next].map(|job| node.job(job)["state"].clone());
        assert_ne!(jobs[0], "done");
        assert_eq!(jobs[1], "queued", "{jobs:?}");
        (jobs[0] == "starting").then_some(())
    });
    assert_eq!(node.agents(), [agent]);
    assert_eq!(node.run(&["cancel", "--force", &job.to_string()]).code, 0);
    node.wait(next, "done");
    assert!(!xlaunch_tests::is_alive(agent));
}

fn environment_of_a_job_reaches_its_workers_only() {
    let node = Node::new("");
    let script = "printf '%s' \"$SECRET\" > worker; cat /proc/$(ps -o ppid= $$ | tr -d ' ')/environ > agent";
    let submit =
        Process::spawn(node.client(&["submit", "--wait", "--", "sh", "-c", script]).env("SECRET", "hunter2"));
    assert_eq!(submit.wait().code, 0);
    assert_eq!(node.lines("worker"), ["hunter2"]);
    let agent = node.lines("agent").concat();
    assert!(agent.contains("CUDA_VISIBLE_DEVICES=") && !agent.contains("SECRET"), "{agent}");
}

fn forged_result_cannot_imitate_log_lines_of_the_daemon() {
    let node = Node::new("");
    // The user of a job may kill its agent and write the result in its place.
    let result = r#"{"exit":1,"reason":"x\n2026-01-01T00:00:00Z  INFO forged \u001b[2J","start":1}"#;
    let dir = node.state_dir().join("jobs/1/agent").display().to_string();
    let script = "while ! [ -e agent ]; do sleep 0.05; done; printf %s \"$0\" > \"$1/result.json\"; \
        chmod 600 \"$1/result.json\"; kill -KILL $(cat agent); sleep 1000";
    assert_eq!(node.submit(&["--", "sh", "-c", script, result, &dir]), 1);
    node.wait(1, "running");
    let agent = wait_for("the agent", || node.agents().first().copied());
    // Renamed into place, because the job polls for the file.
    let new = node.write("agent.new", &agent.to_string());
    std::fs::rename(new, node.path().join("agent")).unwrap();
    node.wait(1, "failed");
    let log = node.daemon().stderr();
    assert!(log.contains("forged"), "{log}");
    assert!(!log.contains('\x1b') && !log.lines().any(|line| line.starts_with("2026-01-01")), "{log}");
}
