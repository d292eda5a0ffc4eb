//! A node's daemon in a temporary directory, with its jobs. No process outlives the test.

use std::fs::{DirEntry, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::{Output, Process, c_library, is_alive, wait_for, xlaunch_path};

/// User and group of the second user, for tests that run as root.
pub const NOBODY: u32 = 65_534;

/// Configuration of a small training job on `text.txt`, without `steps`; its run directory is `runs/tiny`.
const TINY_JOB: &str = "[model]\npreset = \"byte-tiny\"\n[data]\ntrain = [\"text.txt\"]\n\
    [checkpoint]\nevery = 0\n[train]\nbatch = 1\nwarmup = 2\neval_every = 0\nsample = 0\n";

/// A node for tests.
#[derive(Debug)]
pub struct Node {
    dir: TempDir,
    daemon: Option<Process>,
}

impl Node {
    /// Creates a node without GPUs that accepts commands and jobs of the user who runs the tests. `jobs` is added to
    /// the `[jobs]` section of its configuration.
    ///
    /// # Panics
    /// Here and below: if a file cannot be written or a process does not start.
    pub fn new(jobs: &str) -> Self {
        Self::with_gpus(&[], jobs)
    }

    /// Same as [`Self::new`], with these GPUs, simulated by `nvml.c`, which describes the format of a line.
    ///
    /// # Panics
    /// The same as for [`Self::new`], or if there is no C compiler.
    pub fn with_gpus(gpus: &[&str], jobs: &str) -> Self {
        let dir = TempDir::new().expect("create a temporary directory");
        // Other users need to reach the socket.
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("set permissions");
        let mut node = Self { dir, daemon: None };
        if !gpus.is_empty() {
            node.set_gpus(gpus);
            build_nvml(node.path());
        }
        node.configure(jobs);
        node.start_daemon();
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
        // Renamed into place, because the daemon may be reading the file.
        let new = self.write("gpus.new", &(gpus.join("\n") + "\n"));
        std::fs::rename(new, self.gpus_file()).expect("rename a file");
    }

    fn gpus_file(&self) -> PathBuf {
        self.path().join("gpus")
    }

    /// Returns the path for the program that examines simulated GPUs instead of a worker.
    pub fn examining_worker(&self) -> PathBuf {
        self.path().join("worker")
    }

    /// Returns the directory from which jobs are submitted.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the daemon's state directory.
    pub fn state_dir(&self) -> PathBuf {
        self.path().join("state")
    }

    /// Returns the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.path().join("xlaunch.sock")
    }

    /// Lets [`NOBODY`] connect to the daemon, and creates a directory of that user.
    pub fn admit_nobody(&self) -> PathBuf {
        let chown = |path: &Path, group| {
            std::os::unix::fs::chown(path, Some(NOBODY), group).expect("change the owner as root");
        };
        chown(&self.socket(), None);
        let dir = self.path().join("nobody");
        std::fs::create_dir(&dir).expect("create a directory");
        chown(&dir, Some(NOBODY));
        dir
    }

    /// Writes a file.
    ///
    /// # Panics
    /// If that fails.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text).expect("write a file");
        path
    }

    /// Writes `tiny.toml` for a training job of this length, and its text. Returns the path of the configuration.
    pub fn write_tiny_job(&self, steps: u64) -> String {
        self.write("text.txt", &"It was a dark and stormy night. ".repeat(2000));
        self.write("tiny.toml", &format!("{TINY_JOB}steps = {steps}\n")).display().to_string()
    }

    /// Returns the lines of a file; none if it does not exist.
    pub fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Returns `xlaunch` with the simulated GPUs, if the node has any.
    fn xlaunch(&self) -> Command {
        let mut command = Command::new(xlaunch_path());
        if self.gpus_file().exists() {
            command.env("LD_LIBRARY_PATH", self.path());
        }
        command
    }

    /// Returns the command that starts a daemon in this node's directory.
    pub fn daemon_command(&self) -> Command {
        let mut command = self.xlaunch();
        command.args(["daemon", "--foreground", "--config"]).arg(self.path().join("daemon.toml"));
        command.arg("--state-dir").arg(self.state_dir()).arg("--socket").arg(self.socket());
        command.current_dir("/").env_remove("XLAUNCH_SOCKET");
        // Jobs do not inherit this variable.
        command.env("XLAUNCH_WORKER_PROGRAM", self.examining_worker());
        command
    }

    /// Starts the daemon and waits until it listens.
    pub fn start_daemon(&mut self) {
        self.daemon = Some(spawn_daemon(&mut self.daemon_command()));
    }

    /// Returns the running daemon.
    ///
    /// # Panics
    /// If it was stopped.
    pub fn daemon(&self) -> &Process {
        self.daemon.as_ref().expect("the daemon is running")
    }

    /// Stops the daemon with a signal.
    pub fn stop_daemon(&mut self, signal: Signal) -> Output {
        let daemon = self.daemon.take().expect("the daemon is running");
        daemon.signal(signal);
        daemon.wait()
    }

    /// Kills the daemon and starts it again.
    pub fn kill_and_restart_daemon(&mut self) {
        self.stop_daemon(Signal::KILL);
        self.start_daemon();
    }

    /// Returns a client command that talks to this node's daemon.
    pub fn client(&self, args: &[&str]) -> Command {
        let mut command = self.xlaunch();
        command.args(args).current_dir(self.path()).env("XLAUNCH_SOCKET", self.socket());
        command.env("XDG_RUNTIME_DIR", self.path());
        command
    }

    /// Runs a client command to its end.
    pub fn run(&self, args: &[&str]) -> Output {
        Process::spawn(&mut self.client(args)).wait()
    }

    /// Same as [`Self::run`], as [`NOBODY`], in a directory of that user.
    pub fn run_as_nobody(&self, dir: &Path, args: &[&str]) -> Output {
        Process::spawn(self.client(args).uid(NOBODY).gid(NOBODY).current_dir(dir)).wait()
    }

    /// Submits a job and returns its number.
    ///
    /// # Panics
    /// If it is refused.
    pub fn submit(&self, args: &[&str]) -> u64 {
        let output = self.run(&[&["submit"], args].concat());
        let job = output.stdout.trim().strip_prefix("job ").and_then(|job| job.parse().ok());
        job.unwrap_or_else(|| panic!("{}{}", output.stdout, output.stderr))
    }

    /// Submits a shell script.
    pub fn submit_shell(&self, script: &str) -> u64 {
        self.submit(&["--", "sh", "-c", script])
    }

    /// Returns the standard output of a client command with `--json`, parsed.
    ///
    /// # Panics
    /// If it is not JSON.
    pub fn json(&self, args: &[&str]) -> Value {
        let output = self.run(&[args, &["--json"]].concat());
        serde_json::from_str(&output.stdout)
            .unwrap_or_else(|_| panic!("{args:?}: {}{}", output.stdout, output.stderr))
    }

    /// Returns a job, as shown by `xlaunch status --json`.
    pub fn job(&self, job: u64) -> Value {
        self.json(&["status", &job.to_string()])
    }

    /// Waits until the job is in this state.
    ///
    /// # Panics
    /// If it ends in another one.
    pub fn wait(&self, job: u64, state: &str) -> Value {
        wait_for(&format!("job {job} to be {state}"), || {
            let shown = self.job(job);
            let reached = shown["state"] == state;
            let has_ended = ["done", "failed", "cancelled", "lost"].iter().any(|end| shown["state"] == *end);
            assert!(reached || !has_ended, "{shown:#}\n{}", self.run(&["logs", &job.to_string()]).stdout);
            reached.then_some(shown)
        })
    }

    /// Returns the process ids of running agents.
    pub fn agents(&self) -> Vec<u32> {
        let entries = std::fs::read_dir(self.state_dir().join("jobs")).into_iter().flatten().flatten();
        let agents = entries.filter_map(|entry| {
            let text = std::fs::read(entry.path().join("agent.json")).ok()?;
            let record: Value = serde_json::from_slice(&text).ok()?;
            u32::try_from(record["process"]["pid"].as_u64()?).ok()
        });
        agents.filter(|pid| is_alive(*pid)).collect()
    }
}

/// Builds `nvml.c` in a directory. The file `gpus` there lists the GPUs.
///
/// # Panics
/// If there is no C compiler.
pub fn build_nvml(dir: &Path) {
    c_library::build("nvml.c", &dir.join("libnvidia-ml.so.1"));
}

/// Starts a daemon with this command and waits until it listens.
///
/// # Panics
/// If it exits first.
pub fn spawn_daemon(command: &mut Command) -> Process {
    let mut daemon = Process::spawn(command);
    wait_for("the daemon to listen", || {
        assert!(daemon.is_running(), "{}", daemon.stderr());
        daemon.stderr().contains("listening on").then_some(())
    });
    daemon
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.daemon.take());
        // This includes agents that have not written their identity yet. Their reapers kill the workers.
        for pid in processes_with_argument(&self.state_dir()) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Returns the processes with this path, or a path below it, on their command line.
fn processes_with_argument(path: &Path) -> Vec<Pid> {
    let path = path.as_os_str().as_bytes();
    let has_argument = |entry: &DirEntry| {
        let command_line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        command_line.split(|byte| *byte == 0).any(|argument| argument.starts_with(path))
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter(has_argument);
    processes.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)).collect()
}
