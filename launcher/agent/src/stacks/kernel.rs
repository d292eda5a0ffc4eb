//! Reads the state of a process and its threads from `/proc`.

use fs_err::{read_dir, read_to_string};
use xlaunch_proto::v1::{ProcessStacks, ThreadState};

use xlaunch_host::process::Process;

/// Maximum number of threads listed per process.
const MAX_THREADS: usize = 512;

/// Reads a process and its threads; `None` if it has exited.
pub(super) fn process(pid: u32) -> Option<ProcessStacks> {
    let process = Process::read(pid).filter(|process| !process.ended())?;
    Some(ProcessStacks {
        pid,
        parent: process.parent,
        name: process.name,
        state: process.state.to_string(),
        tracer_pid: tracer(pid).unwrap_or(0),
        threads: tasks(pid).into_iter().take(MAX_THREADS).filter_map(|tid| thread(pid, tid)).collect(),
        dumps: Vec::new(),
    })
}

/// Returns the id of a process that traces any of the threads. A debugger may be attached to a single thread.
pub(super) fn tracer(pid: u32) -> Option<u32> {
    tasks(pid).into_iter().find_map(|tid| {
        let status = read_to_string(format!("/proc/{pid}/task/{tid}/status")).ok()?;
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?;
        tracer.trim().parse().ok().filter(|tracer| *tracer != 0)
    })
}

/// Returns the thread ids in order; the first one is that of the main thread.
fn tasks(pid: u32) -> Vec<u32> {
    let tasks = read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut tids: Vec<u32> = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect();
    tids.sort_unstable();
    tids
}

fn thread(pid: u32, tid: u32) -> Option<ThreadState> {
    let file = |name: &str| read_to_string(format!("/proc/{pid}/task/{tid}/{name}"));
    let stat = file("stat").ok()?;
    let state = stat.rsplit_once(") ")?.1.chars().next()?;
    // Unknown if the kernel does not provide it, or without permission.
    let wait_channel = file("wchan").ok().filter(|function| function != "0").unwrap_or_default();
    Some(ThreadState {
        tid,
        name: file("comm").ok()?.trim_end().to_owned(),
        state: state.to_string(),
        wait_channel,
        syscall: file("syscall").unwrap_or_default().trim_end().to_owned(),
    })
}
