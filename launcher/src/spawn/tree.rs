//! Processes as `/proc` shows them, and which of them belong to a run where no cgroup says so.
//!
//! A process belongs to a [`Family`] if it is a worker; is in a worker's process group; carries the run's mark in its
//! environment; was handed to xlaunch when its parent died; or descends from one that belongs. So that none slips away by
//! forking while others are counted, all are stopped first, until a look finds nobody new, and then killed. A process is
//! never told by its number alone, which may be given to another one: its start time must be the same.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use xlaunch_proto::env;

use super::children;

/// Clock ticks per second in `/proc`, whatever the kernel's own clock.
const TICKS: u64 = 100;
/// Longest time that one killing looks for processes that appear meanwhile.
const LOOK: Duration = Duration::from_millis(500);

/// Further looks behind one that found nothing.
const LOOKS: u32 = 2;

/// A process at the time of a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) parent: u32,
    pub(super) group: u32,
    pub(super) session: u32,
    /// As in `ps`.
    pub(super) state: char,
    threads: u32,
    /// Ticks from the start of the system to its own.
    pub(super) started: u64,
    pub(super) name: String,
}

impl Process {
    /// The process with this number now.
    pub(super) fn read(pid: u32) -> Option<Self> {
        // Its name can be any bytes.
        let stat = fs_err::read(format!("/proc/{pid}/stat")).ok()?;
        Self::parse(&String::from_utf8_lossy(&stat))
    }

    fn parse(stat: &str) -> Option<Self> {
        // The name in parentheses may hold parentheses.
        let (head, tail) = stat.rsplit_once(") ")?;
        let (pid, name) = head.split_once(" (")?;
        let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field)?.parse().ok();
        Some(Self {
            pid: pid.parse().ok()?,
            parent: number(1)?,
            group: number(2)?,
            session: number(3)?,
            state: fields.first()?.chars().next()?,
            threads: number(17)?,
            started: fields.get(19)?.parse().ok()?,
            name: name.to_string(),
        })
    }

    /// All processes that can be seen.
    pub(super) fn all() -> Vec<Self> {
        let Ok(entries) = fs_err::read_dir("/proc") else { return Vec::new() };
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter_map(Self::read).collect()
    }

    /// Nothing of it runs, and it only waits to be collected. A first thread that has ended before others does not.
    pub(super) fn ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }

    /// Signals it, unless its number is another process's by now.
    pub(super) fn signal(&self, signal: Signal) {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return };
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // The number may have passed on before the descriptor was opened, but no longer after.
        if Self::read(self.pid).is_some_and(|now| now.started == self.started) {
            // It may have ended, or be another user's: whoever asks what is left sees it.
            let _ = pidfd_send_signal(pidfd, signal);
        }
    }

    fn carries(&self, mark: &[u8]) -> bool {
        fs_err::read(format!("/proc/{}/environ", self.pid))
            .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|variable| variable == mark))
    }
}

/// Value of [`env::SCOPE`] for a run of this process: no other launch on this host has the same.
pub(super) fn mark(run_id: &str) -> String {
    let pid = std::process::id();
    format!("{run_id}:{pid}:{}", Process::read(pid).map_or(0, |own| own.started))
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
        let own = std::process::id();
        let young: Vec<Process> =
            all.into_iter().filter(|process| process.started >= self.since && process.pid != own).collect();
        let root = |process: &&Process| {
            self.leaders.get(&process.pid) == Some(&process.started)
                || in_group(process)
                || self.adopts && children::adopted(process)
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
        Process { pid, parent, group, session, state: 'S', threads: 1, started, name: "x".into() }
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
    fn names_with_parentheses_and_spaces_are_read() {
        let stat = "42 (a) R (b) S 1 42 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 3 0 1234 5 6";
        let read = Process::parse(stat).unwrap();
        assert_eq!((read.pid, read.name.as_str(), read.state, read.parent), (42, "a) R (b", 'S', 1));
        assert_eq!((read.group, read.session, read.threads, read.started), (42, 7, 3, 1234));
        assert_eq!(Process::read(std::process::id()).unwrap().pid, std::process::id());
        assert!(Process::read(std::process::id()).unwrap().started <= now());
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
