//! A node's daemon in a directory of its own, with its jobs. Nothing of it outlives the test.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{Finished, Running, alive, wait_for, xlaunch};

/// A node for tests.
#[derive(Debug)]
pub struct Node {
    dir: TempDir,
    daemon: Option<Running>,
}

impl Node {
    /// Starts a daemon that takes commands and jobs of the user who runs the tests; `jobs` are more lines of `[jobs]`.
    ///
    /// # Panics
    /// If there is no temporary directory, or the daemon does not start.
    pub fn new(jobs: &str) -> Self {
        Self::with_gpus(&[], jobs)
    }

    /// The same with these GPUs, each a line as `nvml.c` says; an NVML of our own tells of them.
    ///
    /// # Panics
    /// As [`Self::new`], or if there is no C compiler.
    pub fn with_gpus(gpus: &[&str], jobs: &str) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        // Jobs of other users pass through.
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("it is ours");
        let mut node = Self { dir, daemon: None };
        if !gpus.is_empty() {
            node.set_gpus(gpus);
            let library = node.path().join("libnvidia-ml.so.1");
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/nvml.c");
            let built = Command::new("cc").args(["-shared", "-fPIC", source, "-o"]).arg(library).status();
            assert!(built.expect("a C compiler").success());
        }
        node.configure(jobs);
        node.start();
        node
    }

    /// Replaces the configuration.
    pub fn configure(&self, jobs: &str) {
        let workers = if jobs.contains("cpu_workers") { "" } else { "cpu_workers = 64\n" };
        let text = format!("[jobs]\nallow_root = true\nallow_commands = true\n{workers}{jobs}\n");
        self.write("daemon.toml", &text);
    }

    /// Replaces the GPUs.
    pub fn set_gpus(&self, gpus: &[&str]) {
        // In one step: the daemon may be reading them.
        let new = self.write("gpus.new", &(gpus.join("\n") + "\n"));
        std::fs::rename(new, self.gpus()).expect("a file in the temporary directory");
    }

    fn gpus(&self) -> PathBuf {
        self.path().join("gpus")
    }

    /// The daemon's directory, which jobs are submitted from.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Where the daemon keeps things.
    pub fn state(&self) -> PathBuf {
        self.path().join("state")
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.path().join("xlaunch.sock")
    }

    /// Writes a file.
    ///
    /// # Panics
    /// If that fails.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text).expect("a file in the temporary directory");
        path
    }

    /// Lines of a file; none if it is not there.
    pub fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// xlaunch, which finds the GPUs of this node if it has any.
    fn xlaunch(&self) -> Command {
        let mut command = Command::new(xlaunch());
        if self.gpus().exists() {
            command.env("LD_LIBRARY_PATH", self.path()).env("XLAUNCH_TEST_NVML", self.gpus());
        }
        command
    }

    /// The command that starts a daemon here.
    pub fn command(&self) -> Command {
        let mut command = self.xlaunch();
        command.args(["daemon", "--foreground", "--config"]).arg(self.path().join("daemon.toml"));
        command.arg("--state-dir").arg(self.state()).arg("--socket").arg(self.socket());
        command.current_dir("/").env_remove("XLAUNCH_SOCKET");
        command
    }

    /// Starts a daemon and waits until it takes calls.
    pub fn start(&mut self) {
        let mut daemon = Running::start(&mut self.command());
        wait_for("the daemon", || {
            assert!(daemon.runs(), "{}", daemon.stderr());
            daemon.stderr().contains("listening on").then_some(())
        });
        self.daemon = Some(daemon);
    }

    /// The daemon that runs.
    ///
    /// # Panics
    /// If none does.
    pub fn daemon(&self) -> &Running {
        self.daemon.as_ref().expect("a daemon runs")
    }

    /// Ends the daemon by a signal.
    pub fn end(&mut self, signal: Signal) -> Finished {
        let daemon = self.daemon.take().expect("a daemon runs");
        daemon.signal(signal);
        daemon.finish()
    }

    /// Kills the daemon and starts another.
    pub fn kill_and_start(&mut self) {
        self.end(Signal::KILL);
        self.start();
    }

    /// A command line of this node's clients.
    pub fn client(&self, args: &[&str]) -> Command {
        let mut command = self.xlaunch();
        command.args(args).current_dir(self.path()).env("XLAUNCH_SOCKET", self.socket());
        command.env("XDG_RUNTIME_DIR", self.path());
        command
    }

    /// Runs one.
    pub fn run(&self, args: &[&str]) -> Finished {
        Running::start(&mut self.client(args)).finish()
    }

    /// Submits a job.
    ///
    /// # Panics
    /// If it is not taken.
    pub fn submit(&self, args: &[&str]) -> u64 {
        let run = self.run(&[&["submit"], args].concat());
        let job = run.stdout.trim().strip_prefix("job ").and_then(|job| job.parse().ok());
        job.unwrap_or_else(|| panic!("{}{}", run.stdout, run.stderr))
    }

    /// Submits a shell script.
    pub fn submit_shell(&self, script: &str) -> u64 {
        self.submit(&["--", "sh", "-c", script])
    }

    /// A job, as `xlaunch status --json` shows it.
    ///
    /// # Panics
    /// If there is none.
    pub fn job(&self, job: u64) -> Value {
        let run = self.run(&["status", &job.to_string(), "--json"]);
        serde_json::from_str(&run.stdout).unwrap_or_else(|_| panic!("{}{}", run.stdout, run.stderr))
    }

    /// Waits until the job is in this state.
    pub fn wait(&self, job: u64, state: &str) -> Value {
        wait_for(&format!("job {job} to be {state}"), || {
            Some(self.job(job)).filter(|job| job["state"] == state)
        })
    }

    /// Process ids of agents that run.
    pub fn agents(&self) -> Vec<u32> {
        let entries = std::fs::read_dir(self.state().join("jobs")).into_iter().flatten().flatten();
        let agents = entries.filter_map(|entry| {
            let text = std::fs::read(entry.path().join("agent/agent.json")).ok()?;
            let identity: Value = serde_json::from_slice(&text).ok()?;
            u32::try_from(identity["pid"].as_u64()?).ok()
        });
        agents.filter(|pid| alive(*pid)).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.daemon.take());
        // Guards end what agents have started.
        for agent in self.agents() {
            if let Some(pid) = i32::try_from(agent).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}
