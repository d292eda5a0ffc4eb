//! The history of a node: every job that has ended, with the resources that it has used.

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Node, requirements, wait_for};

xlaunch_harness::tests! {
    ended_jobs_beyond_the_limit_are_forgotten_after_clients_got_their_end,
    history_has_exit_code_and_usage_of_forgotten_jobs,
    account_that_a_killed_daemon_has_not_written_is_written_at_the_next_start,
    job_is_in_the_accounting_file_once_whatever_fails;
    needs requirements::root:
    users_see_their_own_history_only;
}

fn history(node: &Node, args: &[&str]) -> Vec<Value> {
    let found = node.json(&[&["history"], args].concat());
    found.as_array().unwrap().clone()
}

fn ended_jobs_beyond_the_limit_are_forgotten_after_clients_got_their_end() {
    let node = Node::new("keep = 2");
    let done = node.submit_shell("true");
    node.wait(done, "done");
    for _ in 0..5 {
        let held = node.submit(&["--hold", "--", "true"]).to_string();
        assert_eq!(node.run(&["cancel", &held]).code, 0);
    }
    wait_for("two cancelled jobs", || {
        let listed = node.json(&["jobs", "--all"]);
        let mut ids: Vec<_> = listed.as_array()?.iter().filter_map(|job| job["id"].as_u64()).collect();
        ids.sort_unstable();
        (ids == [done, 5, 6]).then_some(())
    });
    assert_eq!(node.state_dir().join("jobs").read_dir().unwrap().count(), 3);
    node.configure("keep = 0");
    node.daemon().signal(Signal::HUP);
    wait_for("no ended jobs", || {
        (node.run(&["jobs", "--all", "--json"]).stdout.trim() == "[]").then_some(())
    });
    let submitted = node.run(&["submit", "--wait", "--", "sh", "-c", "exit 5"]);
    assert_eq!(submitted.code, 5, "{}", submitted.stderr);
}

fn history_has_exit_code_and_usage_of_forgotten_jobs() {
    let node = Node::new("keep = 1");
    // 50 MB for half a second, and some CPU time.
    let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; \
                  head -c 50000000 /dev/zero | tail | sleep 0.5; exit 7";
    let failing = node.submit_shell(script);
    let job = node.wait(failing, "failed");
    assert_eq!(job["exit_code"], 7, "{job}");
    let killed = node.submit_shell("kill -KILL $$");
    assert_eq!(node.wait(killed, "failed")["exit_code"], 137);
    wait_for("job 1 to be forgotten", || (node.run(&["status", "1"]).code != 0).then_some(()));
    let all = history(&node, &[]);
    let ids: Vec<_> = all.iter().map(|job| (job["id"].clone(), job["exit_code"].clone())).collect();
    assert_eq!(ids, [(1.into(), 7.into()), (2.into(), 137.into())]);
    assert!(all[0]["cpu_seconds"].as_f64() > Some(0.05), "{}", all[0]);
    assert!(all[0]["peak_memory_bytes"].as_u64() > Some(1_000_000), "{}", all[0]);
    assert_eq!((all[0]["gpu_seconds"].as_f64(), &all[0]["state"]), (Some(0.0), &"failed".into()));
    assert_eq!(history(&node, &["--limit", "1"])[0]["id"], 2);
    assert_eq!(history(&node, &["--since", "1h"]).len(), 2);
    assert_eq!(history(&node, &["--since", "2999-01-01"]), [] as [Value; 0]);
    assert_eq!(history(&node, &["--user", "nosuchuser"]), [] as [Value; 0]);
    let table = node.run(&["history"]).stdout;
    assert!(table.starts_with("JOB  NAME") && table.lines().count() == 3, "{table}");
}

fn account_that_a_killed_daemon_has_not_written_is_written_at_the_next_start() {
    let mut node = Node::new("");
    for _ in 0..2 {
        let job = node.submit_shell("true");
        node.wait(job, "done");
    }
    node.stop_daemon(Signal::KILL);
    let file = node.state_dir().join("accounting.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    // Simulates a daemon that was killed while it wrote the second line, before the journal recorded that.
    std::fs::write(&file, &text[..text.len() - 10]).unwrap();
    let journal = node.state_dir().join("journal");
    let text = std::fs::read_to_string(&journal).unwrap();
    let last = text.trim_end().rfind('\n').unwrap() + 1;
    assert!(text[last..].contains("accounted"), "{text}");
    std::fs::write(&journal, &text[..last]).unwrap();
    node.start_daemon();
    let ids: Vec<_> = history(&node, &[]).iter().map(|job| job["id"].clone()).collect();
    assert_eq!(ids, [1, 2]);
}

fn users_see_their_own_history_only() {
    let node = Node::new("");
    let dir = node.admit_nobody();
    let roots = node.submit_shell("true");
    node.wait(roots, "done");
    assert_eq!(node.run_as_nobody(&dir, &["submit", "--wait", "--", "true"]).code, 0);
    let seen = node.run_as_nobody(&dir, &["history", "--json"]).stdout;
    let seen: Value = serde_json::from_str(&seen).unwrap();
    assert_eq!(seen.as_array().unwrap().iter().map(|job| &job["id"]).collect::<Vec<_>>(), [2]);
    assert_eq!(node.run_as_nobody(&dir, &["history", "--user", "root"]).stdout, "no jobs\n");
    assert_eq!(history(&node, &["--user", "nobody"]).len(), 1);
    assert_eq!(history(&node, &[]).len(), 2);
}

/// Returns the ids in an accounting file, in order.
fn accounted(node: &Node, name: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(node.state_dir().join(name)).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()?["job"].as_u64()).collect()
}

fn job_is_in_the_accounting_file_once_whatever_fails() {
    let mut node = Node::new("");
    let file = node.state_dir().join("accounting.jsonl");
    let end = |node: &Node| {
        let job = node.submit_shell("true");
        node.wait(job, "done");
        job
    };
    let first = end(&node);
    wait_for("the first account", || (accounted(&node, "accounting.jsonl") == [first]).then_some(()));
    // The operator has rotated and compressed the file, so the daemon can no longer read it.
    std::fs::rename(&file, node.state_dir().join("accounting.jsonl.1.gz")).unwrap();
    node.kill_and_restart_daemon();
    let second = end(&node);
    wait_for("the second account", || (accounted(&node, "accounting.jsonl") == [second]).then_some(()));
    // Accounts that cannot be written now are written later.
    std::fs::rename(&file, node.state_dir().join("accounting.jsonl.1")).unwrap();
    std::fs::create_dir(&file).unwrap();
    let third = end(&node);
    std::fs::remove_dir(&file).unwrap();
    let fourth = end(&node);
    wait_for("both accounts", || (accounted(&node, "accounting.jsonl") == [third, fourth]).then_some(()));
    node.kill_and_restart_daemon();
    assert_eq!(accounted(&node, "accounting.jsonl"), [third, fourth]);
    assert_eq!(history(&node, &[]).len(), 3, "with the file that was rotated last");
    // The journal is restored from a copy, in which one job is still running and the next does not exist yet.
    let fifth = node.submit_shell("while ! [ -e end ]; do sleep 0.02; done");
    node.wait(fifth, "running");
    let journal = node.state_dir().join("journal");
    let copy = std::fs::read(&journal).unwrap();
    node.write("end", "");
    node.wait(fifth, "done");
    let sixth = end(&node);
    let once = [third, fourth, fifth, sixth];
    wait_for("four accounts", || (accounted(&node, "accounting.jsonl") == once).then_some(()));
    node.stop_daemon(Signal::KILL);
    std::fs::write(&journal, copy).unwrap();
    node.start_daemon();
    for job in [fifth, sixth] {
        node.wait(job, "done");
    }
    let seventh = end(&node);
    wait_for("the last account", || {
        (accounted(&node, "accounting.jsonl").last() == Some(&seventh)).then_some(())
    });
    assert_eq!(accounted(&node, "accounting.jsonl"), [&once[..], &[seventh]].concat());
}
