//! Worker processes: started from one thread that never ends, watched by pidfd, signalled as process groups.
//!
//! The kernel ties a child's parent-death signal to the thread that forked it, so a thread of a pool would take workers
//! with it when it retires. Contract: [`Spawner::spawn`] returns when the program runs or has failed to start; its exit
//! is sent once, whatever it is; [`Worker::signal`] only initiates. A worker that has ended is collected when its
//! [`Worker`] is dropped: until then nobody else is given its number, nor that of its group.
//!
//! ```text
//! Spawner --fork--> enters its cgroup, is bound to CPUs --exec--> worker --forks--> what it starts
//! Scope (of an attempt): cgroups, or tree: all of these, found and killed
//! children: what this process started, and orphans it was handed;  Guard: does Scope's work if xlaunch is killed
//! ```

pub mod affinity;
mod cgroup;
mod children;
pub mod environment;
mod exit;
pub mod gpu_memory;
pub mod guard;
pub mod oom;
pub mod port;
pub mod scope;
pub mod sys;
#[cfg(test)]
mod tests;
mod tree;

use std::io::IsTerminal;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{ChildStderr, ChildStdout, Command, Stdio};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid,
};
use rustix::thread::CpuSet;
use tokio::sync::oneshot;

pub use children::{adopt_orphans, reap_orphans};
pub use exit::Exit;

/// A running worker.
#[derive(Debug)]
pub struct Worker {
    /// Its process id, and that of its group.
    pub pid: u32,
    pid_typed: Pid,
    pidfd: OwnedFd,
}

/// A started process and its output.
#[derive(Debug)]
pub struct Spawned {
    /// The process.
    pub worker: Worker,
    /// What it prints.
    pub stdout: ChildStdout,
    /// What it complains about.
    pub stderr: ChildStderr,
}

/// How a worker is started, beside its command.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// It reads what xlaunch would: see [`inherits_stdin`]. Otherwise its standard input is empty.
    pub inherit_stdin: bool,
    /// CPUs that it may run on; all that xlaunch may where it is `None`.
    pub cpus: Option<CpuSet>,
}

/// Whether workers get xlaunch's standard input: one alone does, unless it is a terminal. A worker is in a process group of
/// its own, which a terminal stops as soon as it reads; several would take each other's input away.
pub fn inherits_stdin(workers: u32) -> bool {
    workers == 1 && !std::io::stdin().is_terminal()
}

/// Starts processes from its own thread.
#[derive(Debug)]
pub struct Spawner {
    requests: std::sync::mpsc::Sender<Request>,
}

type Request = (Command, Options, oneshot::Sender<std::io::Result<Spawned>>);

impl Spawner {
    /// Starts the thread. It lives as long as the process: ending it would end the workers.
    pub fn start() -> std::io::Result<Self> {
        let (requests, queue) = std::sync::mpsc::channel::<Request>();
        std::thread::Builder::new().name("spawner".into()).spawn(move || {
            for (command, options, reply) in &queue {
                // The agent waits for the reply; it is gone only when the whole process ends.
                let _ = reply.send(start(command, &options));
            }
            loop {
                std::thread::park();
            }
        })?;
        Ok(Self { requests })
    }

    /// Starts `command` in its own process group, with its output piped.
    pub async fn spawn(&self, command: Command, options: Options) -> std::io::Result<Spawned> {
        let gone = || std::io::Error::other("the spawner thread is gone");
        let (reply, spawned) = oneshot::channel();
        self.requests.send((command, options, reply)).map_err(|_| gone())?;
        spawned.await.map_err(|_| gone())?
    }
}

fn start(mut command: Command, options: &Options) -> std::io::Result<Spawned> {
    use std::os::unix::process::CommandExt;
    let stdin = if options.inherit_stdin { Stdio::inherit() } else { Stdio::null() };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    sys::die_with_parent(&mut command);
    if let Some(cpus) = options.cpus {
        sys::run_on(&mut command, cpus);
    }
    let mut child = children::start(&mut command)?;
    let (stdout, stderr, pid) = (child.stdout.take(), child.stderr.take(), Pid::from_child(&child));
    match (stdout, stderr, pidfd_open(pid, PidfdFlags::NONBLOCK)) {
        (Some(stdout), Some(stderr), Ok(pidfd)) => {
            Ok(Spawned { worker: Worker { pid: child.id(), pid_typed: pid, pidfd }, stdout, stderr })
        }
        (_, _, watched) => {
            // What cannot be watched must not run. It may have ended.
            let _ = child.kill();
            let _ = child.wait();
            children::forget(child.id());
            Err(watched.err().map_or_else(|| std::io::Error::other("no pipe"), Into::into))
        }
    }
}

impl Worker {
    /// Waits for the end of the process; the [`Worker`] must live until then.
    pub async fn exit(pidfd: OwnedFd) -> Exit {
        let Some(pidfd) = sys::watch(pidfd) else { return Exit::Unknown };
        if pidfd.readable().await.is_err() {
            return Exit::Unknown;
        }
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        match waitid(WaitId::PidFd(pidfd.get_ref().as_fd()), look) {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Exit::Code(code),
                (None, Some(signal)) => Exit::Signal(signal),
                (None, None) => Exit::Unknown,
            },
            _ => Exit::Unknown,
        }
    }

    /// A handle for [`exit`](Self::exit).
    pub fn watch(&self) -> std::io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Signals the whole process group. A group that is gone needs none.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.pid_typed, signal);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // One that still runs is an orphan from now on.
        let end = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), end);
        children::forget(self.pid);
    }
}
