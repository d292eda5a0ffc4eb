//! The process of an agent: found by its identity, watched and killed through a pidfd.

use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;

use crate::files::Identity;
use xlaunch_agent::process::Process;
use xlaunch_agent::spawn::sys;

#[derive(Debug)]
pub(super) struct AgentProcess {
    pidfd: AsyncFd<OwnedFd>,
}

/// Whether all user ids of a process are this one: real, effective, saved and file system.
fn is_of(pid: u32, uid: u32) -> bool {
    let status = fs_err::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.is_some_and(|ids| ids.split_whitespace().all(|id| id.parse() == Ok(uid)))
}

impl AgentProcess {
    /// Opens the process with this identity, if it still runs and belongs to user `uid`.
    pub(super) fn find(identity: &Identity, uid: u32) -> Option<Self> {
        let pid = i32::try_from(identity.pid).ok().and_then(Pid::from_raw)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The pid may have been reused before the pidfd was opened. From here on it cannot be, so the checks are not
        // racy.
        let process = Process::read(identity.pid)?;
        // The user wrote the identity and could name any process, which the daemon would kill as root.
        let is_agent = process.started == identity.started && !process.ended() && is_of(identity.pid, uid);
        Some(Self { pidfd: sys::register(pidfd).filter(|_| is_agent)? })
    }

    /// Waits until the process has exited.
    pub(super) async fn exited(&self) {
        // An error counts as an exit; the caller checks the job's files.
        let _ = self.pidfd.readable().await;
    }

    /// Sends SIGKILL. The agent's reaper then kills the workers.
    pub(super) fn kill(&self) {
        // The process may have exited.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn process_must_match_start_time_and_user() {
        let own = Process::own().unwrap();
        let uid = rustix::process::getuid().as_raw();
        let identity = |pid, started| Identity {
            protocol: 1,
            version: String::new(),
            pid,
            started,
            boot: String::new(),
            start: 1,
        };
        assert!(AgentProcess::find(&identity(own.pid, own.started), uid).is_some());
        assert!(AgentProcess::find(&identity(own.pid, own.started + 1), uid).is_none());
        assert!(AgentProcess::find(&identity(own.pid, own.started), uid + 1).is_none());
        let init = Process::read(1).unwrap();
        assert!(AgentProcess::find(&identity(1, init.started), uid + 1).is_none());
    }
}
