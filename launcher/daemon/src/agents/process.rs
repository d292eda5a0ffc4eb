//! The process of an agent. It is identified by process id and start time, and watched and killed through a pidfd.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;

use super::task_cgroup::JobCgroup;
use crate::files::ProcessId;
use xlaunch_host::process::Process;
use xlaunch_host::spawn::sys;

/// Time for the last processes of a job to leave its cgroup after the agent's exit.
const CGROUP_DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
const CGROUP_POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct AgentProcess {
    pub(super) id: ProcessId,
    /// `None` if the daemon cannot limit jobs.
    pub(super) cgroup: Option<JobCgroup>,
    pidfd: AsyncFd<OwnedFd>,
}

impl AgentProcess {
    /// Opens a child that has not been waited for.
    pub(super) fn of_child(pid: u32) -> Option<Self> {
        let started = Process::read(pid)?.started;
        let id = ProcessId { pid, started, boot: crate::boot_id() };
        Some(Self { id, cgroup: None, pidfd: open(pid)? })
    }

    /// Opens the process with this id, if it still runs.
    pub(super) fn find(id: &ProcessId) -> Option<Self> {
        let pidfd = open(id.pid)?;
        // The process id may have been reused before the pidfd was opened, but not afterwards.
        let process = Process::read(id.pid)?;
        let is_agent = id.boot == crate::boot_id() && process.started == id.started && !process.ended();
        is_agent.then(|| Self { id: id.clone(), cgroup: None, pidfd })
    }

    /// Waits until the process has exited.
    pub(super) async fn exited(&self) {
        // An error counts as an exit; the caller checks the job's files.
        let _ = self.pidfd.readable().await;
    }

    /// Returns whether the process runs. Asks the kernel, as the reactor may not have seen an exit yet, as just
    /// after the daemon was suspended.
    pub(super) fn runs(&self) -> bool {
        is_alive(&self.pidfd)
    }

    /// Sends SIGKILL. The agent's reaper then kills the workers.
    pub(super) fn kill(&self) {
        // The process may have exited.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
    }

    /// Removes the cgroup of an exited agent as soon as it is empty.
    pub(super) async fn release(self) {
        let Some(cgroup) = self.cgroup else { return };
        let deadline = Instant::now() + CGROUP_DRAIN_TIMEOUT;
        // Afterwards it is left for the next daemon.
        while !cgroup.remove() && Instant::now() < deadline {
            tokio::time::sleep(CGROUP_POLL_INTERVAL).await;
        }
    }
}

/// Opens a pidfd that the reactor watches.
pub(super) fn open(pid: u32) -> Option<AsyncFd<OwnedFd>> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    sys::register(pidfd_open(pid, PidfdFlags::empty()).ok()?)
}

/// Returns whether the process of a pidfd runs.
pub(super) fn is_alive(pidfd: &AsyncFd<OwnedFd>) -> bool {
    let mut polled = [PollFd::new(pidfd.get_ref(), PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn process_must_match_start_time_and_boot() {
        let own = Process::own().unwrap();
        let id = |started, boot: String| ProcessId { pid: own.pid, started, boot };
        assert!(AgentProcess::find(&id(own.started, crate::boot_id())).is_some_and(|own| own.runs()));
        assert!(AgentProcess::find(&id(own.started + 1, crate::boot_id())).is_none());
        assert!(AgentProcess::find(&id(own.started, "another".into())).is_none());
    }
}
