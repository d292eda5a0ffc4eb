//! State that is damaged, or that other users could have changed: nothing is deleted, and nothing is trusted.

use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use xlaunch_tests::{Node, Process, wait_for};

xlaunch_harness::tests! {
    zeroed_journal_deletes_nothing_and_running_job_can_be_cancelled,
    flipped_bit_in_a_submission_deletes_nothing,
    job_whose_files_were_removed_is_shown_as_running_until_it_ends,
    journal_in_a_directory_that_was_open_to_all_users_is_refused;
}

/// Kills the daemon, changes its journal, and starts the next one.
fn damage(node: &mut Node, change: impl FnOnce(&mut Vec<u8>)) {
    node.stop_daemon(Signal::KILL);
    let journal = node.state_dir().join("journal");
    let mut bytes = std::fs::read(&journal).unwrap();
    change(&mut bytes);
    std::fs::write(&journal, bytes).unwrap();
    node.start_daemon();
}

fn zeroed_journal_deletes_nothing_and_running_job_can_be_cancelled() {
    let mut node = Node::new("");
    let done = node.submit_shell("echo kept");
    node.wait(done, "done");
    let running = node.submit_shell("echo begins; exec sleep 1000");
    node.wait(running, "running");
    let held = node.submit(&["--hold", "--", "true"]);
    damage(&mut node, |bytes| bytes.fill(0));
    let job = node.wait(running, "running");
    assert_eq!(job["name"], "sh", "{job}");
    node.wait(done, "done");
    assert_eq!(node.run(&["logs", &done.to_string()]).stdout, "kept\n");
    let lost = node.wait(held, "lost");
    assert!(lost["reason"].as_str().unwrap().contains("journal was damaged"), "{lost}");
    let next = node.submit_shell("true");
    assert!(next > held, "job {next}");
    node.wait(next, "done");
    assert_eq!(node.run(&["cancel", &running.to_string()]).code, 0);
    node.wait(running, "cancelled");
    // The next daemon, whose journal is intact, keeps them too.
    node.kill_and_restart_daemon();
    assert_eq!(node.run(&["logs", &done.to_string()]).stdout, "kept\n");
    assert_eq!(node.run(&["logs", &running.to_string()]).stdout, "begins\n");
}

fn flipped_bit_in_a_submission_deletes_nothing() {
    let mut node = Node::new("");
    let running = node.submit_shell("echo begins; while ! [ -e end ]; do sleep 0.02; done; exit 3");
    node.wait(running, "running");
    damage(&mut node, |bytes| {
        let submitted = b"\"record\":\"submitted\"";
        let at = bytes.windows(submitted.len()).position(|text| text == submitted).unwrap();
        bytes[at + 12] ^= 1;
    });
    node.wait(running, "running");
    node.write("end", "");
    assert_eq!(node.wait(running, "failed")["exit_code"], 3);
    assert_eq!(node.run(&["logs", &running.to_string()]).stdout, "begins\n");
}

fn job_whose_files_were_removed_is_shown_as_running_until_it_ends() {
    let mut node = Node::new("");
    let jobs = ["one", "other"].map(|name| {
        let script = format!("touch {name}.up; while ! [ -e {name} ]; do sleep 0.02; done");
        let job = node.submit_shell(&script);
        // By then the agent has created its files.
        wait_for("the worker", || node.path().join(format!("{name}.up")).exists().then_some(()));
        node.wait(job, "running");
        job
    });
    let files = node.state_dir().join("jobs");
    damage(&mut node, |bytes| {
        bytes.fill(0);
        // Only the daemon's record of the agent remains.
        for job in jobs {
            std::fs::remove_dir_all(files.join(job.to_string()).join("agent")).unwrap();
        }
    });
    jobs.iter().for_each(|job| drop(node.wait(*job, "running")));
    node.write("one", "");
    let lost = node.wait(jobs[0], "lost");
    assert!(lost["reason"].as_str().unwrap().contains("files were removed"), "{lost}");
    assert_eq!(node.run(&["cancel", "--force", &jobs[1].to_string()]).code, 0);
    node.wait(jobs[1], "cancelled");
}

fn journal_in_a_directory_that_was_open_to_all_users_is_refused() {
    let mut node = Node::new("");
    node.submit(&["--hold", "--", "true"]);
    node.stop_daemon(Signal::TERM);
    let mode = || node.state_dir().metadata().unwrap().permissions().mode() & 0o7777;
    std::fs::set_permissions(node.state_dir(), std::fs::Permissions::from_mode(0o1777)).unwrap();
    let daemon = Process::spawn(&mut node.daemon_command());
    let output = daemon.wait();
    assert!(output.stderr.contains("can be changed by other users"), "{}", output.stderr);
    assert_eq!((output.code, mode()), (2, 0o1777));
}
