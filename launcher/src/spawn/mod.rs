//! Worker processes: started from one thread that never ends, watched by pidfd, signalled as process groups.
//!
//! The kernel ties a child's parent-death signal to the thread that forked it, so a thread of a pool would take workers
//! with it when it retires. Contract: [`Spawner::spawn`] returns when the program runs or has failed to start; its exit
//! is sent once, whatever it is; [`Worker::signal`] only initiates.

pub mod affinity;
pub mod environment;
pub mod port;
mod sys;

use std::fmt;
use std::os::fd::OwnedFd;
use std::process::{ChildStderr, ChildStdout, Command, Stdio};

use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use tokio::sync::oneshot;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// With this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// Nobody can say: never a success.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => match xlaunch_proto::exit::ExitCode::from_code(*code) {
                Some(known) => write!(f, "exit code {code} ({})", known.meaning()),
                None => write!(f, "exit code {code}"),
            },
            Self::Signal(signal) => write!(f, "signal {signal} ({})", signal_name(*signal)),
            Self::Unknown => f.write_str("unknown exit"),
        }
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL: illegal instruction",
        6 => "SIGABRT: aborted",
        7 => "SIGBUS: bad memory access",
        8 => "SIGFPE: arithmetic error",
        9 => "SIGKILL: killed, perhaps for lack of memory",
        11 => "SIGSEGV: bad memory access",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        _ => "another signal",
    }
}

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

/// Starts processes from its own thread.
#[derive(Debug)]
pub struct Spawner {
    requests: std::sync::mpsc::Sender<Request>,
}

type Request = (Command, oneshot::Sender<std::io::Result<Spawned>>);

impl Spawner {
    /// Starts the thread. It lives as long as the process: ending it would end the workers.
    pub fn start() -> std::io::Result<Self> {
        let (requests, queue) = std::sync::mpsc::channel::<Request>();
        std::thread::Builder::new().name("spawner".into()).spawn(move || {
            for (command, reply) in &queue {
                // The agent waits for the reply; it is gone only when the whole process ends.
                let _ = reply.send(start(command));
            }
            loop {
                std::thread::park();
            }
        })?;
        Ok(Self { requests })
    }

    /// Starts `command` in its own process group, with its output piped.
    pub async fn spawn(&self, command: Command) -> std::io::Result<Spawned> {
        let gone = || std::io::Error::other("the spawner thread is gone");
        let (reply, spawned) = oneshot::channel();
        self.requests.send((command, reply)).map_err(|_| gone())?;
        spawned.await.map_err(|_| gone())?
    }
}

fn start(mut command: Command) -> std::io::Result<Spawned> {
    use std::os::unix::process::CommandExt;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    sys::die_with_parent(&mut command);
    let mut child = command.spawn()?;
    let missing = || std::io::Error::other("no pipe");
    let (stdout, stderr) =
        (child.stdout.take().ok_or_else(missing)?, child.stderr.take().ok_or_else(missing)?);
    let pid_typed = Pid::from_child(&child);
    let pidfd = rustix::process::pidfd_open(pid_typed, PidfdFlags::NONBLOCK)?;
    Ok(Spawned { worker: Worker { pid: child.id(), pid_typed, pidfd }, stdout, stderr })
}

impl Worker {
    /// Waits for the end of the process and collects its status.
    pub async fn exit(pidfd: OwnedFd) -> Exit {
        let Some(pidfd) = sys::watch(pidfd) else { return Exit::Unknown };
        if pidfd.readable().await.is_err() {
            return Exit::Unknown;
        }
        let fd = std::os::fd::AsFd::as_fd(pidfd.get_ref());
        match rustix::process::waitid(WaitId::PidFd(fd), WaitIdOptions::EXITED) {
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
        let _ = rustix::process::kill_process_group(self.pid_typed, signal);
    }
}
