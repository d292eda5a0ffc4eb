//! Examines the processes of a rank: kernel states of their threads, and stacks from a debugger.
//!
//! ```text
//! Subject (rank, pid) --/proc--> processes and threads --gdb or eu-stack, py-spy--> stacks --> text, gRPC
//! ```
//! Reading `/proc` does not affect a process. A debugger stops it briefly and then continues it, so no debugger is used
//! on a process that is stopped or already has a debugger.
//!
//! The functions here block for up to [`tools::TOOL_TIMEOUT`], so they must run on a thread of their own.

mod kernel;
mod text;
mod tools;

use std::collections::BTreeMap;

use xlaunch_proto::v1::{ProcessStacks, RankStacks, StacksReply};

use crate::activity::ActivityRecord;
pub use text::text;
use xlaunch_host::clock;
use xlaunch_host::process::Process;

/// Maximum number of processes examined per rank.
const MAX_PROCESSES: usize = 64;

/// The rank of a running attempt whose processes are examined.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) rank: u32,
    pub(crate) pid: u32,
    pub(crate) activity: Option<ActivityRecord>,
}

/// Level of detail of an examination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// The state of its threads from `/proc`.
    Kernel,
    /// Stacks in addition.
    Stacks,
}

/// Examines ranks concurrently. Processes that have exited are left out.
pub(crate) fn collect(subjects: &[(Subject, Detail)]) -> Vec<RankStacks> {
    let children = children();
    let mut ranks: Vec<RankStacks> = Vec::new();
    let mut dumped = Vec::new();
    for (subject, detail) in subjects {
        let pids = tree(subject.pid, &children);
        let processes: Vec<ProcessStacks> = pids.into_iter().filter_map(kernel::process).collect();
        if *detail == Detail::Stacks {
            dumped.extend((0..processes.len()).map(|process| (ranks.len(), process)));
        }
        let activity = subject.activity.as_ref().and_then(ActivityRecord::read).map(Into::into);
        ranks.push(RankStacks { rank: subject.rank, activity, processes, unix_ms: clock::unix_ms() });
    }
    let processes: Vec<&ProcessStacks> =
        dumped.iter().map(|(rank, process)| &ranks[*rank].processes[*process]).collect();
    let dumps = tools::dump(&processes);
    for ((rank, process), dumps) in dumped.into_iter().zip(dumps) {
        ranks[rank].processes[process].dumps = dumps;
    }
    ranks
}

/// Splits a reply into messages with one process each.
pub(crate) fn split(ranks: Vec<RankStacks>) -> Vec<StacksReply> {
    let mut replies = Vec::new();
    for RankStacks { rank, activity, processes, unix_ms } in ranks {
        // A rank whose processes have all exited gets one message too.
        let count = processes.len().max(1);
        let mut processes = processes.into_iter();
        for _ in 0..count {
            let processes = processes.next().into_iter().collect();
            replies.push(StacksReply { ranks: vec![RankStacks { rank, activity, processes, unix_ms }] });
        }
    }
    replies
}

/// Joins the messages of a reply, the inverse of `split`.
pub fn join(replies: Vec<StacksReply>) -> Vec<RankStacks> {
    let mut ranks: Vec<RankStacks> = Vec::new();
    for part in replies.into_iter().flat_map(|reply| reply.ranks) {
        match ranks.last_mut() {
            Some(last) if last.rank == part.rank => last.processes.extend(part.processes),
            _ => ranks.push(part),
        }
    }
    ranks
}

/// A debugger that is attached to a process of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tracer {
    pub(crate) rank: u32,
    pub(crate) pid: u32,
    /// Name and process id of the debugger.
    pub(crate) debugger: (String, u32),
}

/// Returns the first debugger found, except those that this process has started itself to print stacks.
pub(crate) fn tracer<'a>(subjects: impl IntoIterator<Item = &'a Subject>) -> Option<Tracer> {
    let children = children();
    subjects.into_iter().find_map(|subject| {
        tree(subject.pid, &children).into_iter().find_map(|pid| {
            let tracer = kernel::tracer(pid)?;
            let debugger = Process::read(tracer)?;
            let is_own = debugger.parent == std::process::id();
            (!is_own).then_some(Tracer { rank: subject.rank, pid, debugger: (debugger.name, tracer) })
        })
    })
}

/// Returns the children of every process on the host.
fn children() -> BTreeMap<u32, Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for process in Process::all() {
        children.entry(process.parent).or_default().push(process.pid);
    }
    children
}

/// Returns a process and its descendants, parents first.
fn tree(root: u32, children: &BTreeMap<u32, Vec<u32>>) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() && found.len() < MAX_PROCESSES {
        found.extend(children.get(&found[next]).into_iter().flatten());
        next += 1;
    }
    found.truncate(MAX_PROCESSES);
    found
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that is killed, with its process group, at the end of the test.
    struct Running(Child);

    impl Running {
        fn start(program: &str, arguments: &[&str]) -> Self {
            use std::os::unix::process::CommandExt;
            let mut command = Command::new(program);
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            Self(command.process_group(0).spawn().unwrap())
        }

        fn subject(&self) -> Subject {
            Subject { rank: 3, pid: self.0.id(), activity: None }
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let group = rustix::process::Pid::from_child(&self.0);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = self.0.wait();
        }
    }

    #[test]
    fn tree_lists_the_worker_first_and_then_all_its_descendants() {
        let children = BTreeMap::from([(1, vec![2, 3]), (2, vec![4]), (9, vec![10])]);
        assert_eq!(tree(1, &children), [1, 2, 3, 4]);
        let endless: BTreeMap<u32, Vec<u32>> = (1..200).map(|pid| (pid, vec![pid + 1])).collect();
        assert_eq!(tree(1, &endless).len(), MAX_PROCESSES);
    }

    #[test]
    fn threads_of_the_whole_process_tree_are_shown_with_their_kernel_state() {
        let shell = Running::start("sh", &["-c", "sleep 1000 & wait"]);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let rank = loop {
            let rank = collect(&[(shell.subject(), Detail::Kernel)]).remove(0);
            if rank.processes.iter().any(|process| process.name == "sleep" && process.state == "S") {
                break rank;
            }
            assert!(std::time::Instant::now() < deadline, "{rank:?}");
        };
        assert_eq!((rank.rank, rank.processes.len(), rank.processes[0].pid), (3, 2, shell.0.id()));
        let sleep = &rank.processes[1];
        assert_eq!((sleep.parent, sleep.threads.len(), sleep.threads[0].tid), (shell.0.id(), 1, sleep.pid));
        assert!(rank.processes.iter().all(|process| process.dumps.is_empty()), "{rank:?}");
        let text = text(&rank);
        assert!(text.contains(&format!("process {} (sleep), state S", sleep.pid)), "{text}");
    }

    #[test]
    fn reply_survives_splitting_and_joining() {
        let process = |pid| ProcessStacks { pid, ..ProcessStacks::default() };
        let rank = |rank, pids: &[u32]| RankStacks {
            rank,
            activity: None,
            processes: pids.iter().map(|pid| process(*pid)).collect(),
            unix_ms: 5,
        };
        let ranks = vec![rank(0, &[7, 8]), rank(1, &[]), rank(2, &[9])];
        let replies = split(ranks.clone());
        assert_eq!((replies.len(), join(replies)), (4, ranks));
    }

    #[test]
    fn process_without_debugger_has_no_tracer() {
        let sleep = Running::start("sleep", &["1000"]);
        assert_eq!(tracer([&sleep.subject()]), None);
    }
}
