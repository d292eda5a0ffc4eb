//! All processes that the workers of an attempt started, even if they have moved to other sessions.
//!
//! Each rank has a cgroup if cgroups version 2 is mounted and writable, and enters it before its program runs.
//! Otherwise, or if a rank could not enter its cgroup, processes are found as described in `membership`, which needs
//! [`adopt_orphans`](super::adopt_orphans) to find processes that have lost their parent and cleared their environment.
//! Either way [`ProcessTree::kill_and_wait`] leaves only processes that the kernel itself cannot kill.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group, test_kill_process};
use xlaunch_proto::env;

use super::cgroup::{self, RankCgroups};
use super::membership::{self, RunProcesses};
use super::oom::{self, OomKills};
use super::{children, sys};
use crate::cgroups;
use crate::process::Process;

/// Upper bound of the poll interval for processes that are to disappear; it starts at 1 ms and doubles.
const MAX_EXIT_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for [cleaners](Process::is_cleaner) to exit by themselves. PyTorch's manager waits 2 s for further clients
/// first.
pub(super) const CLEANING_TIMEOUT: Duration = Duration::from_secs(4);
/// Time for killed processes to disappear when a tree is dropped, which blocks.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);

/// The processes of one attempt. Dropping it kills those that remain, and removes its cgroups.
#[derive(Debug)]
pub struct ProcessTree {
    members: RunProcesses,
    cgroups: Option<RankCgroups>,
    /// True if a worker could not enter its cgroup.
    outside_cgroup: bool,
    oom_before: oom::OomCounters,
}

/// A process that still exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survivor {
    pub pid: u32,
    /// The kernel's name of the program, up to 15 bytes.
    pub name: String,
    /// The state letter that `ps` shows. A process in state `D` cannot be killed.
    pub state: char,
    /// It runs as another user, whose processes this one may not signal.
    pub is_forbidden: bool,
}

/// The line about a process that was killed but still exists.
impl fmt::Display for Survivor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name, state, is_forbidden } = self;
        if *is_forbidden {
            write!(f, "process {pid} ({name}) runs as another user and cannot be killed: it is left running")
        } else {
            write!(f, "process {pid} ({name}, state {state}) was killed but does not exit")
        }
    }
}

impl ProcessTree {
    /// Creates a tree for `world` local ranks, with a cgroup for each if version 2 is mounted and writable.
    pub fn create(run_id: &str, attempt: u32, world: u32) -> Self {
        let mut tree = Self::without_cgroup(run_id);
        tree.cgroups = RankCgroups::create(run_id, attempt, world);
        tree
    }

    pub fn without_cgroup(run_id: &str) -> Self {
        let pid = getpid();
        let members = RunProcesses {
            mark: membership::mark(run_id),
            session: session(),
            leaders: BTreeMap::new(),
            since: membership::clock_ticks(),
            // The init process of a container inherits all orphans, not only those of this run. All processes end with
            // it anyway.
            adopts: pid != Pid::INIT,
            spared: BTreeMap::new(),
        };
        Self { members, cgroups: None, outside_cgroup: false, oom_before: oom::OomCounters::read() }
    }

    /// Adds the run's scope to the command's environment, which must be complete otherwise, and makes the command enter
    /// its rank's cgroup before its program runs.
    pub fn prepare(&self, local_rank: u32, command: &mut Command) {
        let scope = membership::scope(&self.members.mark, |name| {
            let own = || std::env::var_os(name);
            let set = command.get_envs().find(|(variable, _)| *variable == name);
            set.map_or_else(own, |(_, value)| Some(value?.to_owned()))
        });
        command.env(env::SCOPE, scope);
        if let Some(procs) = self.cgroup_of(local_rank) {
            sys::enter_cgroup(command, procs);
        }
    }

    /// Opens `cgroup.procs` of a rank, for a worker that does not enter its cgroup itself.
    pub fn cgroup_of(&self, local_rank: u32) -> Option<Arc<OwnedFd>> {
        self.cgroups.as_ref().and_then(|cgroups| cgroups.procs_file(local_rank))
    }

    /// Adds a started worker, whose [`Worker`](super::Worker) must outlive this tree so that its id is not reused.
    pub fn add(&mut self, pid: u32) {
        if let Some(process) = Process::read(pid) {
            self.members.leaders.insert(pid, process.started);
            self.outside_cgroup |= !self.cgroups.as_ref().is_some_and(|cgroups| cgroups.contains(pid));
        }
    }

    /// Excludes the workers of `next` from this tree. They are started before this tree is killed, but begin to work
    /// only afterwards.
    pub fn spare(&mut self, next: &Self) {
        self.members.spared.clone_from(&next.members.leaders);
    }

    /// Signals the process groups of all workers, including exited ones, whose children may still run. Stopped groups
    /// are continued, so that a terminating signal is delivered. The groups of `except` are left out, as they have
    /// already received the signal.
    pub fn signal(&self, signal: Signal, except: &[u32]) {
        self.signal_groups(signal, except);
        if ![Signal::KILL, Signal::STOP, Signal::CONT].contains(&signal) {
            self.signal_groups(Signal::CONT, &[]);
        }
    }

    /// Passes on a signal whose meaning a program defines: to those processes of the workers' groups that handle it. It
    /// would kill all others, such as the processes that load data for a Python program.
    pub fn notify(&self, signal: Signal) {
        let is_of_worker = |process: &Process| self.members.leaders.contains_key(&process.group);
        self.members()
            .iter()
            .filter(|process| is_of_worker(process) && process.handles(signal))
            .for_each(|process| process.signal(signal));
    }

    fn signal_groups(&self, signal: Signal, except: &[u32]) {
        for (pid, started) in self.members.leaders.iter().filter(|(pid, _)| !except.contains(pid)) {
            // The id of the group cannot be reused before the worker is reaped.
            if Process::read(*pid).is_some_and(|process| process.started == *started)
                && let Some(group) = i32::try_from(*pid).ok().and_then(Pid::from_raw)
            {
                // The group may be empty.
                let _ = kill_process_group(group, signal);
            }
        }
    }

    /// Stops the workers, then this process by a signal that stops it. Call [`resume`](Self::resume) on SIGCONT.
    pub fn suspend(&self, signal: Signal) {
        self.signal_groups(Signal::STOP, &[]);
        // Cannot fail for this process itself.
        let _ = kill_process(getpid(), signal);
    }

    /// Handles SIGCONT: continues the workers.
    pub fn resume(&self) {
        self.signal_groups(Signal::CONT, &[]);
    }

    /// Sends SIGKILL to all processes, except for [cleaners](Process::is_cleaner), until no new ones appear. Returns
    /// those that existed before the signal, without waiting until they have exited.
    pub fn kill(&self) -> Vec<Process> {
        self.kill_except(Process::is_cleaner).0
    }

    /// Like [`kill`](Self::kill), but spares other processes. Also returns whether there are any.
    fn kill_except(&self, is_spared: impl Fn(&Process) -> bool) -> (Vec<Process>, bool) {
        if let Some(cgroups) = self.cgroups.as_ref().filter(|_| self.has_cgroup()) {
            let found = self.members();
            let is_whole = !found.iter().any(&is_spared);
            if is_whole && (found.is_empty() || cgroup::kill(&cgroups.path).is_ok()) {
                return (found, false);
            }
        }
        membership::kill(|| self.members(), is_spared)
    }

    /// Returns the processes that still exist.
    pub fn survivors(&self) -> Vec<Survivor> {
        let survivor = |process: Process| Survivor {
            is_forbidden: Pid::from_raw(process.pid.cast_signed())
                .is_some_and(|pid| test_kill_process(pid) == Err(Errno::PERM)),
            pid: process.pid,
            name: process.name,
            state: process.state,
        };
        self.members().into_iter().map(survivor).collect()
    }

    fn members(&self) -> Vec<Process> {
        let mut members = self.cgroups.as_ref().map(|it| cgroup::processes(&it.path)).unwrap_or_default();
        if !self.has_cgroup() {
            members.extend(self.members.list());
            members.sort_by_key(|process| process.pid);
            members.dedup_by_key(|process| process.pid);
        }
        members
    }

    /// Waits until all processes have exited by themselves, for at most `timeout`.
    pub async fn wait(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut pause = Duration::from_millis(1);
        while !self.members().is_empty() && Instant::now() < deadline {
            tokio::time::sleep(pause).await;
            pause = MAX_EXIT_POLL_INTERVAL.min(pause * 2);
        }
    }

    /// Kills all processes and waits until they are gone. Cleaners have some time to exit by themselves. Returns those
    /// that remain after `timeout`: the kernel cannot end them, usually because a device does not respond.
    pub async fn kill_and_wait(&self, timeout: Duration) -> Vec<Survivor> {
        let start = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let is_cleaning = start.elapsed() < CLEANING_TIMEOUT;
            let (found, has_cleaners) = self.kill_except(|process| is_cleaning && process.is_cleaner());
            children::reap_orphans();
            let is_empty = found.is_empty() && !has_cleaners;
            if is_empty || start.elapsed() >= timeout {
                return if is_empty { Vec::new() } else { self.survivors() };
            }
            tokio::time::sleep(pause).await;
            pause = MAX_EXIT_POLL_INTERVAL.min(pause * 2);
        }
    }

    /// Returns the OOM kills since this tree was created.
    pub fn oom_kills(&self, local_rank: u32) -> OomKills {
        let of_rank = self.cgroups.as_ref().and_then(|cgroups| cgroups.oom_kills(local_rank));
        self.oom_before.kills_since(of_rank.unwrap_or(0))
    }

    /// Returns whether all workers added so far are in their cgroups.
    pub fn has_cgroup(&self) -> bool {
        self.cgroups.is_some() && !self.outside_cgroup
    }

    /// The cgroup of this attempt.
    #[cfg(test)]
    pub(super) fn cgroup(&self) -> Option<&std::path::Path> {
        self.cgroups.as_ref().map(|cgroups| cgroups.path.as_path())
    }

    /// Process ids and start times of the workers.
    pub(super) fn leaders(&self) -> &BTreeMap<u32, u64> {
        &self.members.leaders
    }
}

impl Drop for ProcessTree {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_TIMEOUT;
        let removed = |cgroups: &Option<RankCgroups>| {
            cgroups.as_ref().is_none_or(|cgroups| cgroups::remove(&cgroups.path).is_ok())
        };
        while !(self.kill_except(|_| false).0.is_empty() && removed(&self.cgroups))
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The session of this process.
pub(super) fn session() -> u32 {
    Process::own().map_or(0, |own| own.session)
}
