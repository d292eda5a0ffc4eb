//! Jobs can neither act on the terminal of another user nor forge log lines of the daemon.

use std::process::Command;

use xlaunch_tests::{Node, Process, requirements, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    forged_result_cannot_imitate_log_lines_of_the_daemon;
    needs requirements::root, requirements::terminal:
    job_of_another_user_cannot_send_escape_sequences_to_terminal;
}

/// Clears the screen and sets the clipboard.
const ESCAPE_SEQUENCES: &str = "\x1b[2J\x1b]52;c;cm0=\x07";

/// What a client writes to a terminal.
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
    // Into a pipe, bytes are copied unchanged.
    assert_eq!(node.run(&["logs", "1"]).stdout, format!("{ESCAPE_SEQUENCES}\n{ESCAPE_SEQUENCES}\n"));
    let nobodys = on_terminal(&node, "logs 1");
    assert!(nobodys.contains("\\u{1b}[2J") && !nobodys.contains('\x1b'), "{nobodys:?}");
    // A user's own job may do what it likes.
    assert!(on_terminal(&node, "logs 2").contains(ESCAPE_SEQUENCES));
    for command in ["status 1", "jobs --all", "status 1 --json"] {
        let shown = on_terminal(&node, command);
        assert!(shown.contains("nobodys") && !shown.contains('\x1b'), "{command}: {shown:?}");
    }
}

fn forged_result_cannot_imitate_log_lines_of_the_daemon() {
    let node = Node::new("");
    // The user of a job may kill its agent and write the result instead.
    let result = r#"{"exit":1,"reason":"x\n2026-01-01T00:00:00Z  INFO forged \u001b[2J","start":1}"#;
    let dir = node.state_dir().join("jobs/1/agent").display().to_string();
    let script = "while ! [ -e agent ]; do sleep 0.05; done; printf %s \"$0\" > \"$1/result.json\"; \
        chmod 600 \"$1/result.json\"; kill -KILL $(cat agent); sleep 1000";
    assert_eq!(node.submit(&["--", "sh", "-c", script, result, &dir]), 1);
    node.wait(1, "running");
    let agent = wait_for("the agent", || node.agents().first().copied());
    // Renamed into place: the job polls for the file.
    let new = node.write("agent.new", &agent.to_string());
    std::fs::rename(new, node.path().join("agent")).unwrap();
    node.wait(1, "failed");
    let log = node.daemon().stderr();
    assert!(log.contains("forged"), "{log}");
    assert!(!log.contains('\x1b') && !log.lines().any(|line| line.starts_with("2026-01-01")), "{log}");
}
