//! Everything that the workers of one attempt started, wherever it hid.
//!
//! Each rank has a cgroup where version 2 is at hand and writable, and enters it before its program runs. Otherwise, and
//! where a rank could not enter, its processes are found as `tree` says, which needs
//! [`adopt_orphans`](super::adopt_orphans) for those that left both their parents and their environment. Either way
//! [`Scope::gone`] leaves nothing but what the kernel itself cannot end.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use xlaunch_proto::env;

use super::cgroup::{self, Leaves};
use super::oom::{self, OomKills};
use super::tree::{self, Family};
use super::{children, sys};
use crate::process::Process;

/// Longest pause between looks at processes that are ending.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest time that dropping a scope waits for its processes.
const DROP: Duration = Duration::from_secs(1);

/// The processes of one attempt. Dropping it kills what is left, and removes its cgroups.
#[derive(Debug)]
pub struct Scope {
    family: Family,
    leaves: Option<Leaves>,
    /// A worker could not enter its cgroup.
    outside: bool,
    before: oom::Before,
}

/// A process that still exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Its process id.
    pub pid: u32,
    /// Its program, as far as the kernel remembers.
    pub name: String,
    /// Its state, as in `ps`: `D` cannot be killed.
    pub state: char,
}

impl Scope {
    /// A scope for `world` local ranks, with a cgroup per rank where version 2 is at hand and writable.
    pub fn create(run_id: &str, attempt: u32, world: u32) -> Self {
        let mut scope = Self::without_cgroup(run_id);
        scope.leaves = Leaves::create(run_id, attempt, world);
        scope
    }

    pub(super) fn without_cgroup(run_id: &str) -> Self {
        let pid = getpid();
        let family = Family {
            mark: tree::mark(run_id),
            session: session(),
            leaders: BTreeMap::new(),
            since: tree::now(),
            // The first process of a container is handed everybody's orphans, and all end with it anyway.
            adopts: pid != Pid::INIT,
        };
        Self { family, leaves: None, outside: false, before: oom::Before::now() }
    }

    /// Marks the command as one of this scope, and lets it enter its rank's cgroup before its program runs.
    pub fn enter(&self, local_rank: u32, command: &mut Command) {
        command.env(env::SCOPE, &self.family.mark);
        if let Some(procs) = self.leaves.as_ref().and_then(|leaves| leaves.entrance(local_rank)) {
            sys::enter_cgroup(command, procs);
        }
    }

    /// A worker runs, or has already ended: its [`Worker`](super::Worker) is kept for as long as this scope.
    pub fn started(&mut self, pid: u32) {
        if let Some(process) = Process::read(pid) {
            self.family.leaders.insert(pid, process.started);
            self.outside |= !self.leaves.as_ref().is_some_and(|leaves| leaves.hold(pid));
        }
    }

    /// Signals the process groups of all workers, alive or not: what they started may be. Stopped ones are continued, so
    /// that they hear a signal that asks them to end.
    pub fn signal(&self, signal: Signal) {
        self.groups(signal);
        if ![Signal::KILL, Signal::STOP, Signal::CONT].contains(&signal) {
            self.groups(Signal::CONT);
        }
    }

    fn groups(&self, signal: Signal) {
        for (pid, started) in &self.family.leaders {
            // A worker that is not collected keeps the number of its group from others.
            if Process::read(*pid).is_some_and(|process| process.started == *started)
                && let Some(group) = i32::try_from(*pid).ok().and_then(Pid::from_raw)
            {
                // A group without processes needs no signal.
                let _ = kill_process_group(group, signal);
            }
        }
    }

    /// At SIGTSTP: stops the workers, then this process. Call [`resume`](Self::resume) at SIGCONT.
    pub fn suspend(&self) {
        self.groups(Signal::STOP);
        // The call cannot fail for the own process.
        let _ = kill_process(getpid(), Signal::STOP);
    }

    /// At SIGCONT: continues the workers.
    pub fn resume(&self) {
        self.groups(Signal::CONT);
    }

    /// Sends SIGKILL to everything, until nothing new appears. Returns before all have ended.
    pub fn kill(&self) {
        self.kill_found();
    }

    /// What existed before the signal.
    fn kill_found(&self) -> Vec<Process> {
        if let Some(leaves) = self.leaves.as_ref().filter(|_| self.has_cgroup()) {
            let found = self.members();
            if found.is_empty() || cgroup::kill(&leaves.path).is_ok() {
                return found;
            }
        }
        tree::kill(|| self.members())
    }

    /// Processes that still exist.
    pub fn left(&self) -> Vec<Left> {
        let left = |process: Process| Left { pid: process.pid, name: process.name, state: process.state };
        self.members().into_iter().map(left).collect()
    }

    fn members(&self) -> Vec<Process> {
        let mut members = self.leaves.as_ref().map(|it| cgroup::members(&it.path)).unwrap_or_default();
        if !self.has_cgroup() {
            members.extend(self.family.members());
            members.sort_by_key(|process| process.pid);
            members.dedup_by_key(|process| process.pid);
        }
        members
    }

    /// Kills everything and waits for its end. What is left after `patience` the kernel cannot end, as a rule for a device
    /// that does not answer.
    pub async fn gone(&self, patience: Duration) -> Vec<Left> {
        let deadline = Instant::now() + patience;
        let mut pause = Duration::from_millis(1);
        loop {
            let found = self.kill_found();
            children::reap_orphans();
            if found.is_empty() || Instant::now() >= deadline {
                return if found.is_empty() { Vec::new() } else { self.left() };
            }
            tokio::time::sleep(pause).await;
            pause = PAUSE.min(pause * 2);
        }
    }

    /// What the kernel has killed for lack of memory since this scope began.
    pub fn oom_kills(&self, local_rank: u32) -> OomKills {
        let of_rank = self.leaves.as_ref().and_then(|leaves| leaves.oom_kills(local_rank));
        self.before.since(of_rank.unwrap_or(0))
    }

    /// Whether all workers so far are in cgroups of this scope.
    pub fn has_cgroup(&self) -> bool {
        self.leaves.is_some() && !self.outside
    }

    /// The cgroup of this attempt.
    #[cfg(test)]
    pub(super) fn cgroup(&self) -> Option<&std::path::Path> {
        self.leaves.as_ref().map(|leaves| leaves.path.as_path())
    }

    /// Its workers: numbers and start times.
    pub(super) fn leaders(&self) -> &BTreeMap<u32, u64> {
        &self.family.leaders
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP;
        let removed = |leaves: &Option<Leaves>| {
            leaves.as_ref().is_none_or(|leaves| cgroup::remove(&leaves.path).is_ok())
        };
        while !(self.kill_found().is_empty() && removed(&self.leaves)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The session of this process.
pub(super) fn session() -> u32 {
    Process::own().map_or(0, |own| own.session)
}
