//! The children of this process: processes that it started, and orphans that it adopted as a subreaper.
//!
//! A started child is registered under a lock before it can exit, and only the code that started it reaps it. All other
//! children are orphans of workers, recognised by a process group other than xlaunch's.

use std::collections::BTreeSet;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::process::{
    Pid, Resource, Rlimit, WaitId, WaitIdOptions, getpid, getrlimit, set_child_subreaper, setrlimit, waitid,
};

use super::{refused, sys};
use crate::process::Process;

static STARTED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
/// The limit of open files before it was raised; unset if it was not.
static ORIGINAL_LIMIT: OnceLock<Rlimit> = OnceLock::new();

fn started() -> MutexGuard<'static, BTreeSet<u32>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a process that [`reap_orphans`] leaves alone until [`forget`] is called.
pub fn spawn(command: &mut Command) -> std::io::Result<Child> {
    restore_open_file_limit(command);
    let mut started = started();
    let child = command.spawn()?;
    started.insert(child.id());
    Ok(child)
}

/// Raises the soft limit of open files of this process to the hard limit, because callers, agents and workers, five
/// each, take descriptors. Processes that [`spawn`] starts get the original limit: programs that use `select` fail
/// above 1,024.
pub fn raise_open_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok()
    {
        // Keep the first value: an earlier job of this process may have raised the limit already.
        let _ = ORIGINAL_LIMIT.set(limit);
    }
}

fn restore_open_file_limit(command: &mut Command) {
    if let Some(limit) = ORIGINAL_LIMIT.get() {
        sys::limit_open_files(command, *limit);
    }
}

/// Registers an orphan as a started child. `start` returns the id of a process whose parent has just exited;
/// [`reap_orphans`] leaves it alone until [`forget`] is called.
pub fn adopt(start: impl FnOnce() -> std::io::Result<u32>) -> std::io::Result<u32> {
    // The lock is held during the call, because the process may exit at any time, and `reap_orphans` must not reap it.
    let mut started = started();
    let pid = start()?;
    started.insert(pid);
    Ok(pid)
}

/// Removes a process that has been reaped or is left to [`reap_orphans`].
pub fn forget(pid: u32) {
    started().remove(&pid);
}

/// Returns whether a process is an orphan that this process (`own`) has adopted.
pub fn is_adopted(process: &Process, own: &Process) -> bool {
    is_orphan(process, own, &started())
}

fn is_orphan(process: &Process, own: &Process, started: &BTreeSet<u32>) -> bool {
    process.parent == own.pid && process.group != own.group && !started.contains(&process.pid)
}

/// Returns the children of this process, or all processes if the kernel does not list children
/// (`CONFIG_PROC_CHILDREN`).
fn children() -> Vec<Process> {
    let tasks = fs_err::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = tasks.map(|task| fs_err::read_to_string(task.path().join("children")).ok());
    // Scanning `/proc` instead would be slow on a host with thousands of processes. The children of a thread that exits
    // during the loop move to another thread.
    let lists: Vec<String> = lists.flatten().collect();
    if lists.is_empty() {
        return Process::all();
    }
    let pids = lists.iter().flat_map(|list| list.split_ascii_whitespace()).filter_map(|pid| pid.parse().ok());
    pids.filter_map(Process::read).collect()
}

/// Makes this process a subreaper: orphaned descendants become its children instead of init's.
pub fn adopt_orphans() -> std::io::Result<()> {
    set_child_subreaper(Some(getpid())).map_err(|error| refused("prctl(PR_SET_CHILD_SUBREAPER)", error))
}

/// Returns whether any child has been stopped by a signal.
pub fn has_stopped_child() -> bool {
    let stop = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(waitid(WaitId::All, stop), Ok(Some(_)))
}

/// Reaps orphans that have exited. Workers are left to [`Worker::exit`](super::Worker::exit). Call it at SIGCHLD.
pub fn reap_orphans() {
    let any = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    if !matches!(waitid(WaitId::All, any), Ok(Some(_))) {
        return;
    }
    // The exited child may be one whose exec has just failed: its starter holds the lock, and reaps it. Other children
    // are reaped at the next SIGCHLD.
    let Ok(started) = STARTED.try_lock() else { return };
    let Some(own) = Process::own() else { return };
    for process in children() {
        if process.ended()
            && is_orphan(&process, &own, &started)
            && let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw)
        {
            // Cannot fail: the process is an exited child.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_file_limit_is_raised_to_the_hard_limit() {
        raise_open_file_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
