//! A process of a job's user, which is told from others of its number, watched and killed.

use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;

use crate::files::Identity;
use xlaunch_agent::process::Process;
use xlaunch_agent::spawn::sys;

/// An agent that ran when it was found.
#[derive(Debug)]
pub(super) struct Agent {
    pidfd: AsyncFd<OwnedFd>,
}

/// Whether all user ids of a process are this one: real, effective, saved, and for file systems.
fn is_of(pid: u32, uid: u32) -> bool {
    let status = fs_err::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.is_some_and(|ids| ids.split_whitespace().all(|id| id.parse() == Ok(uid)))
}

impl Agent {
    /// The process of this identity, if it is that process still, and the user's.
    pub(super) fn find(identity: &Identity, uid: u32) -> Option<Self> {
        let pid = i32::try_from(identity.pid).ok().and_then(Pid::from_raw)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The number may have passed on before the descriptor was opened, but no longer after.
        let process = Process::read(identity.pid)?;
        // The identity is the user's word: it may name any process, and this one may be killed.
        let is_it = process.started == identity.started && !process.ended() && is_of(identity.pid, uid);
        Some(Self { pidfd: sys::register(pidfd).filter(|_| is_it)? })
    }

    /// Waits for its end.
    pub(super) async fn ended(&self) {
        // A descriptor that cannot be watched is as good as an end: whoever asks looks again.
        let _ = self.pidfd.readable().await;
    }

    /// Ends it at once; its guard ends what it has started.
    pub(super) fn kill(&self) {
        // It may have ended.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_process_that_is_meant_and_the_users_own_is_watched() {
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
        assert!(Agent::find(&identity(own.pid, own.started), uid).is_some());
        assert!(Agent::find(&identity(own.pid, own.started + 1), uid).is_none());
        assert!(Agent::find(&identity(own.pid, own.started), uid + 1).is_none());
        let init = Process::read(1).unwrap();
        assert!(Agent::find(&identity(1, init.started), uid + 1).is_none());
    }
}
