//! The limit on processes of a job where the daemon runs without systemd.

use std::process::Command;

use rustix::process::Signal;
use xlaunch_tests::{LimitedCgroup, Node, requirements, spawn_daemon, wait_for};

xlaunch_harness::tests! {
    needs requirements::task_cgroup_without_systemd:
    job_cannot_start_more_processes_than_max_tasks;
}

fn job_cannot_start_more_processes_than_max_tasks() {
    // The daemon is the only process of a cgroup, as in a container.
    let cgroup = LimitedCgroup::with_tasks("xlaunch-test-daemon", 10_000).unwrap();
    let mut node = Node::new("max_tasks = 64");
    node.stop_daemon(Signal::TERM);
    let command = node.daemon_command();
    let mut alone = Command::new("sh");
    alone.args(["-c", &format!("echo $$ > {} && exec \"$@\"", cgroup.procs_file().display()), "sh"]);
    alone.arg(command.get_program()).args(command.get_args()).current_dir("/");
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => alone.env(name, value),
            None => alone.env_remove(name),
        };
    }
    let mut daemon = spawn_daemon(&mut alone);
    assert!(!daemon.stderr().contains("no limit on processes"), "{}", daemon.stderr());
    let few = node.submit_shell("for i in 1 2 3 4; do sleep 0.1 & done; wait");
    node.wait(few, "done");
    let many = node.submit_shell("for i in $(seq 100); do sleep 1000 & done; echo all");
    node.wait(many, "failed");
    assert_eq!(node.run(&["logs", &many.to_string()]).stdout, "");
    // The next daemon, in the same cgroup, adopts a job together with its cgroup.
    let adopted = node.submit_shell("while ! [ -e end ]; do sleep 0.02; done");
    node.wait(adopted, "running");
    daemon.signal(Signal::KILL);
    daemon.wait();
    daemon = spawn_daemon(&mut alone);
    node.write("end", "");
    node.wait(adopted, "done");
    let groups = || {
        let entries = std::fs::read_dir(cgroup.procs_file().parent().unwrap()).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("xlaunch-job-")).count()
    };
    wait_for("the cgroups of jobs to be removed", || (groups() == 0).then_some(()));
    drop(daemon);
}
