//! Jobs of several users on one node.

use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{NOBODY, Node, Process, requirements, spawn_daemon, wait_for};

xlaunch_harness::tests! {
    needs requirements::root:
    users_see_only_their_jobs_which_run_as_themselves;
    user_without_account_runs_jobs_in_a_daemon_of_its_own;
}

/// A user id without an account, as in a container that was started with any user id.
const WITHOUT_ACCOUNT: u32 = 3_999_999_998;

fn users_see_only_their_jobs_which_run_as_themselves() {
    let node = Node::new("");
    let dir = node.admit_nobody();
    let nobody = |args: &[&str]| node.run_as_nobody(&dir, args);
    let roots = node.submit_shell("exec sleep 1000");
    let run = nobody(&["submit", "--", "sh", "-c", "id -u; id -g; touch made; exec sleep 1000"]);
    assert_eq!(run.stdout, "job 2\n", "{}", run.stderr);
    node.wait(2, "running");
    let ids = format!("{NOBODY}\n{NOBODY}\n");
    wait_for("output of job 2", || (node.run(&["logs", "2"]).stdout == ids).then_some(()));
    let made = wait_for("the file of job 2", || std::fs::metadata(dir.join("made")).ok());
    assert_eq!(made.uid(), NOBODY);
    let listed: Value = serde_json::from_str(&nobody(&["jobs", "--all", "--json"]).stdout).unwrap();
    let listed = listed.as_array().or_else(|| listed["jobs"].as_array()).unwrap().len();
    assert_eq!(listed, 1);
    for command in
        [&["status", "1"][..], &["cancel", "1"], &["logs", "1"], &["checkpoint", "1"], &["stacks", "1"]]
    {
        let refused = nobody(command);
        assert!(refused.code != 0 && refused.stderr.contains("no job 1"), "{}", refused.stderr);
    }
    for command in [&["drain"][..], &["doctor", "--daemon"], &["submit", "--priority", "1", "--", "true"]] {
        assert!(nobody(command).stderr.contains("administrators"), "{command:?}");
    }
    assert_eq!(nobody(&["cancel", "2"]).code, 0);
    node.wait(2, "cancelled");
    assert_eq!(node.job(roots)["state"], "running");
    assert_eq!(node.run(&["cancel", "1"]).code, 0);
}

fn user_without_account_runs_jobs_in_a_daemon_of_its_own() {
    let mut node = Node::new("");
    node.stop_daemon(Signal::TERM);
    std::fs::remove_dir_all(node.state_dir()).unwrap();
    let files = std::fs::read_dir(node.path()).unwrap().map(|entry| entry.unwrap().path());
    for path in files.chain([node.path().to_owned()]) {
        chown(path, Some(WITHOUT_ACCOUNT), Some(WITHOUT_ACCOUNT)).unwrap();
    }
    let _daemon = spawn_daemon(node.daemon_command().uid(WITHOUT_ACCOUNT).gid(WITHOUT_ACCOUNT));
    let run =
        |args: &[&str]| Process::spawn(node.client(args).uid(WITHOUT_ACCOUNT).gid(WITHOUT_ACCOUNT)).wait();
    let done = run(&["submit", "--wait", "--", "sh", "-c", "id -u; id -g"]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert_eq!(run(&["logs", "1"]).stdout, format!("{WITHOUT_ACCOUNT}\n{WITHOUT_ACCOUNT}\n"));
}
