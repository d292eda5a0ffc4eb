//! The operator's programs around a job.

use std::os::unix::fs::PermissionsExt;

use xlaunch_tests::{NOBODY, Node, requirements, wait_for};

xlaunch_harness::tests! {
    hooks_run_around_a_job_with_its_facts,
    failed_prolog_fails_the_job,
    epilog_runs_for_a_job_that_ends_without_a_daemon;
    needs requirements::root:
    hooks_run_as_root_or_as_the_user;
}

/// A node with these hooks, which are shell scripts that start in its directory.
fn node(hooks: &[(&str, &str)], keys: &str) -> Node {
    let mut node = Node::new("");
    let mut text = format!("cpu_workers = 4\n[hooks]\n{keys}\n");
    for (name, script) in hooks {
        let path = node.write(name, &format!("#!/bin/sh\ncd {}\n{script}\n", node.path().display()));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        text += &format!("{name} = \"{}\"\n", path.display());
    }
    node.configure(&text);
    node.kill_and_restart_daemon();
    node
}

fn hooks_run_around_a_job_with_its_facts() {
    let facts =
        "echo \"$0 $XLAUNCH_JOB_ID $XLAUNCH_JOB_NAME $XLAUNCH_JOB_STATE $XLAUNCH_JOB_EXIT_CODE\" >> hooked";
    let scripts = [("prolog", facts), ("epilog", facts), ("on_end", facts)];
    let node = node(&scripts, "on_end_as = \"root\"");
    let job = node.submit(&["--name", "n", "--", "sh", "-c", "echo worker >> hooked; exit 5"]);
    node.wait(job, "failed");
    let hooked = wait_for("the last hook", || Some(node.lines("hooked")).filter(|lines| lines.len() == 4));
    let dir = node.path().display().to_string() + "/";
    let hooked: Vec<_> = hooked.iter().map(|line| line.trim_start_matches(&dir).trim_end()).collect();
    assert_eq!(hooked, ["prolog 1 n", "worker", "epilog 1 n", "on_end 1 n failed 5"]);
}

fn failed_prolog_fails_the_job() {
    let node = node(&[("prolog", "exit 3"), ("epilog", "touch cleaned")], "");
    let job = node.submit_shell("touch ran");
    let failed = node.wait(job, "failed");
    let reason = failed["reason"].as_str().unwrap();
    assert!(reason.contains("prolog failed") && reason.contains('3'), "{reason}");
    assert!(node.path().join("cleaned").exists() && !node.path().join("ran").exists());
}

fn epilog_runs_for_a_job_that_ends_without_a_daemon() {
    let mut node = node(&[("epilog", "echo $XLAUNCH_JOB_ID >> cleaned")], "");
    let job = node.submit_shell("while ! [ -e go ]; do sleep 0.02; done");
    node.wait(job, "running");
    let agent = node.agents()[0];
    node.stop_daemon(rustix::process::Signal::KILL);
    node.write("go", "");
    wait_for("the end of the job", || (!xlaunch_tests::is_alive(agent)).then_some(()));
    assert_eq!(node.lines("cleaned"), [] as [&str; 0]);
    node.start_daemon();
    node.wait(job, "done");
    assert_eq!(node.lines("cleaned"), ["1"]);
}

fn hooks_run_as_root_or_as_the_user() {
    let node =
        node(&[("prolog", "id -u >> nobody/ids"), ("epilog", "id -u >> nobody/ids")], "prolog_as = \"user\"");
    let dir = node.admit_nobody();
    assert_eq!(node.run_as_nobody(&dir, &["submit", "--wait", "--", "true"]).code, 0);
    assert_eq!(node.lines("nobody/ids"), [NOBODY.to_string(), "0".into()]);
}
