//! Which processes belong to a run where no cgroup says so.
//!
//! A process belongs to a [`Family`] if it is a worker; is in a worker's process group; carries the run's mark in its
//! environment; was handed to xlaunch when its parent died; or descends from one that belongs. So that none slips away by
//! forking while others are counted, all are stopped first, until a look finds nobody new, and then killed. A process is
//! never told by its number alone, which may be given to another one: its start time must be the same.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use xlaunch_proto::env;

use super::children;
use crate::process::Process;

/// Clock ticks per second in `/proc`, whatever the kernel's own clock.
const TICKS: u64 = 100;
/// Longest time that one killing looks for processes that appear meanwhile.
const LOOK: Duration = Duration::from_millis(500);

/// Further looks behind one that found nothing.
const LOOKS: u32 = 2;

/// Value of [`env::SCOPE`] for a run of this process: no other launch on this host has the same.
pub(super) fn mark(run_id: &str) -> String {
    format!("{run_id}:{}:{}", std::process::id(), Process::own().map_or(0, |own| own.started))
}

/// Ticks from the start of the system to now.
pub(super) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.cast_unsigned() * TICKS + now.tv_nsec.cast_unsigned() * TICKS / 1_000_000_000
}

/// What is known of a run's processes.
#[derive(Clone, Debug)]
pub(super) struct Family {
    /// Value of [`env::SCOPE`] in their environment.
    pub(super) mark: String,
    /// The session in which workers start, xlaunch's: their process groups cannot be of another one.
    pub(super) session: u32,
    /// Workers, which lead their process groups: numbers and start times.
    pub(super) leaders: BTreeMap<u32, u64>,
    /// What has started before, in ticks, is not of this run.
    pub(super) since: u64,
    /// Whether orphans of this run become children of this process.
    pub(super) adopts: bool,
}

impl Family {
    /// Its living processes.
    pub(super) fn members(&self) -> Vec<Process> {
        let mark = format!("{}={}", env::SCOPE, self.mark);
        let all = Process::all();
        self.select(all, |process| process.carries(mark.as_bytes()))
    }

    fn select(&self, all: Vec<Process>, marked: impl Fn(&Process) -> bool) -> Vec<Process> {
        let started: BTreeMap<u32, u64> = all.iter().map(|process| (process.pid, process.started)).collect();
        let in_group = |process: &Process| {
            self.leaders.get(&process.group).is_some_and(|leader| {
                process.session == self.session
                    && started.get(&process.group).is_none_or(|current| current == leader)
            })
        };
        let pid = std::process::id();
        let own = all.iter().find(|process| process.pid == pid).cloned();
        let young: Vec<Process> =
            all.into_iter().filter(|process| process.started >= self.since && process.pid != pid).collect();
        let root = |process: &&Process| {
            self.leaders.get(&process.pid) == Some(&process.started)
                || in_group(process)
                || self.adopts && own.as_ref().is_some_and(|own| children::adopted(process, own))
                || marked(process)
        };
        let mut family: BTreeSet<u32> = young.iter().filter(root).map(|process| process.pid).collect();
        loop {
            let before = family.len();
            for process in &young {
                if family.contains(&process.parent) {
                    family.insert(process.pid);
                }
            }
            if family.len() == before {
                break;
            }
        }
        young.into_iter().filter(|process| family.contains(&process.pid) && !process.ended()).collect()
    }
}

/// Kills what `members` finds until it finds nothing new. Returns what it found: all have been sent SIGKILL.
///
/// A look lists processes first and reads them then. What a process has started after the list was made is in no look at all
/// if that process has ended when it is read: so one look that finds nothing proves nothing.
pub(super) fn kill(members: impl Fn() -> Vec<Process>) -> Vec<Process> {
    let deadline = Instant::now() + LOOK;
    let mut stopped = BTreeSet::new();
    let mut looks = 0;
    loop {
        let found = members();
        if found.is_empty() && looks < LOOKS {
            looks += 1;
            continue;
        }
        let mut new = false;
        for process in &found {
            if stopped.insert((process.pid, process.started)) {
                new = true;
                process.signal(Signal::STOP);
            }
        }
        if !new || Instant::now() > deadline {
            found.iter().for_each(|process| process.signal(Signal::KILL));
            return found;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, parent: u32, group: u32, session: u32, started: u64) -> Process {
        let name = "x".into();
        Process { pid, parent, group, session, state: 'S', threads: 1, ticks: 0, started, pages: 0, name }
    }

    fn family() -> Family {
        let leaders = BTreeMap::from([(1_000_010, 500)]);
        Family { mark: "run:1:1".into(), session: 7, leaders, since: 400, adopts: false }
    }

    fn selected(all: Vec<Process>, marked: u32) -> Vec<u32> {
        let found = family().select(all, |process| process.pid == marked);
        found.into_iter().map(|process| process.pid).collect()
    }

    #[test]
    fn this_process_has_started_before_now() {
        assert!(Process::own().unwrap().started <= now());
    }

    #[test]
    fn workers_groups_marks_and_their_descendants_belong() {
        let all = vec![
            process(1_000_010, 1, 1_000_010, 7, 500),
            process(1_000_011, 1, 1_000_010, 7, 501),
            process(1_000_012, 1, 1_000_012, 1_000_012, 501),
            process(1_000_014, 1_000_013, 1_000_012, 1_000_012, 501),
            process(1_000_013, 1_000_012, 1_000_012, 1_000_012, 501),
            process(1_000_020, 1, 1_000_020, 7, 501),
        ];
        assert_eq!(selected(all, 1_000_012), [1_000_010, 1_000_011, 1_000_012, 1_000_014, 1_000_013]);
    }

    #[test]
    fn one_look_that_finds_nothing_proves_nothing() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::read(child.id()).unwrap();
        let looks = std::cell::Cell::new(0);
        let missed_at_first = || {
            looks.set(looks.get() + 1);
            if looks.get() == 1 { Vec::new() } else { vec![process.clone()] }
        };
        assert_eq!(kill(missed_at_first), std::slice::from_ref(&process));
        assert!(!child.wait().unwrap().success());
        assert!(kill(Vec::new).is_empty());
    }

    #[test]
    fn numbers_that_passed_on_to_others_do_not_belong() {
        let reused = vec![process(1_000_010, 1, 1_000_010, 7, 900), process(1_000_011, 1, 1_000_010, 7, 901)];
        assert!(selected(reused, 0).is_empty());
        let other_session = vec![process(1_000_011, 1, 1_000_010, 8, 901)];
        assert!(selected(other_session, 0).is_empty());
        let older = vec![process(1_000_011, 1, 1_000_010, 7, 399)];
        assert!(selected(older, 0).is_empty());
    }
}
