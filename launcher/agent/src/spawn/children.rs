//! The children of this process: those it started, and orphans handed to it.
//!
//! What this process starts is known before it can end, under one lock, and collected only by who started it. All other
//! children are orphans of workers, told by their process group, which is not xlaunch's.

use std::collections::BTreeSet;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, set_child_subreaper, waitid};

use crate::process::Process;

static STARTED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn started() -> MutexGuard<'static, BTreeSet<u32>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a process that [`reap_orphans`] leaves alone until it is forgotten.
pub(super) fn start(command: &mut Command) -> std::io::Result<Child> {
    let mut started = started();
    let child = command.spawn()?;
    started.insert(child.id());
    Ok(child)
}

/// The process was collected, or nobody will.
pub(super) fn forget(pid: u32) {
    started().remove(&pid);
}

/// Whether a process is an orphan that was handed to this process, `own`.
pub(super) fn adopted(process: &Process, own: &Process) -> bool {
    is_orphan(process, own, &started())
}

fn is_orphan(process: &Process, own: &Process, started: &BTreeSet<u32>) -> bool {
    process.parent == own.pid && process.group != own.group && !started.contains(&process.pid)
}

/// Processes whose parent is this one, as far as the kernel lists them by parent; others among them where it does not.
fn children() -> Vec<Process> {
    let tasks = fs_err::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = tasks.map(|task| fs_err::read_to_string(task.path().join("children")).ok());
    // A host may have thousands of processes. A thread that ends meanwhile has left its children to another.
    let lists: Vec<String> = lists.flatten().collect();
    if lists.is_empty() {
        return Process::all();
    }
    let pids = lists.iter().flat_map(|list| list.split_ascii_whitespace()).filter_map(|pid| pid.parse().ok());
    pids.filter_map(Process::read).collect()
}

/// From now on, processes whose parents die become children of this process, not of init.
pub fn adopt_orphans() -> std::io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Collects orphans that have ended. Workers are left to [`Worker::exit`](super::Worker::exit). Call it at SIGCHLD.
pub fn reap_orphans() {
    let any = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    if !matches!(waitid(WaitId::All, any), Ok(Some(_))) {
        return;
    }
    // While a process is being started, one that failed to may lie here: it is its starter's. There is a next time.
    let Ok(started) = STARTED.try_lock() else { return };
    let Some(own) = Process::own() else { return };
    for process in children() {
        if process.ended()
            && is_orphan(&process, &own, &started)
            && let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw)
        {
            // It has ended and is ours: there is nothing to fail.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        }
    }
}
