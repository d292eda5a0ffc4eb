//! The unsafe calls of the launcher: code between fork and exec, and descriptors under the reactor's watch.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use tokio::io::unix::AsyncFd;

/// Makes the process die when the thread that starts it does, however that happens.
pub(super) fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the call: then the signal will never come.
        if getppid() != Some(parent) {
            return Err(std::io::Error::from_raw_os_error(rustix::io::Errno::SRCH.raw_os_error()));
        }
        Ok(())
    };
    // SAFETY: the hook makes two system calls and touches no lock and no heap: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Puts a descriptor under the watch of the runtime's reactor; `None` if that fails.
pub(super) fn watch(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open, is always the same descriptor, and stays open until it is dropped, with the AsyncFd.
    unsafe { AsyncFd::register(fd) }.ok()
}
