//! A daemon whose disk is full or read-only: it refuses new jobs, and loses none.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use xlaunch_tests::{Node, Process, requirements, spawn_daemon, wait_for};

xlaunch_harness::tests! {
    needs requirements::mount_namespace:
    full_disk_refuses_jobs_and_loses_none,
    job_that_fills_the_disk_is_killed_with_the_reason_and_its_directory_removed,
    read_only_state_directory_is_named_with_what_to_do;
}

/// A node with its state on a tmpfs of 1 MiB, in a mount namespace that only the daemon and its agents share.
struct SmallDisk {
    node: Node,
    /// Keeps the namespace alive.
    holder: Process,
}

impl SmallDisk {
    fn new() -> Self {
        let mut node = Node::new("");
        node.stop_daemon(Signal::TERM);
        let mut holder = Command::new("unshare");
        let mount = "mount -t tmpfs -o size=1m,mode=711 none \"$0\" && echo mounted >&2 && exec sleep 1000";
        let holder = Process::spawn(holder.args(["-m", "sh", "-c", mount]).arg(node.state_dir()));
        holder.wait_for_stderr("mounted");
        Self { node, holder }
    }

    fn start_daemon(&self) -> Process {
        let daemon = self.node.daemon_command();
        let mut command = Command::new("nsenter");
        command.args(["-m", "-t", &self.holder.pid().to_string(), "--"]);
        command.arg(daemon.get_program()).args(daemon.get_args()).current_dir("/");
        spawn_daemon(&mut command)
    }

    /// Returns the path, seen from outside the namespace, of a file that takes all space.
    fn filler(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.pid()));
        root.join(self.node.state_dir().strip_prefix("/").unwrap()).join("filler")
    }

    fn fill(&self) {
        let mut file = std::fs::File::create(self.filler()).unwrap();
        while file.write_all(&[0; 512]).is_ok() {}
    }

    fn free(&self) {
        let _ = std::fs::remove_file(self.filler());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Agents that are waiting for space can then exit.
        self.free();
    }
}

fn full_disk_refuses_jobs_and_loses_none() {
    let disk = SmallDisk::new();
    let (node, daemon) = (&disk.node, disk.start_daemon());
    let running = node.submit_shell("while ! [ -e go ]; do sleep 0.05; done; seq 100000; touch over; exit 3");
    node.wait(running, "running");
    assert_eq!(node.run(&["drain"]).code, 0);
    let queued = node.submit_shell("echo ran >> ran");
    disk.fill();
    let assert_refused = || {
        let run = node.run(&["submit", "--", "true"]);
        assert!(run.code != 0 && run.stderr.contains("No space left on device"), "{}", run.stderr);
    };
    assert_refused();
    node.write("go", "");
    wait_for("the end of the job's script", || node.path().join("over").exists().then_some(()));
    // The job ends regardless: space for its result was reserved.
    assert_eq!(node.wait(running, "failed")["exit_code"], 3);
    // The next daemon also finds a full disk.
    daemon.signal(Signal::KILL);
    daemon.wait();
    let daemon = disk.start_daemon();
    node.run(&["drain", "--undo"]);
    for _ in 0..20 {
        let states = [running, queued].map(|job| node.job(job)["state"].clone());
        assert_eq!(states[0], "failed", "{states:?}");
        assert!(["queued", "starting", "running", "done"].iter().any(|s| states[1] == *s), "{states:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    disk.free();
    assert_eq!(node.wait(running, "failed")["exit_code"], 3);
    assert_eq!(node.run(&["drain", "--undo"]).code, 0);
    node.wait(queued, "done");
    let next = node.submit_shell("echo ran >> ran");
    node.wait(next, "done");
    assert_eq!(node.lines("ran").len(), 2);
    daemon.signal(Signal::KILL);
    daemon.wait();
    let _daemon = disk.start_daemon();
    let states = [running, queued, next].map(|job| node.job(job)["state"].clone());
    assert_eq!(states, ["failed", "done", "done"]);
}

/// Directories of running jobs are measured every 10 s, all others at the start of the daemon and every 5 min.
fn job_that_fills_the_disk_is_killed_with_the_reason_and_its_directory_removed() {
    let disk = SmallDisk::new();
    let (node, daemon) = (&disk.node, disk.start_daemon());
    let large = node.submit_shell("head -c 2000000 /dev/zero; exec sleep 1000");
    let reason = "its directory holds more than 0.2 MiB, the part of the node's disk that a job may use";
    assert_eq!(node.wait(large, "failed")["reason"], reason);
    // Space for the journal was reserved, so the next daemon knows it, too.
    daemon.signal(Signal::KILL);
    daemon.wait();
    let _daemon = disk.start_daemon();
    let found = node.job(large);
    assert_eq!((&found["state"], &found["reason"]), (&"failed".into(), &reason.into()));
    let next = wait_for("space for another job", || {
        let run = node.run(&["submit", "--", "true"]);
        run.stdout.trim().strip_prefix("job ")?.parse().ok()
    });
    node.wait(next, "done");
}

fn read_only_state_directory_is_named_with_what_to_do() {
    let mut node = Node::new("");
    node.stop_daemon(Signal::TERM);
    let daemon = node.daemon_command();
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", "mount -t tmpfs -o ro,mode=755 none \"$0\" && exec \"$@\""])
        .arg(node.state_dir());
    let output = Process::spawn(command.arg(daemon.get_program()).args(daemon.get_args())).wait();
    let named = format!("failed to use {} as the state directory: ", node.state_dir().display());
    for text in [named.as_str(), "Read-only file system", "set daemon.state_dir to another directory"] {
        assert!(output.code == 2 && output.stderr.contains(text), "{text} in {}", output.stderr);
    }
}
