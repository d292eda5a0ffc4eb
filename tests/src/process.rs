//! `xlaunch` as a child process, and what can be seen of processes from outside.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process};
use tokio::signal::{self, unix::SignalKind};

use crate::wait_for;

/// The `xlaunch` of this workspace, built with the profile that the tests were built with.
///
/// # Panics
/// If it does not build.
pub fn xlaunch() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["build", "--quiet", "--package", "xlaunch", "--bin", "xlaunch"]);
        command.args(["--message-format", "json"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        if !cfg!(debug_assertions) {
            command.arg("--release");
        }
        let output = command.stderr(Stdio::inherit()).output().expect("cargo runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let messages = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let found = messages
            .filter(|message| message["target"]["name"] == "xlaunch")
            .find_map(|message| message["executable"].as_str().map(PathBuf::from));
        found.expect("xlaunch builds")
    })
}

/// How a process ended, and what it wrote.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Exit code, or 128 + n for signal n.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// A running `xlaunch`, in a process group of its own.
#[derive(Debug)]
pub struct Running {
    child: Child,
    stdout: Option<(Text, JoinHandle<()>)>,
    stderr: Option<(Text, JoinHandle<()>)>,
}

type Text = Arc<Mutex<String>>;

impl Running {
    /// Starts the command with its output collected.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(command: &mut Command) -> Self {
        default_signals();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("the command starts");
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        Self { child, stdout, stderr }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has not ended.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// What it has written to standard error so far.
    pub fn stderr(&self) -> String {
        self.stderr.as_ref().map(|(text, _)| locked(text)).unwrap_or_default()
    }

    /// Waits until standard error holds `text`.
    pub fn wait_for_stderr(&self, text: &str) {
        wait_for(&format!("{text:?} on stderr"), || self.stderr().contains(text).then_some(()));
    }

    /// Sends a signal to the process, not to its group.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.rustix_pid(), signal);
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Finished {
        let status = wait_for("the end of xlaunch", || self.child.try_wait().expect("it is our child"));
        let text = |stream: Option<(Text, JoinHandle<()>)>| {
            let (text, thread) = stream.expect("output is collected once");
            thread.join().expect("the collector ends");
            locked(&text)
        };
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        Finished { code, stdout: text(self.stdout.take()), stderr: text(self.stderr.take()) }
    }

    fn rustix_pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            for child in children(self.pid()) {
                kill_group(child);
            }
            kill_group(self.pid());
            let _ = self.child.wait();
        }
    }
}

/// Whoever started the tests, by `nohup` or in the background, may have had them ignore signals, which children inherit. What
/// has a handler here has none after exec, and is not ignored: so those that are ignored get one.
fn default_signals() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _context = runtime.enter();
        for ignored in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM] {
            if mask >> (ignored.as_raw() - 1) & 1 == 1 {
                // The handler stays when its stream is dropped.
                drop(signal::unix::signal(SignalKind::from_raw(ignored.as_raw())).expect("a handler"));
            }
        }
    });
}

fn kill_group(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may be gone.
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

fn locked(text: &Text) -> String {
    text.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

fn collect(mut stream: impl Read + Send + 'static) -> (Text, JoinHandle<()>) {
    let text = Text::default();
    let ours = text.clone();
    let thread = std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(len @ 1..) = stream.read(&mut buffer) {
            let piece = String::from_utf8_lossy(&buffer[..len]);
            ours.lock().unwrap_or_else(PoisonError::into_inner).push_str(&piece);
        }
    });
    (text, thread)
}

/// Whether a process exists that is no zombie.
pub fn alive(pid: u32) -> bool {
    let exists =
        i32::try_from(pid).ok().and_then(Pid::from_raw).is_some_and(|pid| test_kill_process(pid).is_ok());
    exists && state(pid).is_some_and(|(state, _)| state != 'Z')
}

/// Processes whose parent is `pid`, without the guard of a launch.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let ours = pids.filter(|child| state(*child).is_some_and(|(_, parent)| parent == pid));
    ours.filter(|child| name(*child) != "launch-reaper").collect()
}

/// Name of a process's program, or what it calls itself.
pub fn name(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// State letter and parent of a process, from `/proc/PID/stat`.
fn state(pid: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, parentheses too.
    let mut fields = stat.rsplit(") ").next()?.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
