//! The processes of one attempt. They are started together, signalled together, and all gone before the next attempt.

use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;
use xlaunch_spec::exit::ExitCode;

use super::Driver;
use crate::ending::SpawnFailure;
use crate::logs::RankOutput;
use crate::python::faulthandler;
use crate::run_dir::rank_dir;
use crate::state::{Action, Event};
use xlaunch_host::doctor;
use xlaunch_host::process::Process;
use xlaunch_host::spawn::process_tree::ProcessTree;
use xlaunch_host::spawn::{Exit, Spawned, Worker, gpu_memory};
use xlaunch_host::system_errors;

/// Time to read the remaining output of an exited worker; a process that it started may hold the pipe open.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// Time for the last stderr output of a failed command's worker to arrive.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_millis(100);
/// Time for killed processes to disappear. Those that remain after it hang in the kernel.
const KILL_DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between reports of the same killed processes.
const SURVIVOR_REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum length of the line of a program that names its interpreter: that of Linux.
const MAX_FIRST_LINE_BYTES: u64 = 255;
/// Time for the GPU driver to release the memory of killed processes, before workers are started on the same GPUs.
const GPU_MEMORY_RELEASE_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, Default)]
pub(super) struct Attempt {
    /// Number of the attempt, from 0.
    pub(super) number: u32,
    /// Declared, and therefore dropped, before `workers`: it identifies workers by process ids, which cannot be reused
    /// while a [`Worker`] is kept.
    pub(super) processes: Option<ProcessTree>,
    /// Processes by rank; `None` for a worker that could not be started. Just one if all ranks are threads of the same
    /// process.
    pub(super) workers: Vec<Option<StartedWorker>>,
    /// Ends by rank.
    pub(super) ends: Vec<WorkerEnd>,
    /// The report may need the evidence of this attempt.
    pub(super) keep_evidence: bool,
    /// Processes that the workers of a command had left running when all had succeeded, and that were killed.
    pub(super) left_running: Vec<Process>,
    /// The workers have been sent a signal that ends them.
    signalled: bool,
    /// Workers whose process group has already received a signal from the terminal.
    received: Vec<(u32, Signal)>,
    /// Time at which killed workers that have not exited are reported.
    overdue: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct StartedWorker {
    pub(super) worker: Worker,
    pub(super) output: RankOutput,
}

/// The exit of a worker's process.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerExit {
    pub(super) pid: u32,
    pub(super) rank: u32,
    pub(super) exit: Exit,
}

/// Exit of a worker, or the reason why it did not start.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkerEnd {
    pub(super) exit: Option<Exit>,
    pub(super) time: Option<SystemTime>,
    /// Monotonic time of the exit, to compare with the times of its output.
    pub(super) at: Option<Instant>,
    /// xlaunch had sent it a signal before.
    pub(super) signalled: bool,
    /// It was already being killed before xlaunch sent its signal.
    killed_before: bool,
    pub(super) spawn_failure: Option<SpawnFailure>,
}

impl Attempt {
    pub(super) fn new(number: u32, ranks: u32, processes: u32) -> Self {
        let mut attempt = Self { number, ..Self::default() };
        attempt.workers.resize_with(processes as usize, || None);
        attempt.ends.resize_with(ranks as usize, WorkerEnd::default);
        attempt
    }

    /// Returns the process that this rank is, or is a thread of.
    pub(super) fn process(&self, rank: u32) -> Option<&StartedWorker> {
        self.workers.get(rank as usize).or(self.workers.first())?.as_ref()
    }

    /// Sends a signal that ends the workers.
    pub(super) fn signal(&mut self, signal: Signal) {
        self.signalled = true;
        let (received, others) = self.received.drain(..).partition(|(_, other)| *other == signal);
        self.received = others;
        let received: Vec<u32> = Vec::into_iter(received).map(|(worker, _)| worker).collect();
        self.processes.iter().for_each(|processes| processes.signal(signal, &received));
    }

    /// Kills all processes. Returns those that were running.
    pub(super) fn kill(&mut self) -> Vec<Process> {
        self.signalled = true;
        self.overdue.get_or_insert(Instant::now() + KILL_DRAIN_TIMEOUT);
        self.processes.as_ref().map(ProcessTree::kill).unwrap_or_default()
    }

    /// Returns whether all workers have exited with 0, without a signal from xlaunch.
    pub(super) fn has_succeeded(&self) -> bool {
        !self.signalled && self.ends.iter().all(|end| end.exit == Some(Exit::Code(0)))
    }

    /// Makes the Python programs of these ranks print their stacks and exit. Returns whether there are any.
    pub(super) fn print_stacks(&self, ranks: &[u32]) -> bool {
        let started = ranks.iter().filter_map(|rank| self.process(*rank));
        faulthandler::print_stacks(&started.map(|started| started.worker.pid).collect::<Vec<_>>())
    }

    /// Passes on a signal that ends nothing.
    pub(super) fn notify(&self, signal: Signal) {
        self.processes.iter().for_each(|processes| processes.notify(signal));
    }

    /// Records that this worker's process group has received a signal, so that it is not sent again with the others.
    pub(super) fn has_received(&mut self, worker: u32, signal: Signal) {
        self.received.push((worker, signal));
    }

    /// Tells this rank's process group that its terminal is gone.
    pub(super) fn hang_up(&self, rank: u32) {
        if let Some(started) = self.process(rank) {
            started.worker.signal(Signal::HUP);
            started.worker.signal(Signal::CONT);
        }
    }

    pub(super) fn suspend(&self, signal: Signal) {
        self.processes.iter().for_each(|processes| processes.suspend(signal));
    }

    pub(super) fn resume(&self) {
        self.processes.iter().for_each(ProcessTree::resume);
    }

    /// Gives workers' terminals the size of xlaunch's own. The kernel sends SIGWINCH only to xlaunch's process group.
    pub(super) fn resize(&self) {
        for started in self.workers.iter().flatten().filter(|started| started.output.resize()) {
            started.worker.signal(Signal::WINCH);
        }
    }

    /// Returns whether the OOM killer has ended this rank, according to its own cgroup and that of the launch.
    pub(super) fn is_out_of_memory(&self, rank: u32, exit: Exit) -> bool {
        let kills = self.processes.as_ref().filter(|_| exit == Exit::Signal(Signal::KILL.as_raw()));
        kills.map(|processes| processes.oom_kills(rank)).is_some_and(|kills| kills.rank + kills.launch > 0)
    }

    /// Returns whether the process of this rank has this id.
    pub(super) fn has(&self, rank: u32, pid: u32) -> bool {
        self.process(rank).is_some_and(|started| started.worker.pid == pid)
    }

    /// Records that a worker is being killed that has not exited yet. A process with a GPU takes a while to exit.
    pub(super) fn dying(&mut self, rank: u32) {
        if let Some(end) = self.ends.get_mut(rank as usize) {
            end.killed_before = !self.signalled;
        }
    }

    pub(super) fn exited(&mut self, rank: u32, exit: Exit) {
        if let Some(end) = self.ends.get_mut(rank as usize) {
            (end.exit, end.signalled) = (Some(exit), self.signalled && !end.killed_before);
            (end.time, end.at) = (Some(SystemTime::now()), Some(Instant::now()));
        }
    }
}

impl Driver<'_> {
    /// Starts all workers of an attempt. Returns the actions for those that could not be started.
    pub(super) async fn start(&mut self, attempt: u32) -> Vec<Action> {
        if !self.attempt.workers.is_empty() {
            let pids: Vec<u32> = self.attempt.workers.iter().flatten().map(|it| it.worker.pid).collect();
            self.end_attempt().await;
            if self.attempt.keep_evidence {
                self.kept_evidence = self.all_evidence();
            }
            if !gpu_memory::released(&pids, GPU_MEMORY_RELEASE_TIMEOUT).await {
                self.notify("GPU memory of the last attempt is still held; starting anyway");
            }
        }
        self.attempt = Attempt::new(attempt, self.workers, self.workload.processes());
        let assignment = self.membership.assignment().clone();
        self.board.send_modify(|board| {
            board.reset(attempt, self.workers, &assignment);
            board.time.begin_attempt(Instant::now());
        });
        let faults = self.gpu_faults().await;
        if !faults.is_empty() {
            self.take_next(attempt, false).await;
            return self.refuse_gpus(&faults);
        }
        let restored = self.run.restore();
        let begun = restored.and_then(|()| self.workload.begin_attempt(attempt, &assignment));
        if let Some(waiting) = self.take_next(attempt, begun.is_ok()).await {
            self.attempt = waiting;
            self.publish_workers();
            return Vec::new();
        }
        let mut processes = ProcessTree::create(&self.run.id, attempt, self.workers);
        let mut actions = Vec::new();
        for process in 0..self.workload.processes() {
            let started = match &begun {
                Ok(()) => self.start_worker(&mut processes, attempt, process).await,
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            };
            match started {
                Ok(started) => self.attempt.workers[process as usize] = Some(started),
                Err(error) => actions.extend(self.not_started(process, &error)),
            }
        }
        self.attempt.processes = Some(processes);
        self.publish_workers();
        actions
    }

    /// Returns the ranks of a process: the one with its number, or all of them.
    fn ranks_of(&self, process: u32) -> Range<u32> {
        if self.workload.processes() == self.workers { process..process + 1 } else { 0..self.workers }
    }

    /// Returns the actions for a process that could not be started.
    fn not_started(&mut self, process: u32, error: &io::Error) -> Vec<Action> {
        let exit = match error.kind() {
            io::ErrorKind::InvalidData => ExitCode::Data,
            _ => ExitCode::WorkerFailed,
        };
        // Read at once: the limit leaves room as soon as other workers have ended.
        let limit = system_errors::reached_limit(error);
        let first_line = self.workload.program().and_then(|program| first_line(Path::new(program)));
        let failure = error.raw_os_error().map(|errno| SpawnFailure { errno, limit, first_line });
        let mut actions = Vec::new();
        for rank in self.ranks_of(process) {
            self.attempt.ends[rank as usize].spawn_failure.clone_from(&failure);
            actions.extend(self.decide(Event::SpawnFailed { rank, reason: error.to_string(), exit }));
        }
        actions
    }

    /// Returns the faults of the job's GPUs, with their ranks. A driver that does not answer is not a fault.
    async fn gpu_faults(&self) -> Vec<(u32, String)> {
        let Some(visible) = self.workload.gpus_to_check() else { return Vec::new() };
        let node = tokio::task::spawn_blocking(|| doctor::read(doctor::QUICK_TIMEOUT)).await;
        node.map_or_else(|_| Vec::new(), |node| doctor::faults(&node, visible.as_deref(), self.workers))
    }

    /// Starts no worker because of these faults. Returns the actions.
    fn refuse_gpus(&mut self, faults: &[(u32, String)]) -> Vec<Action> {
        let others = (0..self.workers).filter(|rank| !faults.iter().any(|(faulty, _)| faulty == rank));
        let reason = "another rank's GPU has a fault";
        // The first fault is the root cause. A GPU may have several.
        let mut reasons: Vec<(u32, &str)> =
            faults.iter().map(|(rank, fault)| (*rank, fault.as_str())).collect();
        reasons.dedup_by_key(|(rank, _)| *rank);
        reasons.extend(others.map(|rank| (rank, reason)));
        let failed = |(rank, reason): (u32, &str)| {
            let event = Event::SpawnFailed { rank, reason: reason.into(), exit: ExitCode::Gpu };
            self.decide(event)
        };
        reasons.into_iter().flat_map(failed).collect()
    }

    /// Records in status that the workers of the attempt have started.
    fn publish_workers(&self) {
        let is_command = self.workload.program().is_some();
        let mut restarted = None;
        self.board.send_modify(|board| {
            for rank in 0..self.workers {
                if let Some(started) = self.attempt.process(rank) {
                    board.spawned(rank, started.worker.pid, Instant::now());
                    board.set_logs(rank, started.output.records());
                    board.set_activity(rank, self.workload.activity(rank));
                }
            }
            board.time.spawned(is_command, Instant::now());
            restarted = board.time.take_restart_times();
        });
        if let Some(text) = restarted {
            self.notify(&text);
        }
    }

    /// Starts the process of this rank. Other ranks may be threads of it.
    pub(super) async fn start_worker(
        &mut self,
        processes: &mut ProcessTree,
        attempt: u32,
        rank: u32,
    ) -> io::Result<StartedWorker> {
        let dir: &Path = &rank_dir(&self.run.logs, attempt, rank);
        fs_err::create_dir_all(dir)?;
        let (mut command, options) = self.workload.command(attempt, rank, dir)?;
        processes.prepare(rank, &mut command);
        let forked = self.fork_worker(processes, rank, &command, &options).await;
        let Spawned { worker, stdout, stderr } = match forked {
            Some(spawned) => spawned,
            None => self.spawner.spawn(command, options).await?,
        };
        processes.add(worker.pid);
        self.reaper.watch(self.attempt.processes.iter().chain([&*processes]));
        // After an error from here on, the process tree still owns the process. No exit is reported, since the rank has
        // not started.
        let output = self.workload.output().start(rank, dir, stdout, stderr)?;
        let (exits, pid, pidfd) = (self.exits.clone(), worker.pid, worker.watch());
        let (ranks, written) = (self.ranks_of(rank), self.workload.program().map(|_| output.written()));
        tokio::spawn(async move {
            let exit = Worker::exit(pidfd).await;
            if let Some(written) = written.filter(|_| exit != Exit::Code(0)) {
                // Its output about the failure is needed to find the cause.
                written.wait(LAST_WORDS_TIMEOUT).await;
            }
            for rank in ranks {
                // The receiver is gone only if the whole process ends.
                let _ = exits.send(WorkerExit { pid, rank, exit });
            }
        });
        Ok(StartedWorker { worker, output })
    }

    /// Kills the rest of the attempt, then waits until all output of its workers is written.
    pub(super) async fn end_attempt(&mut self) {
        self.terminal.end_attempt();
        let mut attempt = std::mem::take(&mut self.attempt);
        self.end(&mut attempt).await;
        self.attempt = attempt;
    }

    /// Reports killed workers that do not exit. xlaunch waits for those that hang in the kernel, as they keep their GPU
    /// until they exit, but not for those that it may not signal.
    pub(super) fn report_survivors(&mut self, now: Instant) {
        let runs = |rank: u32| self.attempt.ends.get(rank as usize).is_some_and(|end| end.exit.is_none());
        if self.attempt.overdue.is_none_or(|due| now < due) || !(0..self.workers).any(runs) {
            return;
        }
        self.attempt.overdue = Some(now + SURVIVOR_REPORT_INTERVAL);
        let survivors = self.attempt.processes.as_ref().map(ProcessTree::survivors).unwrap_or_default();
        for process in &survivors {
            self.notify(&process.to_string());
        }
        for (process, started) in (0..).zip(&self.attempt.workers) {
            let Some(pid) = started.as_ref().map(|started| started.worker.pid) else { continue };
            if survivors.iter().any(|survivor| survivor.pid == pid && survivor.is_forbidden) {
                for rank in self.ranks_of(process).filter(|rank| runs(*rank)) {
                    // The receiver is this driver.
                    let _ = self.exits.send(WorkerExit { pid, rank, exit: Exit::Unknown });
                }
            }
        }
    }

    pub(super) async fn end(&self, attempt: &mut Attempt) {
        if let Some(processes) = &attempt.processes {
            for survivor in processes.kill_and_wait(KILL_DRAIN_TIMEOUT).await {
                self.notify(&survivor.to_string());
                attempt.left_running.retain(|process| process.pid != survivor.pid);
            }
        }
        for started in attempt.workers.iter_mut().flatten() {
            started.output.end(OUTPUT_DRAIN_TIMEOUT).await;
        }
    }
}

/// Returns the first line of a program; `None` if it cannot be read.
fn first_line(program: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    let file = fs_err::File::open(program).ok()?;
    file.take(MAX_FIRST_LINE_BYTES).read_to_end(&mut bytes).ok()?;
    let line = bytes.split(|byte| *byte == b'\n').next()?;
    Some(String::from_utf8_lossy(line).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_that_was_being_killed_before_the_others_were_ended_was_not_killed_by_xlaunch() {
        let mut attempt = Attempt::new(0, 3, 3);
        attempt.dying(1);
        attempt.kill();
        attempt.dying(2);
        for rank in 0..3 {
            attempt.exited(rank, Exit::Signal(Signal::KILL.as_raw()));
        }
        let signalled: Vec<bool> = attempt.ends.iter().map(|end| end.signalled).collect();
        assert_eq!(signalled, [true, false, true]);
    }
}
