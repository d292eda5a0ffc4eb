//! What one user's job can do to another user who looks at it: nothing.

use std::os::unix::process::CommandExt;
use std::process::Command;

use xlaunch_tests::{Node, Running, wait_for, xlaunch};

/// Clears the screen and sets the clipboard.
const ACTS: &str = "\x1b[2J\x1b]52;c;cm0=\x07";

/// What a client writes on a terminal.
fn on_terminal(node: &Node, args: &str) -> Option<String> {
    let line = format!("{} {args}", xlaunch().display());
    let mut script = Command::new("script");
    script
        .args(["--quiet", "--return", "--command", &line, "/dev/null"])
        .envs(node.client(&[]).get_envs().filter_map(|(name, value)| Some((name, value?))));
    let has_script = Command::new("script").arg("--version").output().is_ok();
    has_script.then(|| Running::start(script.current_dir(node.path())).finish().stdout)
}

#[test]
fn another_users_job_does_not_act_on_the_terminal_of_an_administrator() {
    if !rustix::process::getuid().is_root() {
        eprintln!("skipped: only root can be two users");
        return;
    }
    let node = Node::new("");
    std::os::unix::fs::chown(node.socket(), Some(65_534), None).unwrap();
    let dir = node.path().join("theirs");
    std::fs::create_dir(&dir).unwrap();
    std::os::unix::fs::chown(&dir, Some(65_534), Some(65_534)).unwrap();
    let script = format!("printf '%s\\n' \"{ACTS}\" \"$0\"");
    let submit = |name: &str, own: bool| {
        let mut client = node.client(&["submit", "--name", name, "--", "sh", "-c", &script, ACTS]);
        if !own {
            client.uid(65_534).gid(65_534).current_dir(&dir);
        }
        Running::start(&mut client).finish()
    };
    let refused = submit(ACTS, false);
    assert!(refused.code != 0 && !refused.stderr.contains('\x1b'), "{}", refused.stderr);
    assert_eq!(submit("theirs", false).stdout, "job 1\n");
    assert_eq!(submit("ours", true).stdout, "job 2\n");
    [1, 2].iter().for_each(|job| drop(node.wait(*job, "done")));
    // Programs get the bytes as they are.
    let raw = format!("{ACTS}\n{ACTS}\n");
    assert_eq!(node.run(&["logs", "1"]).stdout, raw);
    let Some(theirs) = on_terminal(&node, "logs 1") else {
        eprintln!("skipped: there is no script to make a terminal");
        return;
    };
    assert!(theirs.contains("\\u{1b}[2J") && !theirs.contains('\x1b'), "{theirs:?}");
    // Our own job is ours.
    assert!(on_terminal(&node, "logs 2").is_some_and(|ours| ours.contains(ACTS)));
    for look in ["status 1", "jobs --all", "status 1 --json"] {
        let shown = on_terminal(&node, look).unwrap_or_default();
        assert!(shown.contains("theirs") && !shown.contains('\x1b'), "{look}: {shown:?}");
    }
}

#[test]
fn what_a_job_says_of_itself_cannot_pass_for_a_message_of_the_daemon() {
    let node = Node::new("");
    // Whoever runs a job may write its result in place of its agent.
    let result = r#"{"exit":1,"reason":"x\n2026-01-01T00:00:00Z  INFO forged \u001b[2J","start":1}"#;
    let directory = node.state().join("jobs/1/agent");
    let script = "while ! [ -e agent ]; do sleep 0.05; done; printf %s \"$0\" > \"$1/result.json\"; \
        chmod 600 \"$1/result.json\"; kill -KILL $(cat agent); sleep 1000";
    let directory = directory.display().to_string();
    assert_eq!(node.submit(&["--", "sh", "-c", script, result, &directory]), 1);
    node.wait(1, "running");
    let agent = wait_for("its agent", || node.agents().first().copied());
    node.write("agent.new", &agent.to_string());
    std::fs::rename(node.path().join("agent.new"), node.path().join("agent")).unwrap();
    node.wait(1, "failed");
    let log = node.daemon().stderr();
    assert!(log.contains("forged"), "{log}");
    assert!(!log.contains('\x1b') && !log.lines().any(|line| line.starts_with("2026-01-01")), "{log}");
}
