//! Worker processes. A single thread that never ends starts them; pidfds report their exits; signals go to their
//! process groups.
//!
//! The kernel ties a child's parent-death signal to the thread that forked it, so a thread of a pool would kill its
//! workers when it retires. Contract: [`Spawner::spawn`] returns when the program runs or has failed to start; an exit
//! is reported exactly once; [`Worker::signal`] only initiates. A worker is reaped when its [`Worker`] is dropped:
//! until then neither its process id nor that of its group can be reused.
//!
//! ```text
//! Spawner --fork--> enter the cgroup, bind to CPUs --exec--> worker --fork--> its own children
//! process_tree    finds all processes of an attempt, by cgroup or by `membership`, and kills them
//! reaper          does the same from another process if xlaunch is killed
//! children        processes that this process started, and orphans that it adopted
//! affinity, port, gpu_memory                  prerequisites of a worker's start
//! output                                      the streams of a worker's output
//! helper                                      runs a helper program, such as a debugger
//! terminal                                    terminal input for workers, which are in the background
//! exit, oom                                   exit status, and OOM kills
//! ```

pub mod affinity;
mod cgroup;
pub mod children;
mod exit;
pub mod gpu_memory;
pub mod helper;
mod membership;
mod oom;
pub mod output;
pub mod port;
pub mod process_tree;
pub mod reaper;
#[allow(unsafe_code, reason = "hooks between fork and exec")]
pub mod sys;
pub mod terminal;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, kill_process_group, pidfd_open, waitid,
};
use rustix::thread::CpuSet;
use tokio::sync::oneshot;

use crate::system_errors::SYSTEM_CALL_HELP;
pub use children::{adopt_orphans, has_stopped_child, raise_open_file_limit, reap_orphans};
pub use exit::Exit;
pub use exit::short_signal_name;
pub use membership::run_of;
pub use oom::OomKills;

/// Flags of a worker's pidfd. `NONBLOCK` is not among them because it needs Linux 5.10.
const PIDFD_FLAGS: PidfdFlags = PidfdFlags::empty();

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    /// Process id, which is also that of its process group.
    pub pid: u32,
    pid_typed: Pid,
    pidfd: Arc<OwnedFd>,
}

/// A started process and its output.
#[derive(Debug)]
pub struct Spawned {
    pub worker: Worker,
    pub stdout: File,
    pub stderr: File,
}

/// Options of a start, in addition to the command.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// True if the worker gets xlaunch's standard input instead of `/dev/null`.
    pub inherit_stdin: bool,
    /// True if the worker's stdout is a terminal, because xlaunch's is one and shows its bytes unchanged.
    pub stdout_is_terminal: bool,
    /// CPUs to bind the worker to; `None` inherits xlaunch's affinity.
    pub cpus: Option<CpuSet>,
    /// True if the worker and its children ignore the signals that stop a job or announce its end. The agent acts on
    /// these signals, even if a scheduler sends them to every process.
    pub leave_signals_to_agent: bool,
    /// Descriptors that the worker inherits, under the same numbers.
    pub inherited: Vec<Arc<OwnedFd>>,
}

/// Checks that the kernel has the system calls that supervision needs, and that no seccomp profile refuses them.
///
/// # Errors
/// The error names the refused system call and how to allow it.
pub fn check_system_calls() -> std::io::Result<()> {
    let own = pidfd_open(getpid(), PidfdFlags::empty()).map_err(|error| refused("pidfd_open", error))?;
    let peek = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    match waitid(WaitId::PidFd(own.as_fd()), peek) {
        // The process is not its own child.
        Ok(_) | Err(Errno::CHILD) => Ok(()),
        Err(error) => Err(refused("waitid of a pidfd", error)),
    }
}

/// Builds the error about a system call that the kernel or a seccomp profile refuses.
fn refused(call: &str, error: Errno) -> std::io::Error {
    let text = format!("{call}: {error}; {SYSTEM_CALL_HELP}");
    std::io::Error::new(std::io::Error::from(error).kind(), text)
}

/// Starts processes from a thread of its own.
#[derive(Debug)]
pub struct Spawner {
    requests: std::sync::mpsc::Sender<Request>,
}

type Request = (Command, Options, oneshot::Sender<std::io::Result<Spawned>>);

impl Spawner {
    /// Starts the thread. It lives as long as the process, because its end would kill the workers.
    pub fn start() -> std::io::Result<Self> {
        let (requests, queue) = std::sync::mpsc::channel::<Request>();
        std::thread::Builder::new().name("spawner".into()).spawn(move || {
            for (command, options, reply) in &queue {
                // The caller is gone only if its future was dropped.
                let _ = reply.send(start(command, &options));
            }
            loop {
                std::thread::park();
            }
        })?;
        Ok(Self { requests })
    }

    /// Starts `command` in its own process group.
    pub async fn spawn(&self, command: Command, options: Options) -> std::io::Result<Spawned> {
        let gone = || std::io::Error::other("the spawner thread has ended");
        let (reply, spawned) = oneshot::channel();
        self.requests.send((command, options, reply)).map_err(|_| gone())?;
        spawned.await.map_err(|_| gone())?
    }
}

fn start(mut command: Command, options: &Options) -> std::io::Result<Spawned> {
    use std::os::unix::process::CommandExt;
    let stdin = if options.inherit_stdin { Stdio::inherit() } else { Stdio::null() };
    let [stdout, stderr] = options.open_output()?;
    command.stdin(stdin).stdout(stdout.writer).stderr(stderr.writer).process_group(0);
    sys::die_with_parent(&mut command);
    sys::let_agent_trace(&mut command);
    if options.inherit_stdin {
        sys::obey_job_control(&mut command);
    }
    if options.leave_signals_to_agent {
        sys::ignore_job_signals(&mut command);
    }
    if let Some(cpus) = options.cpus {
        sys::bind_to_cpus(&mut command, cpus);
    }
    for fd in &options.inherited {
        sys::inherit(&mut command, fd.clone());
    }
    let mut child = children::spawn(&mut command)?;
    let pid = Pid::from_child(&child);
    match pidfd_open(pid, PIDFD_FLAGS) {
        Ok(pidfd) => {
            let worker = Worker { pid: child.id(), pid_typed: pid, pidfd: Arc::new(pidfd) };
            Ok(Spawned { worker, stdout: stdout.reader, stderr: stderr.reader })
        }
        Err(error) => {
            // A process that cannot be watched must not run. It may have exited already, so errors are ignored.
            let _ = child.kill();
            let _ = child.wait();
            children::forget(child.id());
            Err(error.into())
        }
    }
}

impl Worker {
    /// Takes over a process that another child started and that [`children::adopt`] has registered.
    ///
    /// # Errors
    /// There is no such process, or the system refuses a pidfd.
    pub fn adopted(pid: u32) -> io::Result<Self> {
        let typed = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let typed = typed.ok_or_else(|| io::Error::other(format!("{pid} is not a process id")))?;
        let pidfd = pidfd_open(typed, PIDFD_FLAGS)?;
        Ok(Self { pid, pid_typed: typed, pidfd: Arc::new(pidfd) })
    }

    /// Waits until the process exits. Its [`Worker`] must live until then.
    pub async fn exit(pidfd: Arc<OwnedFd>) -> Exit {
        let Some(pidfd) = sys::register_shared(pidfd) else { return Exit::Unknown };
        if pidfd.readable().await.is_err() {
            return Exit::Unknown;
        }
        exit_status(pidfd.get_ref().as_fd())
    }

    /// Returns a handle for [`exit`](Self::exit).
    pub fn watch(&self) -> Arc<OwnedFd> {
        self.pidfd.clone()
    }

    /// Returns the signal that has stopped the process since the last call; `None` if none has.
    pub fn stopped_by(&self) -> Option<Signal> {
        let stop = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        let status = waitid(WaitId::PidFd(self.pidfd.as_fd()), stop).ok()??;
        Signal::from_named_raw(status.stopping_signal()?)
    }

    /// Signals the whole process group. Has no effect if the group is gone.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.pid_typed, signal);
    }
}

/// Reads the exit status of an exited child without reaping it.
pub fn exit_status(pidfd: BorrowedFd<'_>) -> Exit {
    let peek = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    match waitid(WaitId::PidFd(pidfd), peek) {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, Some(signal)) => Exit::Signal(signal),
            (None, None) => Exit::Unknown,
        },
        _ => Exit::Unknown,
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // If the process still runs, it is treated as an orphan from now on.
        let end = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), end);
        children::forget(self.pid);
    }
}
