//! Linux namespaces that exist as long as their handle.
//!
//! A process started by `unshare` keeps them alive: `cat`, which waits for the end of its input, a pipe from this
//! process. The namespaces have no name in `/run/netns`, so nothing has to be removed: when the handle is dropped, or
//! this process dies for any reason, `cat` reads the end of its input and exits. The kernel then kills all processes of
//! its PID namespace and removes the network with its interfaces.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::children;

/// Kinds of namespaces of a host, as options of `unshare` and `nsenter`, and as files in `/proc/PID/ns`.
const OF_HOST: &[(&str, &str)] =
    &[("net", "net"), ("uts", "uts"), ("ipc", "ipc"), ("mount", "mnt"), ("pid", "pid_for_children")];
const OF_SWITCH: &[(&str, &str)] = &[("net", "net")];

/// A set of namespaces and the process that keeps them alive.
#[derive(Debug)]
pub(super) struct Namespaces {
    kinds: &'static [(&'static str, &'static str)],
    keeper: Child,
}

impl Namespaces {
    /// Creates the namespaces of a host (network, host name, mounts, processes, System V IPC) and runs a shell script
    /// in them.
    pub(super) fn of_host(setup: &str) -> Result<Self, String> {
        Self::new(OF_HOST, setup)
    }

    /// Creates a network namespace alone.
    pub(super) fn of_switch() -> Result<Self, String> {
        Self::new(OF_SWITCH, "")
    }

    fn new(kinds: &'static [(&'static str, &'static str)], setup: &str) -> Result<Self, String> {
        let mut unshare = Command::new("unshare");
        unshare.args(kinds.iter().map(|(option, _)| format!("--{option}")));
        if kinds.iter().any(|(option, _)| *option == "pid") {
            unshare.args(["--fork", "--kill-child", "--mount-proc"]);
        }
        // `cat` is PID 1, which inherits orphans. Because it ignores SIGCHLD, the kernel reaps them.
        let script = format!("set -e\n{setup}\necho ready\nexec env --ignore-signal=CHLD cat > /dev/null\n");
        unshare.args(["sh", "-c", &script]);
        unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut keeper = unshare.spawn().map_err(|error| format!("`unshare`: {error}"))?;
        let mut line = String::new();
        if let Some(stdout) = keeper.stdout.take() {
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        if line != "ready\n" {
            let output = keeper.wait_with_output().map_err(|error| error.to_string())?;
            return Err(format!("`unshare`: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        Ok(Self { kinds, keeper })
    }

    /// Returns a process id with which `ip` refers to the network namespace.
    pub(super) fn pid(&self) -> u32 {
        self.keeper.id()
    }

    /// Returns the process id, as seen from outside, of the process that is PID 1 inside.
    pub(super) fn init(&self) -> u32 {
        children(self.keeper.id()).first().copied().unwrap_or(self.keeper.id())
    }

    /// Returns a file in `/proc/PID/ns` that represents the namespace of the kind given by the file's name.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        format!("/proc/{}/ns/{name}", self.keeper.id()).into()
    }

    /// Returns `nsenter` into all of them; add further options, or program and arguments.
    pub(super) fn enter(&self) -> Command {
        let mut nsenter = Command::new("nsenter");
        nsenter.args(
            self.kinds.iter().map(|(option, file)| format!("--{option}={}", self.file(file).display())),
        );
        nsenter
    }

    /// Runs a program inside to its end, with this input.
    pub(super) fn run(&self, program: &[&str], input: &str) -> Result<(), String> {
        let mut command = self.enter();
        command.args(program).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let failed = |why: &str| Err(format!("`{}`: {why}", program.join(" ")));
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return failed(&error.to_string()),
        };
        if let Some(mut stdin) = child.stdin.take() {
            // A program that ends early gives the reason on stderr.
            let _ = stdin.write_all(input.as_bytes());
        }
        match child.wait_with_output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => failed(String::from_utf8_lossy(&output.stderr).trim()),
            Err(error) => failed(&error.to_string()),
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        // Returns when all processes inside have ended.
        let _ = self.keeper.wait();
    }
}
