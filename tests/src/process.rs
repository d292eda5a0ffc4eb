//! `xlaunch` as a child process, and inspection of processes from outside.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process};
use tokio::signal::{self, unix::SignalKind};

use crate::wait_for;

/// Variable with another `xlaunch` to test or measure instead of the release build, such as one of an earlier release.
pub const BINARY_VARIABLE: &str = "XLAUNCH_TEST_BINARY";

/// Variable with another `xlaunch` with fail points instead of the one that is built on demand.
const FAIL_BINARY_VARIABLE: &str = "XLAUNCH_TEST_FAIL_BINARY";

/// Arguments of cargo that build what users run.
const RELEASE: [&str; 3] = ["--package", "xlaunch", "--release"];

/// Returns the release build of `xlaunch`, regardless of the profile of the tests: it is what users run, and much
/// faster in training.
///
/// # Panics
/// If the build fails.
pub fn xlaunch_path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| named_by(BINARY_VARIABLE).unwrap_or_else(|| build(&RELEASE)))
}

/// Returns a build of `xlaunch` with fail points, in a profile for tests.
///
/// # Panics
/// If the build fails.
pub fn xlaunch_with_fail_points() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        named_by(FAIL_BINARY_VARIABLE).unwrap_or_else(|| {
            // All packages are selected, so that dependencies have the features with which the tests were built.
            let profile = if cfg!(debug_assertions) { "dev" } else { "bench" };
            let built = build(&["--workspace", "--features", "xlaunch/fail", "--profile", profile]);
            let copy = built.with_file_name("xlaunch-fail");
            let unfinished = copy.with_extension(std::process::id().to_string());
            std::fs::copy(&built, &unfinished).expect("copy xlaunch");
            std::fs::rename(&unfinished, &copy).expect("rename the copy");
            if xlaunch_path() == built {
                // The build has replaced the binary under test, so build that again.
                build(&RELEASE);
            }
            copy
        })
    })
}

/// Returns the path in a variable. It is made absolute, as processes are started in other directories.
fn named_by(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(|path| std::path::absolute(path).expect("find the current directory"))
}

/// Builds `xlaunch` with these arguments of cargo. Returns its path.
fn build(arguments: &[&str]) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--bin", "xlaunch"]).args(arguments);
    command.args(["--message-format", "json"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    forget_package(&mut command);
    let output = command.stderr(Stdio::inherit()).output().expect("run cargo");
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let path = messages
        .filter(|message| message["target"]["name"] == "xlaunch")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    path.expect("build xlaunch")
}

/// Removes variables that cargo sets for the package of this test, for commands that build. If they were passed on,
/// build scripts that read such variables of their own package, like that of ring, would run again, and everything that
/// depends on them would be rebuilt.
pub fn forget_package(command: &mut Command) {
    let variables = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in variables.filter(|it| it.starts_with("CARGO_MANIFEST_") || it.starts_with("CARGO_PKG_")) {
        command.env_remove(name);
    }
}

/// Result of a finished process.
#[derive(Clone, Debug)]
pub struct Output {
    /// Exit code, or 128 + n for signal n.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Returns the failure report of a launch, which is the last part of stderr; empty if there is none.
    pub fn failure_report(&self) -> &str {
        self.stderr.split_once("the job failed").map_or("", |(_, report)| report)
    }

    /// Returns the part of the failure report about the rank that failed first.
    pub fn root_cause(&self) -> &str {
        self.failure_report().split("then:").next().unwrap_or_default()
    }

    /// Returns the part of the failure report about ranks that failed or were stopped afterwards.
    pub fn consequences(&self) -> &str {
        self.failure_report().split_once("then:").map_or("", |(_, rest)| rest)
    }

    /// Returns whether stderr reports exactly this exit code of a worker.
    pub fn reports_exit_code(&self, code: i32) -> bool {
        self.stderr.split("exit code ").skip(1).any(|rest| {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| &rest[..end]);
            digits.parse() == Ok(code)
        })
    }
}

/// A child in its own process group, with its output collected. Dropping it kills its group and those of its children.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// Id of the program itself, if `child` only enters namespaces and waits for it.
    pid: u32,
    stdout: Option<Collector>,
    stderr: Option<Collector>,
}

impl Process {
    /// Starts the command without input.
    ///
    /// # Panics
    /// If it does not start.
    pub fn spawn(command: &mut Command) -> Self {
        reset_ignored_signals();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", command.get_program().display()));
        let stdout = child.stdout.take().map(Collector::spawn);
        let stderr = child.stderr.take().map(Collector::spawn);
        Self { pid: child.id(), child, stdout, stderr }
    }

    /// Starts a command that enters a PID namespace, and therefore forks: signals go to its child, a program with its
    /// own session. See [`crate::Host::command`].
    ///
    /// # Panics
    /// If it does not start.
    pub fn spawn_inside(command: &mut Command) -> Self {
        let mut process = Self::spawn(command);
        let entered = wait_for("a process in the namespaces", || {
            let child = children(process.child.id()).first().copied();
            child.map(Some).or_else(|| (!process.is_running()).then_some(None))
        });
        process.pid = entered.unwrap_or(process.pid);
        process
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns whether it has not exited.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Returns the standard output so far.
    pub fn stdout(&self) -> String {
        self.stdout.as_ref().map(Collector::text).unwrap_or_default()
    }

    /// Returns the standard error so far.
    pub fn stderr(&self) -> String {
        self.stderr.as_ref().map(Collector::text).unwrap_or_default()
    }

    /// Waits until standard error contains `text`.
    ///
    /// # Panics
    /// If the process exits without writing it.
    pub fn wait_for_stderr(&self, text: &str) {
        wait_for(&format!("{text:?} on stderr"), || {
            // This order matters: the last output may be collected after the exit.
            let is_complete = self.stderr.as_ref().is_none_or(|stderr| stderr.thread.is_finished());
            let found = self.stderr().contains(text);
            assert!(
                found || !is_complete || is_alive(self.pid()),
                "exited without {text:?}: {}",
                self.stderr()
            );
            found.then_some(())
        });
    }

    /// Sends a signal to the process, but not to its group.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = to_pid(self.pid) {
            let _ = kill_process(pid, signal);
        }
        // The process that has entered namespaces for it stops together with it, and must continue to see its end.
        if let (Signal::KILL, Some(outer)) = (signal, to_pid(self.child.id())) {
            let _ = kill_process(outer, Signal::CONT);
        }
    }

    /// Waits until it has exited.
    pub fn wait(mut self) -> Output {
        let status = wait_for("the process to exit", || self.child.try_wait().expect("wait for a child"));
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        let [stdout, stderr] = [self.stdout.take(), self.stderr.take()]
            .map(|stream| stream.expect("output is taken once").join());
        Output { code, stdout, stderr }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.is_running() {
            let children = children(self.pid);
            // Kill it before its children: a daemon would start the next job.
            kill_group(self.pid);
            // It may not have its own group yet.
            self.signal(Signal::KILL);
            children.into_iter().for_each(kill_group);
            let _ = self.child.wait();
        }
    }
}

/// A thread that reads a stream to its end.
#[derive(Debug)]
struct Collector {
    text: Arc<Mutex<String>>,
    thread: JoinHandle<()>,
}

impl Collector {
    fn spawn(mut stream: impl Read + Send + 'static) -> Self {
        let text = Arc::<Mutex<String>>::default();
        let shared = text.clone();
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = stream.read(&mut buffer) {
                let piece = String::from_utf8_lossy(&buffer[..len]);
                shared.lock().unwrap_or_else(PoisonError::into_inner).push_str(&piece);
            }
        });
        Self { text, thread }
    }

    fn text(&self) -> String {
        self.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn join(self) -> String {
        let Self { text, thread } = self;
        thread.join().expect("collect output");
        text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Gives ignored signals a handler. Tests started by `nohup` or in the background of a shell inherit ignored signals,
/// and would pass them on to their children. A signal with a handler has its default action again after exec.
fn reset_ignored_signals() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("start a runtime");
        let context = runtime.enter();
        for ignored in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM] {
            if mask >> (ignored.as_raw() - 1) & 1 == 1 {
                // tokio keeps the handler when the stream is dropped.
                let kind = SignalKind::from_raw(ignored.as_raw());
                drop(signal::unix::signal(kind).expect("install a signal handler"));
            }
        }
        drop(context);
        // Unlike a drop, this is allowed inside another runtime.
        runtime.shutdown_background();
    });
}

fn to_pid(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

fn kill_group(pid: u32) {
    if let Some(pid) = to_pid(pid) {
        // It may have exited already.
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

/// Sends a signal to a process of the test.
///
/// # Panics
/// If it does not exist.
pub fn send_signal(pid: u32, signal: Signal) {
    let pid = to_pid(pid).expect("a valid process id");
    kill_process(pid, signal).expect("signal a process of this test");
}

/// Suspends a process of the test, and returns when all of its threads have stopped: system calls in progress are
/// completed first.
///
/// # Panics
/// If it does not exist, or does not stop.
pub fn suspend(pid: u32) {
    send_signal(pid, Signal::STOP);
    let is_running = |task: &Path| {
        let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
        // A thread that has ended has no state.
        state_and_parent(&stat).is_some_and(|(state, _)| !matches!(state, 'T' | 'Z' | 'X'))
    };
    wait_for("a process to stop", || {
        let mut tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        (!tasks.any(|task| is_running(&task.path()))).then_some(())
    });
}

/// Returns a command that runs this one from a shell, after some statements.
pub fn in_shell(statements: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{statements} && exec \"$@\""), "sh"]);
    shell.arg(command.get_program()).args(command.get_args());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.get_current_dir().map(|dir| shell.current_dir(dir));
    shell
}

/// Returns whether a process exists and is not a zombie.
pub fn is_alive(pid: u32) -> bool {
    let exists = to_pid(pid).is_some_and(|pid| test_kill_process(pid).is_ok());
    exists && state_and_parent(&stat(pid)).is_some_and(|(state, _)| state != 'Z')
}

/// Returns the children of a launcher that are its workers, without its guard process.
pub fn children(pid: u32) -> Vec<u32> {
    all_children(pid).filter(|child| !is_reaper(*child)).collect()
}

/// Returns the guard process of a launcher, if it is alive.
pub fn reaper(pid: u32) -> Option<u32> {
    all_children(pid).find(|child| is_reaper(*child) && is_alive(*child))
}

fn all_children(pid: u32) -> impl Iterator<Item = u32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(move |child| state_and_parent(&stat(*child)).is_some_and(|(_, parent)| parent == pid))
}

/// Returns whether a process is a guard. It names itself a while after its start, and has no arguments after its end.
fn is_reaper(pid: u32) -> bool {
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    arguments.starts_with(b"launch-reaper\0") || process_name(pid) == "launch-reaper"
}

/// Returns a process's name, as shown by `ps`.
pub fn process_name(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// Returns the contents of `/proc/PID/stat`; empty if the process does not exist.
fn stat(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default()
}

/// Returns the state letter and the parent of a process or thread, from its `stat`.
fn state_and_parent(stat: &str) -> Option<(char, u32)> {
    // The preceding name in parentheses may itself contain parentheses and spaces.
    let mut fields = stat.rsplit(") ").next()?.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Returns whether a program of this name is in `PATH`.
pub fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guard_that_has_not_named_itself_yet_is_not_a_worker() {
        let mut command = Command::new("sh");
        let mut guard =
            command.arg0("launch-reaper").args(["-c", "read _"]).stdin(Stdio::piped()).spawn().unwrap();
        assert!(!children(std::process::id()).contains(&guard.id()));
        drop(guard.stdin.take());
        guard.wait().unwrap();
    }
}
