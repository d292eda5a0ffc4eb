//! Starts and follows the agents of jobs.
//!
//! An agent is this program, run as `xlaunch agent DIR` under the job's user. Under systemd each agent is a transient
//! unit, so that it neither ends with the daemon nor shares the daemon's resource limits; otherwise it is a process in
//! its own session.
//!
//! ```text
//! spawn (its input is a pipe) --> record the process --> write the description to the pipe, close it --> begun
//! ```
//! An agent does nothing before it has read a complete description. If the daemon dies before that, the agent ends
//! without a trace; an agent with a description has always been recorded. Whether an agent is running is determined
//! from its unit, or from its process through a pidfd, and never from anything that its user can write.
//!
//! - [`follow`]: the task that follows one start of a job; [`connect`]: connections to agents;
//! - `process`, `unit`: an agent as a detached process, or as a systemd unit; [`task_cgroup`]: limits of the former;
//! - [`start`]: what is started: agents, and processes of the daemon itself, which are [`hooks`] and [`examination`];
//! - [`facts`]: facts about a job, for its hooks.

mod client;
pub(crate) mod connect;
pub(crate) mod examination;
pub(crate) mod facts;
pub(crate) mod follow;
mod hook_output;
pub(crate) mod hooks;
mod process;
pub(crate) mod start;
pub(crate) mod task_cgroup;
pub(crate) mod unit;

use std::ffi::CString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::unistd;
use tokio::net::unix::pipe;
use tracing::warn;

use self::process::AgentProcess;
use self::start::JobStart;
use self::task_cgroup::{JobCgroup, TaskCgroups};
use self::unit::Unit;
use crate::files::{AgentRecord, JobDirs};
use crate::state::Usage;
use crate::users::{self, Account};
use xlaunch_host::spawn::sys;

/// Starts agents.
#[derive(Clone, Debug)]
pub(crate) enum AgentStarter {
    /// Agents are processes in sessions of their own, and in cgroups if those can limit the number of processes.
    Detached(Option<TaskCgroups>),
    /// Agents are transient units, managed through this connection to the system bus.
    Systemd(zbus::Connection),
}

/// An agent that was running when the daemon last checked.
#[derive(Debug)]
pub(crate) enum Agent {
    Process(AgentProcess),
    Unit(Unit),
}

impl AgentStarter {
    /// Starts an agent with the part of the job's directory that its user owns. It waits for its description on the
    /// returned pipe. After an error, no agent runs.
    pub(crate) async fn start(&self, start: &JobStart, dir: &Path) -> io::Result<(Agent, pipe::Sender)> {
        let (sender, receiver) = pipe::pipe()?;
        let input = receiver.into_blocking_fd()?;
        let agent = match self {
            Self::Detached(cgroups) => {
                let cgroup = cgroups.as_ref().and_then(|it| it.create(start.job, start.max_tasks));
                start_detached(start, dir, input.into(), cgroup).map(Agent::Process)?
            }
            Self::Systemd(bus) => {
                Unit::start(bus, start, dir, input).await.map(Agent::Unit).map_err(io::Error::other)?
            }
        };
        Ok((agent, sender))
    }

    /// Finds the agent that an earlier daemon has started; `None` if it does not run.
    ///
    /// # Errors
    /// The system manager does not respond, so the state is unknown.
    pub(crate) async fn find(&self, job: u64, record: Option<&AgentRecord>) -> io::Result<Option<Agent>> {
        match (self, record.and_then(|record| record.process.as_ref())) {
            (_, Some(process)) => Ok(AgentProcess::find(process).map(|mut process| {
                if let Self::Detached(Some(cgroups)) = self {
                    process.cgroup = cgroups.of(process.id.pid);
                }
                Agent::Process(process)
            })),
            (Self::Systemd(bus), None) => {
                let unit = Unit::find(bus, job).await.map_err(io::Error::other)?;
                Ok(unit.map(Agent::Unit))
            }
            (Self::Detached(_), None) => Ok(None),
        }
    }
}

impl AgentStarter {
    /// Returns the jobs in these directories whose units run, each with the user id that it runs as. Agents that are
    /// plain processes are found through their records instead.
    ///
    /// # Errors
    /// The system manager does not respond, so the state is unknown.
    pub(crate) async fn running_units(&self, dirs: &JobDirs) -> io::Result<Vec<(u64, u32)>> {
        match self {
            Self::Detached(_) => Ok(Vec::new()),
            Self::Systemd(bus) => unit::running(bus, |job| dirs.agent(job))
                .await
                .map_err(|error| io::Error::other(format!("failed to list the units of jobs: {error}"))),
        }
    }
}

impl Agent {
    /// Returns the process to record; `None` for a unit, which is found by its name.
    pub(crate) fn process(&self) -> Option<crate::files::ProcessId> {
        match self {
            Self::Process(process) => Some(process.id.clone()),
            Self::Unit(_) => None,
        }
    }

    /// Waits until the agent, and under systemd every process of the job, has exited.
    pub(crate) async fn exited(&self) {
        match self {
            Self::Process(process) => process.exited().await,
            Self::Unit(unit) => unit.exited().await,
        }
    }

    /// Returns whether the agent is known to run at this moment.
    pub(crate) fn runs(&self) -> bool {
        match self {
            Self::Process(process) => process.runs(),
            Self::Unit(unit) => unit.runs(),
        }
    }

    /// Sends SIGKILL to all processes of the unit, or to the agent process, whose reaper then kills the workers.
    pub(crate) async fn kill(&self) {
        match self {
            Self::Process(process) => process.kill(),
            Self::Unit(unit) => unit.kill().await,
        }
    }

    /// Returns the resources that the job has used so far; `None` if only the agent itself knows.
    pub(crate) async fn usage(&self) -> Option<Usage> {
        match self {
            Self::Process(_) => None,
            Self::Unit(unit) => unit.usage().await,
        }
    }

    /// Releases the unit or the cgroup of an exited agent.
    pub(crate) async fn release(self) {
        match self {
            Self::Process(process) => process.release().await,
            Self::Unit(unit) => unit.release().await,
        }
    }
}

fn start_detached(
    start: &JobStart,
    dir: &Path,
    input: Stdio,
    cgroup: Option<JobCgroup>,
) -> io::Result<AgentProcess> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("xlaunch").arg("agent").arg(dir).current_dir("/");
    command.env_clear().envs(start.environment());
    // The agent writes to agent.log. Output that a job's user controls must not get into the daemon's own log.
    command.stdin(input).stdout(Stdio::null()).stderr(Stdio::null());
    let user = tokio::task::block_in_place(|| user_to_switch_to(start.uid))?;
    // Before the process gives up the right to enter it. An error is noticed below.
    if let Some(Ok(procs)) = cgroup.as_ref().map(JobCgroup::procs) {
        sys::enter_cgroup(&mut command, procs);
    }
    sys::start_in_session(&mut command, user);
    let mut child = tokio::process::Command::from(command).spawn()?;
    // The child has not been waited for yet, so its process id cannot have been reused.
    let process = child.id().and_then(AgentProcess::of_child);
    tokio::spawn(async move { child.wait().await });
    // After this error the agent gets no description, and ends by itself.
    let mut process = process.ok_or_else(|| io::Error::other("failed to open its process"))?;
    if cgroup.as_ref().is_some_and(|cgroup| !cgroup.contains(process.id.pid)) {
        warn!(
            job = start.job,
            "job {} runs without a limit on processes: it is not in its cgroup", start.job
        );
    }
    process.cgroup = cgroup;
    Ok(process)
}

/// Returns the user that the agent must run as; `None` if the daemon is not root and cannot switch users.
fn user_to_switch_to(uid: u32) -> io::Result<Option<sys::User>> {
    if !rustix::process::getuid().is_root() {
        return Ok(None);
    }
    // The account may have been removed since the submission.
    let account = users::find(uid)?;
    let Account { name, gid } =
        account.ok_or_else(|| io::Error::other(format!("user id {uid} has no account on this node")))?;
    let groups = unistd::getgrouplist(&CString::new(name)?, gid.into())?;
    let groups = groups.into_iter().map(unistd::Gid::as_raw).collect();
    Ok(Some(sys::User { uid, gid, groups }))
}
