//! Starting and following the agents of jobs.
//!
//! An agent is this program run as `xlaunch agent DIR` by the job's user. Under systemd each agent is a transient unit,
//! so that it neither ends with the daemon nor shares its resource limits; elsewhere it is a process in its own
//! session.

pub(crate) mod connect;
pub(crate) mod follow;
mod process;
mod unit;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::unistd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::users::{self, Account};
use xlaunch_agent::spawn::sys;

/// Starts agents.
#[derive(Clone, Debug)]
pub(crate) enum AgentStarter {
    /// As processes in sessions of their own.
    Detached,
    /// As transient units, through this connection to the system bus.
    Systemd(zbus::Connection),
}

/// An agent to start.
#[derive(Debug)]
pub(crate) struct AgentStart {
    job: u64,
    name: String,
    uid: u32,
    /// The part of the job's directory that its user owns.
    dir: PathBuf,
    /// The file that becomes its standard input, as path and open.
    input_path: PathBuf,
    input: File,
    /// Time between SIGTERM and SIGKILL of its workers.
    shutdown_timeout: Duration,
    /// Cores; `None` for no limit.
    cpus: Option<u32>,
    /// Bytes; `None` for no limit.
    memory: Option<u64>,
}

/// An agent that was started.
pub(crate) struct Started {
    exit: AgentExit,
    /// Its process, unless systemd has started it.
    pidfd: Option<OwnedFd>,
}

/// Resolves to a description of the exit when the started process is certainly gone.
pub(crate) type AgentExit = Pin<Box<dyn Future<Output = String> + Send>>;

impl AgentStarter {
    /// Starts an agent. On an error none runs.
    pub(crate) async fn start(&self, start: AgentStart) -> io::Result<Started> {
        match self {
            Self::Detached => start_detached(start),
            Self::Systemd(bus) => {
                let exit = unit::start(bus, start).await.map_err(io::Error::other)?;
                Ok(Started { exit, pidfd: None })
            }
        }
    }

    /// Kills all processes of the job's unit. Without systemd, the agent's reaper does that.
    pub(crate) async fn kill(&self, job: u64) {
        if let Self::Systemd(bus) = self {
            unit::kill(bus, job).await;
        }
    }
}

fn start_detached(start: AgentStart) -> io::Result<Started> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("xlaunch").arg("agent").arg(&start.dir).env_clear().current_dir("/");
    // The agent sets the job's own environment, which is in its input.
    command.env("PATH", "/usr/local/bin:/usr/bin:/bin");
    // The agent writes to agent.log. The daemon's own log is no place for what a job's user can write.
    command.stdin(start.input).stdout(Stdio::null()).stderr(Stdio::null());
    let user = tokio::task::block_in_place(|| user_to_switch_to(start.uid))?;
    sys::start_in_session(&mut command, user);
    let mut child = tokio::process::Command::from(command).spawn()?;
    // The child is not waited for yet, so its pid is not reused.
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let exit = Box::pin(async move {
        let status = child.wait().await;
        status.map_or_else(|error| error.to_string(), |status| status.to_string())
    });
    Ok(Started { exit, pidfd })
}

/// The user as whom the agent runs; `None` if the daemon is not root and cannot switch.
fn user_to_switch_to(uid: u32) -> io::Result<Option<sys::User>> {
    if !rustix::process::getuid().is_root() {
        return Ok(None);
    }
    // The account may have been removed after the submission.
    let account = users::find(uid)?;
    let Account { name, gid } =
        account.ok_or_else(|| io::Error::other(format!("user id {uid} has no account on this node")))?;
    let groups = unistd::getgrouplist(&CString::new(name)?, gid.into())?;
    let groups = groups.into_iter().map(unistd::Gid::as_raw).collect();
    Ok(Some(sys::User { uid, gid, groups }))
}
