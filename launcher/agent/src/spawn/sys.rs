//! The unsafe calls of the launcher: code between fork and exec, and descriptors under the reactor's watch.
//!
//! Everything between fork and exec is system calls on data made before the fork: another thread may have held any lock.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal, setsid};
use rustix::thread::{CpuSet, sched_setaffinity};
use tokio::io::unix::AsyncFd;

/// What a guard does not listen to: whoever ends a whole session or service means xlaunch first.
const IGNORED: [i32; 9] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// Whose rights a process is to have.
#[derive(Clone, Debug)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

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

/// Lets the process enter the cgroup whose `cgroup.procs` this is, before it runs anything. If it may not, it runs outside.
pub(super) fn enter_cgroup(command: &mut Command, procs: Arc<OwnedFd>) {
    let hook = move || {
        // Who starts it looks where it is.
        let _ = rustix::io::write(&procs, b"0");
        Ok(())
    };
    // SAFETY: the hook makes one system call on an open descriptor: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Binds the process to these CPUs; it does not start where that fails.
pub(super) fn run_on(command: &mut Command, cpus: CpuSet) {
    let hook = move || Ok(sched_setaffinity(None, &cpus)?);
    // SAFETY: the hook makes one system call on a set that it owns, of fixed size: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Puts the process into a session of its own, deaf to the signals that end one, with no descriptor but its standard three.
pub(super) fn detach(command: &mut Command) {
    let hook = || {
        setsid()?;
        for signal in IGNORED {
            // SAFETY: `signal` is async-signal-safe; ignoring is inherited through exec, and no handler is lost that exec
            // would keep.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        // Before Linux 5.11 there is no such flag, and what xlaunch was given by its own parent stays open.
        // SAFETY: the call takes three integers. Marking descriptors leaves them usable up to exec.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        Ok(())
    };
    // SAFETY: the hook makes system calls only and touches no lock and no heap: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Puts the process into a session of its own and, where there is one, makes it that user's: nothing of this process's
/// rights is left to it.
pub fn start_apart(command: &mut Command, user: Option<User>) {
    let hook = move || {
        setsid()?;
        if let Some(User { uid, gid, groups }) = &user {
            // In this order: without its first user it may change no group any more.
            // SAFETY: the pointer and the length are of one array that the hook owns; the calls take integers beside.
            let failed = unsafe {
                libc::setgroups(groups.len(), groups.as_ptr()) != 0
                    || libc::setgid(*gid) != 0
                    || libc::setuid(*uid) != 0
            };
            if failed {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls only, on data that it owns, and touches no lock and no heap: setgroups, setgid and
    // setuid of the C library signal other threads, of which a process between fork and exec has none.
    unsafe { command.pre_exec(hook) };
}

/// A listening socket that systemd has handed over as this descriptor; `None` where it is none.
pub fn inherited(fd: i32) -> Option<std::os::unix::net::UnixListener> {
    use std::os::fd::FromRawFd;
    // SAFETY: systemd's contract gives descriptors from 3 on to this process alone, and the caller asks once.
    let listener = unsafe { std::os::unix::net::UnixListener::from_raw_fd(fd) };
    listener.local_addr().is_ok().then_some(listener)
}

/// Puts a descriptor under the watch of the runtime's reactor; `None` if that fails.
pub fn watch(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open, is always the same descriptor, and stays open until it is dropped, with the AsyncFd.
    unsafe { AsyncFd::register(fd) }.ok()
}
