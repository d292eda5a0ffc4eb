//! Finds the processes of a run that has no cgroups.
//!
//! A process belongs to the run if it is a worker, is in a worker's process group, carries the run's mark in its
//! environment, was adopted by xlaunch when its parent died, or descends from such a process. The mark alone does not
//! suffice: jobs that a worker submits to Slurm, LSF or PBS inherit it, too. Before they are killed, all of them are
//! stopped until a scan finds no new ones, so that none can fork. A process is identified by id and start time, because
//! ids are reused.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use xlaunch_proto::env;

use super::children;
use crate::process::Process;

/// `USER_HZ`: the unit of times in `/proc`, independent of the kernel's internal clock.
const TICKS_PER_SECOND: u64 = 100;
/// Time limit of [`kill`] for stopping processes that keep appearing. After that it kills the ones it has found.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// Number of further scans that must find nothing after the first empty scan.
const EMPTY_RESCANS: u32 = 2;
/// Variables that identify a job, and a step of Slurm. `sbatch`, `bsub` and `qsub -V` pass on the whole environment of
/// the process that calls them, but a new job or step has its own values of these.
const JOB_VARIABLES: [&str; 4] = ["SLURM_JOB_ID", "SLURM_STEP_ID", "LSB_JOBID", "PBS_JOBID"];

/// Returns the value of [`env::SCOPE`] for a worker with this environment: the run's mark and the ids of its job.
pub(super) fn scope(mark: &str, environment: impl Fn(&str) -> Option<OsString>) -> String {
    let id = |name| environment(name).unwrap_or_default().to_string_lossy().into_owned();
    format!("{mark}:{}", JOB_VARIABLES.map(id).join(","))
}

/// Returns the mark of the run whose workers or their descendants have this environment; `None` outside of runs, which
/// includes other jobs and steps that have inherited [`env::SCOPE`].
pub fn run_of(environment: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    let scope = environment(env::SCOPE)?.into_string().ok()?;
    let (mark, ids) = scope.rsplit_once(':')?;
    // A variable that a worker has removed, to hide Slurm from a program, does not mean another job.
    let is_same = |(name, id): (&str, &str)| environment(name).is_none_or(|own| own == *id);
    JOB_VARIABLES.into_iter().zip(ids.split(',')).all(is_same).then(|| mark.to_owned())
}

/// Returns a mark for a run of this process. It is unique on this host.
pub(super) fn mark(run_id: &str) -> String {
    format!("{run_id}:{}:{}", std::process::id(), Process::own().map_or(0, |own| own.started))
}

/// Clock ticks since boot.
pub(super) fn clock_ticks() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec.cast_unsigned() * TICKS_PER_SECOND
        + now.tv_nsec.cast_unsigned() * TICKS_PER_SECOND / 1_000_000_000
}

/// The properties by which a run's processes are recognised.
#[derive(Clone, Debug)]
pub(super) struct RunProcesses {
    /// The run's mark in the environment of the processes; see [`run_of`].
    pub(super) mark: String,
    /// xlaunch's session, in which workers start. A process group cannot span sessions, so groups of others are
    /// unrelated.
    pub(super) session: u32,
    /// Process ids and start times of the workers, which lead their process groups.
    pub(super) leaders: BTreeMap<u32, u64>,
    /// Start of the run, in clock ticks since boot. Processes that started earlier do not belong to it.
    pub(super) since: u64,
    /// True if orphans adopted by this process belong to the run.
    pub(super) adopts: bool,
    /// Process ids and start times of workers of the next attempt, which must not be killed.
    pub(super) spared: BTreeMap<u32, u64>,
}

impl RunProcesses {
    /// Returns the living processes of the run.
    pub(super) fn list(&self) -> Vec<Process> {
        self.select(Process::all(), |process| {
            run_of(|name| process.variable(name)).as_deref() == Some(&self.mark)
        })
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
        let is_spared = |process: &Process| self.spared.get(&process.pid) == Some(&process.started);
        let candidates: Vec<Process> = all
            .into_iter()
            .filter(|process| process.started >= self.since && process.pid != pid && !is_spared(process))
            .collect();
        let root = |process: &&Process| {
            self.leaders.get(&process.pid) == Some(&process.started)
                || in_group(process)
                || self.adopts && own.as_ref().is_some_and(|own| children::is_adopted(process, own))
                || marked(process)
        };
        let mut members: BTreeSet<u32> = candidates.iter().filter(root).map(|process| process.pid).collect();
        loop {
            let before = members.len();
            for process in &candidates {
                if members.contains(&process.parent) {
                    members.insert(process.pid);
                }
            }
            if members.len() == before {
                break;
            }
        }
        candidates.into_iter().filter(|process| members.contains(&process.pid) && !process.ended()).collect()
    }
}

/// Kills the processes that `scan` finds until it finds no new ones, except for spared ones. Returns those of the last
/// scan, which have been sent SIGKILL, and whether any was spared.
///
/// A scan first lists process ids, then reads each process. A process that forks after the listing and exits before it
/// is read hides its child, so a single empty scan proves nothing.
pub(super) fn kill(
    scan: impl Fn() -> Vec<Process>,
    is_spared: impl Fn(&Process) -> bool,
) -> (Vec<Process>, bool) {
    let deadline = Instant::now() + STOP_TIMEOUT;
    let mut stopped = BTreeSet::new();
    let mut empty_scans = 0;
    loop {
        let (spared, found): (Vec<_>, Vec<_>) = scan().into_iter().partition(&is_spared);
        if found.is_empty() && empty_scans < EMPTY_RESCANS {
            empty_scans += 1;
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
            return (found, !spared.is_empty());
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

    fn run() -> RunProcesses {
        let leaders = BTreeMap::from([(1_000_010, 500)]);
        RunProcesses {
            mark: "run:1:1".into(),
            session: 7,
            leaders,
            since: 400,
            adopts: false,
            spared: BTreeMap::new(),
        }
    }

    fn selected(all: Vec<Process>, marked: u32) -> Vec<u32> {
        let found = run().select(all, |process| process.pid == marked);
        found.into_iter().map(|process| process.pid).collect()
    }

    #[test]
    fn clock_ticks_match_start_times_in_proc() {
        assert!(Process::own().unwrap().started <= clock_ticks());
    }

    #[test]
    fn workers_groups_marked_processes_and_descendants_belong() {
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
    fn other_jobs_and_steps_that_inherit_the_scope_do_not_belong() {
        let run_in = |launch: &[(&str, &str)], own: &[(&str, &str)]| {
            let of = |variables: &[(&str, &str)], name: &str| {
                variables.iter().rfind(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
            };
            let scope = scope("run:1:1", |name| of(launch, name));
            let inherited = [launch, &[(env::SCOPE, &scope)], own].concat();
            run_of(|name| of(&inherited, name).filter(|value| value != "unset"))
        };
        let step = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0")];
        let removed = [("SLURM_JOB_ID", "unset"), ("SLURM_STEP_ID", "unset")];
        for (launch, own) in
            [(&[][..], &[][..]), (&step, &[]), (&step, &removed), (&[("PBS_JOBID", "9.s")], &[])]
        {
            assert_eq!(run_in(launch, own).as_deref(), Some("run:1:1"), "{launch:?} {own:?}");
        }
        for (launch, own) in [
            (&step[..], ("SLURM_JOB_ID", "8")),
            (&step, ("SLURM_STEP_ID", "1")),
            // `srun` in a launch of a batch script, and on a login node.
            (&step[..1], ("SLURM_STEP_ID", "0")),
            (&[], ("SLURM_JOB_ID", "7")),
            (&[("LSB_JOBID", "5")], ("LSB_JOBID", "6")),
            (&[("PBS_JOBID", "9.s")], ("PBS_JOBID", "10.s")),
        ] {
            assert_eq!(run_in(launch, &[own]), None, "{launch:?} {own:?}");
        }
        assert_eq!(run_of(|_| None), None);

        let run = RunProcesses { since: 0, ..run() };
        let scope = scope(&run.mark, |_| None);
        let mut command = std::process::Command::new("sleep");
        command.arg("1000").env(env::SCOPE, scope);
        for name in JOB_VARIABLES {
            command.env_remove(name);
        }
        let mut member = command.spawn().unwrap();
        let mut other = command.env("SLURM_JOB_ID", "8").spawn().unwrap();
        let listed: Vec<u32> = run.list().iter().map(|process| process.pid).collect();
        for child in [&mut member, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(listed, [member.id()]);
    }

    #[test]
    fn kill_rescans_after_an_empty_scan_and_spares_processes() {
        let sleep = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (mut child, mut other) = (sleep(), sleep());
        let [process, spared] = [&child, &other].map(|child| Process::read(child.id()).unwrap());
        let scans = std::cell::Cell::new(0);
        let empty_at_first = || {
            scans.set(scans.get() + 1);
            if scans.get() == 1 { Vec::new() } else { vec![process.clone(), spared.clone()] }
        };
        assert_eq!(kill(empty_at_first, |found| *found == spared), (vec![process.clone()], true));
        assert!(!child.wait().unwrap().success());
        assert!(other.try_wait().unwrap().is_none());
        assert_eq!(kill(|| vec![spared.clone()], |_| false), (vec![spared.clone()], false));
        other.wait().unwrap();
        assert_eq!(kill(Vec::new, |_| false), (Vec::new(), false));
    }

    #[test]
    fn reused_process_ids_do_not_belong() {
        let reused = vec![process(1_000_010, 1, 1_000_010, 7, 900), process(1_000_011, 1, 1_000_010, 7, 901)];
        assert!(selected(reused, 0).is_empty());
        let other_session = vec![process(1_000_011, 1, 1_000_010, 8, 901)];
        assert!(selected(other_session, 0).is_empty());
        let older = vec![process(1_000_011, 1, 1_000_010, 7, 399)];
        assert!(selected(older, 0).is_empty());
    }
}
