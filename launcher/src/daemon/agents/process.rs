//! A process of a job's user, which is told from others of its number, watched and killed.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;

use crate::daemon::files::Identity;
use crate::process::Process;
use crate::spawn::sys;

/// An agent that ran when it was found.
#[derive(Debug)]
pub(super) struct Agent {
    pidfd: AsyncFd<OwnedFd>,
}

impl Agent {
    /// The process of this identity, if it is that process still, and the user's.
    pub(super) fn find(identity: &Identity, uid: u32) -> Option<Self> {
        let pid = i32::try_from(identity.pid).ok().and_then(Pid::from_raw)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The number may have passed on before the descriptor was opened, but no longer after.
        let process = Process::read(identity.pid)?;
        let owner = fs_err::metadata(format!("/proc/{}", identity.pid)).ok()?.uid();
        // What cannot be read by others, as after a change of user, is shown as root's: its start tells enough then.
        let is_it = process.started == identity.started && !process.ended() && (owner == uid || owner == 0);
        Some(Self { pidfd: sys::watch(pidfd).filter(|_| is_it)? })
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
