//! Hooks: the operator's programs that run around a job.

use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use xlaunch_tests::{NOBODY, Node, Process, requirements, wait_for};

xlaunch_harness::tests! {
    hooks_run_around_a_job_with_its_facts,
    failed_prolog_drains_the_node_and_the_job_waits,
    hook_that_cannot_run_is_found_before_it_matters,
    epilog_runs_for_a_job_that_ends_without_a_daemon;
    needs requirements::root:
    hooks_run_as_root_or_as_the_user;
}

/// Creates a node with these hooks, which are shell scripts that start in its directory.
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
    let facts = "echo \"$0 $XLAUNCH_HOOK_JOB_ID $XLAUNCH_HOOK_JOB_NAME $XLAUNCH_HOOK_JOB_STATE \
                 $XLAUNCH_HOOK_JOB_EXIT_CODE\" >> hooked";
    let scripts = [("prolog", facts), ("epilog", facts), ("on_end", facts)];
    let node = node(&scripts, "on_end_as = \"root\"");
    let work = "echo worker >> hooked; while ! [ -e go ]; do sleep 0.02; done; exit 5";
    let job = node.submit(&["--name", "n", "--", "sh", "-c", work]);
    let hooked = |count: usize| {
        let hooked = wait_for("hooks", || Some(node.lines("hooked")).filter(|lines| lines.len() >= count));
        let dir = node.path().display().to_string() + "/";
        hooked.iter().map(|line| line.trim_start_matches(&dir).trim_end().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(hooked(2), ["prolog 1 n", "worker"]);
    // A reload applies to hooks that have not run yet, also those of running jobs.
    let epilog = node.path().join("epilog").display().to_string();
    node.configure(&format!("[hooks]\non_end_as = \"root\"\non_end = \"{epilog}\"\n"));
    node.daemon().signal(Signal::HUP);
    wait_for("the reload", || node.daemon().stderr().contains("configuration reloaded").then_some(()));
    node.write("go", "");
    node.wait(job, "failed");
    assert_eq!(hooked(3), ["prolog 1 n", "worker", "epilog 1 n failed 5"]);
}

fn failed_prolog_drains_the_node_and_the_job_waits() {
    let node = node(
        &[("prolog", "! [ -e broken ] || { echo no scratch here; exit 3; }"), ("epilog", "touch cleaned")],
        "",
    );
    node.write("broken", "");
    let jobs = [node.submit_shell("touch ran1"), node.submit_shell("touch ran2")];
    let drained = wait_for("the drain", || {
        let reason = node.json(&["node"])["drained"].as_str()?.to_owned();
        Some(reason).filter(|reason| !reason.is_empty())
    });
    assert!(
        drained.contains("prolog failed") && drained.contains("3: no scratch here (before job"),
        "{drained}"
    );
    assert!(node.daemon().stderr().contains(": no scratch here job="), "{}", node.daemon().stderr());
    for job in jobs {
        let waits = node.wait(job, "queued");
        assert!(waits["reason"].as_str().unwrap().contains("the node is drained"), "{waits}");
    }
    assert!(node.path().join("cleaned").exists() && !node.path().join("ran1").exists());
    std::fs::remove_file(node.path().join("broken")).unwrap();
    assert_eq!(node.run(&["drain", "--undo"]).code, 0);
    for job in jobs {
        node.wait(job, "done");
    }
}

fn hook_that_cannot_run_is_found_before_it_matters() {
    let mut node = Node::new("");
    let check = |file: &str| node.run(&["daemon", "--check", file]);
    let path = node.write("new.toml", "[jobs]\nkeep = 5\n").display().to_string();
    assert_eq!((check(&path).code, check(&path).stdout), (0, format!("{path}: valid\n")));
    for (text, problem) in [
        ("[hooks]\nprolog = \"/no/such\"\n", "new.toml:2:10: hooks.prolog: /no/such: No such file"),
        ("[jobs]\nleave_gpus = [\"7\"]\n", "jobs.leave_gpus: there is no GPU `7`"),
        ("[hooks]\ntimeout = \"0s\"\n", "new.toml:2:11"),
        ("[jbos]\n", "did you mean `[jobs]`?"),
    ] {
        node.write("new.toml", text);
        let checked = check(&path);
        assert!(checked.code == 2 && checked.stderr.contains(problem), "{text}: {}", checked.stderr);
    }
    // A running daemon keeps its current configuration, and reports that.
    for (keys, problem) in
        [("keep = \"all\"", "all"), ("[hooks]\nprolog = \"/no/such\"", "/no/such: No such file")]
    {
        node.configure(keys);
        node.daemon().signal(Signal::HUP);
        let shown = wait_for("the failed reload", || {
            let shown = node.run(&["node"]).stdout;
            Some(shown).filter(|shown| shown.contains(problem))
        });
        assert!(shown.contains("daemon.toml: the last reload has failed"), "{shown}");
    }
    // The next daemon does not start.
    node.stop_daemon(Signal::KILL);
    let refused = Process::spawn(&mut node.daemon_command()).wait();
    assert!(refused.code == 2 && refused.stderr.contains("/no/such: No such file"), "{}", refused.stderr);
}

fn epilog_runs_for_a_job_that_ends_without_a_daemon() {
    let mut node = node(&[("epilog", "echo $XLAUNCH_HOOK_JOB_ID >> cleaned")], "");
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
