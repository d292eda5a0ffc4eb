//! The unsafe calls of this crate: hooks between fork and exec, registering descriptors with the reactor, and an exit.
//!
//! A hook only makes system calls, on data prepared before the fork: a lock that another thread held at the fork stays
//! locked forever in the child.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{
    PTracer, Pid, Resource, Rlimit, Signal, getpid, getppid, set_parent_process_death_signal, set_ptracer,
    setrlimit, setsid,
};
use rustix::thread::{CpuSet, sched_setaffinity};
use tokio::io::unix::AsyncFd;

/// Signals that the reaper ignores. They end a whole session or service, and the reaper has to outlive xlaunch.
const REAPER_IGNORES: [i32; 9] = [
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

/// Signals that the trainer's workers ignore: they stop a job or announce its end, which is up to the agent. Without
/// the last, a write beyond the limit on file sizes (`ulimit -f`) fails like one to a full disk.
const TRAINER_IGNORES: [i32; 7] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2, libc::SIGXFSZ];

/// Descriptors below this number are marked one by one if the kernel cannot mark a range.
const MAX_MARKED_FD: libc::c_int = 4096;

/// The user to run a process as.
#[derive(Clone, Debug)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// Ends this process without the exit handlers of libraries. A thread that was left in a call of NVML may still take
/// locks that those destroy, and glibc then aborts. The caller has flushed its output.
pub fn exit_at_once(code: u8) -> ! {
    // SAFETY: the call has no preconditions. No thread can observe anything after it.
    unsafe { libc::_exit(code.into()) }
}

/// Ends this process by the default action of SIGINT or SIGTERM, whatever handler it has now. Its parent sees the
/// signal: a shell ends a loop whose command died of Ctrl-C. The caller has flushed its output.
pub fn die_of(signal: Signal) -> ! {
    // SAFETY: the first call has no preconditions; with the default action, no handler runs in the second one.
    unsafe {
        libc::signal(signal.as_raw(), libc::SIG_DFL);
        libc::raise(signal.as_raw());
    }
    // PID 1 ignores the default action.
    exit_at_once(u8::try_from(signal.as_raw()).map_or(u8::MAX, |number| number.saturating_add(128)))
}

/// Sends the process SIGKILL when the thread that starts it dies.
pub fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent died before this call, the signal is never sent.
        if getppid() != Some(parent) {
            return Err(std::io::Error::from_raw_os_error(rustix::io::Errno::SRCH.raw_os_error()));
        }
        Ok(())
    };
    // SAFETY: the hook makes two system calls and touches no lock and no heap: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Lets this process and its children trace the new process where Yama restricts that to parents. The debuggers that
/// print its stacks are children of this process, not parents of the new one.
pub fn let_agent_trace(command: &mut Command) {
    let agent = getpid();
    let hook = move || {
        // Fails without Yama, in which case it is not needed.
        let _ = set_ptracer(PTracer::ProcessID(agent));
        Ok(())
    };
    // SAFETY: the hook makes one system call on an integer: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Moves the process into the cgroup of this `cgroup.procs` before its program runs. If that fails, the process runs
/// outside the cgroup.
pub fn enter_cgroup(command: &mut Command, procs: Arc<OwnedFd>) {
    let hook = move || {
        // Errors are ignored: `ProcessTree::add` checks whether the process is in its cgroup.
        let _ = rustix::io::write(&procs, b"0");
        Ok(())
    };
    // SAFETY: the hook makes one system call on an open descriptor: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Binds the process to these CPUs. If that fails, the process does not start.
pub fn bind_to_cpus(command: &mut Command, cpus: CpuSet) {
    let hook = move || Ok(sched_setaffinity(None, &cpus)?);
    // SAFETY: the hook makes one system call on a set of fixed size that it owns: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Sets the process's limit of open files. If that fails, the process does not start.
pub fn limit_open_files(command: &mut Command, limit: Rlimit) {
    let hook = move || Ok(setrlimit(Resource::Nofile, limit)?);
    // SAFETY: the hook makes one system call on numbers that it owns: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Lets the process inherit a close-on-exec descriptor, under the same [`number`].
pub fn inherit(command: &mut Command, fd: Arc<OwnedFd>) {
    let hook = move || Ok(fcntl_setfd(&fd, FdFlags::empty())?);
    // SAFETY: the hook makes one system call on an open descriptor, of which only the child's copy changes: it is
    // async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// The number of a descriptor.
pub fn number(fd: &OwnedFd) -> i32 {
    fd.as_raw_fd()
}

/// Makes the process ignore [`TRAINER_IGNORES`]. Until the hook runs, it has xlaunch's handlers, so that these signals
/// never kill it.
pub fn ignore_job_signals(command: &mut Command) {
    let hook = || {
        for signal in TRAINER_IGNORES {
            // SAFETY: `signal` is async-signal-safe. SIG_IGN is inherited through exec.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls only and touches no lock and no heap: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Resets SIGTTIN and SIGTTOU to their default action, even if xlaunch was started with both ignored. A worker that
/// uses the terminal from the background is then stopped instead of getting an error.
pub fn obey_job_control(command: &mut Command) {
    let hook = || {
        for signal in [libc::SIGTTIN, libc::SIGTTOU] {
            // SAFETY: `signal` is async-signal-safe.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls only and touches no lock and no heap: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Makes a process group of this session the foreground group of the controlling terminal. A process of a background
/// group must block SIGTTOU for that.
pub fn set_foreground(tty: &OwnedFd, group: Pid) -> std::io::Result<()> {
    let mut before = std::mem::MaybeUninit::uninit();
    let mut blocked = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set that the other calls read; pthread_sigmask writes the mask of this thread
    // to `before`. Neither fails with these arguments.
    unsafe {
        libc::sigemptyset(blocked.as_mut_ptr());
        libc::sigaddset(blocked.as_mut_ptr(), libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, blocked.as_ptr(), before.as_mut_ptr());
    }
    let result = rustix::termios::tcsetpgrp(tty, group);
    // SAFETY: `before` was written above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    Ok(result?)
}

/// Blocks all signals in the process, which then receives them through [`terminal_signals`].
pub fn block_signals(command: &mut Command) {
    let hook = || {
        let mut all = std::mem::MaybeUninit::uninit();
        // SAFETY: both calls are async-signal-safe. sigfillset initialises the set that the other one reads.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls only, on data of its own: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Unblocks all signals in this thread and in threads that it starts. A process inherits the mask of its parent, so one
/// that blocks SIGTERM would make xlaunch deaf to it. Must be called before any thread is started.
pub fn unblock_signals() {
    let mut none = std::mem::MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set that the other call reads. Neither fails with these arguments.
    unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
    }
}

/// Calls `each` with every signal that a key of the terminal sends to this process, until `each` returns false. Signals
/// from other processes are consumed and ignored, except for SIGTSTP, which xlaunch does not send: an editor or a
/// debugger that reads Ctrl-Z as a key sends it to its own process group. All signals must be blocked.
pub fn terminal_signals(mut each: impl FnMut(i32) -> bool) {
    let mut wanted = std::mem::MaybeUninit::uninit();
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::uninit();
    // SAFETY: sigemptyset initialises the set; the signals are valid.
    unsafe {
        libc::sigemptyset(wanted.as_mut_ptr());
        for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP] {
            libc::sigaddset(wanted.as_mut_ptr(), signal);
        }
    }
    loop {
        // SAFETY: the set was initialised above, and `info` has room for the result.
        let signal = unsafe { libc::sigwaitinfo(wanted.as_ptr(), info.as_mut_ptr()) };
        // An error is EINTR: the process was stopped and continued.
        // SAFETY: without an error, sigwaitinfo has written `info`.
        let from_terminal = || unsafe { info.assume_init_ref() }.si_code == libc::SI_KERNEL;
        if signal > 0 && (signal == libc::SIGTSTP || from_terminal()) && !each(signal) {
            return;
        }
    }
}

/// Detaches the reaper: its own session, signals that end sessions ignored, and no descriptors but the standard three.
pub fn detach(command: &mut Command) {
    let hook = || {
        setsid()?;
        for signal in REAPER_IGNORES {
            // SAFETY: `signal` is async-signal-safe. SIG_IGN is inherited through exec; handlers would be reset by it
            // anyway.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        // SAFETY: the call takes three integers. Marking descriptors leaves them usable up to exec.
        let marked = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        if marked != 0 {
            // The kernel is older than Linux 5.11, or a seccomp profile refuses the call.
            for fd in 3..MAX_MARKED_FD {
                // SAFETY: the arguments are integers. A descriptor that is not open is an error without effect.
                unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
            }
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls only and touches no lock and no heap: it is async-signal-safe.
    unsafe { command.pre_exec(hook) };
}

/// Marks the descriptors that this process was started with as close-on-exec, except for the standard ones and those in
/// `keep`: they may belong to an administrator's shell. Descriptors that Rust opens are always close-on-exec.
pub fn close_inherited_on_exec(keep: &[i32]) {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<libc::c_int>().ok());
    for fd in numbers.filter(|fd| *fd > 2 && !keep.contains(fd)) {
        // SAFETY: the arguments are integers. A descriptor that was closed meanwhile is an error without effect.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Puts the process into a session of its own and, if given, drops all privileges to that user.
pub fn start_in_session(command: &mut Command, user: Option<User>) {
    let hook = move || {
        setsid()?;
        if let Some(User { uid, gid, groups }) = &user {
            // The order matters: after setuid, the groups cannot be changed any more.
            // SAFETY: pointer and length belong to one array that the hook owns; the other arguments are integers.
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
    // SAFETY: the hook makes system calls only, on data that it owns, and touches no lock and no heap. The C library's
    // setgroups, setgid and setuid signal all other threads, of which there are none between fork and exec.
    unsafe { command.pre_exec(hook) };
}

/// Returns the listening unix socket that systemd passed as this descriptor; `None` if it is not a unix socket.
pub fn inherited_listener(fd: i32) -> Option<std::os::unix::net::UnixListener> {
    use std::os::fd::FromRawFd;
    // SAFETY: by systemd's contract descriptors from 3 on belong to this process alone, and the caller takes each once.
    let listener = unsafe { std::os::unix::net::UnixListener::from_raw_fd(fd) };
    listener.local_addr().is_ok().then_some(listener)
}

/// Returns the listening TCP socket that systemd passed as this descriptor; `None` if it is not a TCP socket.
pub fn inherited_tcp_listener(fd: i32) -> Option<std::net::TcpListener> {
    use std::os::fd::FromRawFd;
    // SAFETY: as above.
    let listener = unsafe { std::net::TcpListener::from_raw_fd(fd) };
    listener.local_addr().is_ok().then_some(listener)
}

/// Registers a descriptor with tokio's reactor; `None` if that fails.
pub fn register(fd: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is always the same open descriptor, and is closed only when the AsyncFd drops it.
    unsafe { AsyncFd::register(fd) }.ok()
}

/// Registers a shared descriptor with tokio's reactor; `None` if that fails.
pub fn register_shared(fd: Arc<OwnedFd>) -> Option<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: an OwnedFd is always the same open descriptor, and is open at least until the AsyncFd drops its share.
    unsafe { AsyncFd::register(fd) }.ok()
}
