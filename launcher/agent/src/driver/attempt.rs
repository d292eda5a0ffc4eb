//! The processes of one attempt: started together, signalled together, and all gone before the next attempt.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;
use xlaunch_proto::exit::ExitCode;

use super::Driver;
use crate::doctor;
use crate::logs::RankOutput;
use crate::run_dir::rank_dir;
use crate::spawn::process_tree::ProcessTree;
use crate::spawn::{Exit, Spawned, Worker, faulthandler, gpu_memory};
use crate::state::{Action, Event};

/// For the remaining output of a worker that has exited; a process that it started may hold the pipe open.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// For killed processes to disappear. Those that remain hang in the kernel.
const KILL_DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// For the GPU driver to release the memory of killed processes, before workers are started on the same GPUs.
const GPU_MEMORY_RELEASE_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, Default)]
pub(super) struct Attempt {
    /// Declared, and so dropped, before `workers`: it identifies workers by process ids, which cannot be reused while a
    /// [`Worker`] is kept.
    pub(super) processes: Option<ProcessTree>,
    /// By rank; `None` if the worker could not be started.
    pub(super) workers: Vec<Option<StartedWorker>>,
    /// By rank.
    pub(super) ends: Vec<WorkerEnd>,
    /// Workers of this attempt have been sent a signal that ends them.
    signalled: bool,
}

#[derive(Debug)]
pub(super) struct StartedWorker {
    pub(super) worker: Worker,
    pub(super) output: RankOutput,
}

/// How a worker ended, or why it did not start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WorkerEnd {
    pub(super) exit: Option<Exit>,
    pub(super) time: Option<SystemTime>,
    /// xlaunch had sent it a signal.
    pub(super) signalled: bool,
    /// The error number of a failed start.
    pub(super) spawn_error: Option<i32>,
}

impl Attempt {
    fn new(world: u32) -> Self {
        let mut attempt = Self::default();
        attempt.workers.resize_with(world as usize, || None);
        attempt.ends.resize_with(world as usize, WorkerEnd::default);
        attempt
    }

    /// Sends a signal that ends the workers.
    pub(super) fn signal(&mut self, signal: Signal) {
        self.signalled = true;
        self.forward(signal);
    }

    pub(super) fn kill(&mut self) {
        self.signalled = true;
        self.processes.iter().for_each(ProcessTree::kill);
    }

    /// Lets the Python programs of these ranks print their stacks and exit. Whether there are any.
    pub(super) fn print_stacks(&self, ranks: &[u32]) -> bool {
        let started = ranks.iter().filter_map(|rank| self.workers.get(*rank as usize)?.as_ref());
        faulthandler::print_stacks(&started.map(|started| started.worker.pid).collect::<Vec<_>>())
    }

    /// Passes on a signal that xlaunch received.
    pub(super) fn forward(&self, signal: Signal) {
        self.processes.iter().for_each(|processes| processes.signal(signal));
    }

    pub(super) fn suspend(&self) {
        self.processes.iter().for_each(ProcessTree::suspend);
    }

    pub(super) fn resume(&self) {
        self.processes.iter().for_each(ProcessTree::resume);
    }

    pub(super) fn exited(&mut self, rank: u32, exit: Exit) {
        if let Some(end) = self.ends.get_mut(rank as usize) {
            (end.exit, end.time, end.signalled) = (Some(exit), Some(SystemTime::now()), self.signalled);
        }
    }
}

impl Driver<'_> {
    /// Starts all workers of an attempt; returns the actions for those that could not be started.
    pub(super) async fn start(&mut self, attempt: u32) -> Vec<Action> {
        if attempt > 0 {
            let pids: Vec<u32> = self.attempt.workers.iter().flatten().map(|it| it.worker.pid).collect();
            self.end_attempt().await;
            if !gpu_memory::released(&pids, GPU_MEMORY_RELEASE_TIMEOUT).await {
                self.notify("GPU memory of the last attempt is still held; starting anyway");
            }
        }
        self.attempt = Attempt::new(self.world);
        self.board.send_modify(|board| board.reset(attempt, self.world));
        let faults = self.gpu_faults().await;
        if !faults.is_empty() {
            return self.refuse_gpus(&faults);
        }
        let begun = self.workload.begin_attempt(attempt);
        let mut processes = ProcessTree::create(&self.run.id, attempt, self.world);
        let mut actions = Vec::new();
        for rank in 0..self.world {
            let started = match &begun {
                Ok(()) => self.start_worker(&mut processes, attempt, rank).await,
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            };
            match started {
                Ok(started) => {
                    let pid = started.worker.pid;
                    self.board.send_modify(|board| board.spawned(rank, pid, Instant::now()));
                    self.attempt.workers[rank as usize] = Some(started);
                }
                Err(error) => {
                    self.attempt.ends[rank as usize].spawn_error = error.raw_os_error();
                    let exit = match error.kind() {
                        io::ErrorKind::InvalidData => ExitCode::Data,
                        _ => ExitCode::WorkerFailed,
                    };
                    let event = Event::SpawnFailed { rank, reason: error.to_string(), exit };
                    actions.extend(self.job.handle(event, Instant::now()));
                }
            }
        }
        self.attempt.processes = Some(processes);
        actions
    }

    /// The faults of the job's GPUs, with their ranks. A driver that does not answer is not a fault.
    async fn gpu_faults(&self) -> Vec<(u32, String)> {
        let Some(visible) = self.workload.gpus_to_check() else { return Vec::new() };
        let node = tokio::task::spawn_blocking(|| doctor::read(doctor::QUICK_TIMEOUT)).await;
        node.map_or_else(|_| Vec::new(), |node| doctor::faults(&node, visible.as_deref(), self.world))
    }

    /// Starts no worker, because of these faults.
    fn refuse_gpus(&mut self, faults: &[(u32, String)]) -> Vec<Action> {
        let others = (0..self.world).filter(|rank| !faults.iter().any(|(faulty, _)| faulty == rank));
        let reason = "another rank's GPU has a fault";
        // The first one is the root cause. A GPU may have several faults.
        let mut reasons: Vec<(u32, &str)> =
            faults.iter().map(|(rank, fault)| (*rank, fault.as_str())).collect();
        reasons.dedup_by_key(|(rank, _)| *rank);
        reasons.extend(others.map(|rank| (rank, reason)));
        let failed = |(rank, reason): (u32, &str)| {
            let event = Event::SpawnFailed { rank, reason: reason.into(), exit: ExitCode::Gpu };
            self.job.handle(event, Instant::now())
        };
        reasons.into_iter().flat_map(failed).collect()
    }

    async fn start_worker(
        &self,
        processes: &mut ProcessTree,
        attempt: u32,
        rank: u32,
    ) -> io::Result<StartedWorker> {
        let dir: &Path = &rank_dir(&self.run.logs, attempt, rank);
        fs_err::create_dir_all(dir)?;
        let (mut command, options) = self.workload.command(attempt, rank, dir)?;
        processes.prepare(rank, &mut command);
        let Spawned { worker, stdout, stderr } = self.spawner.spawn(command, options).await?;
        processes.add(worker.pid);
        self.reaper.watch(processes);
        // An error from here on leaves the process to the process tree. No exit is reported: the rank has not started.
        let output = self.workload.output().start(rank, dir, stdout, stderr)?;
        let (exits, pidfd) = (self.exits.clone(), worker.watch()?);
        tokio::spawn(async move {
            // The driver outlives the job; it is gone only if the whole process ends.
            let _ = exits.send((rank, Worker::exit(pidfd).await));
        });
        Ok(StartedWorker { worker, output })
    }

    /// Kills the rest of the attempt, then waits until all output of its workers is written.
    pub(super) async fn end_attempt(&mut self) {
        if let Some(processes) = &self.attempt.processes {
            for process in processes.kill_and_wait(KILL_DRAIN_TIMEOUT).await {
                let (pid, name, state) = (process.pid, process.name, process.state);
                self.notify(&format!("process {pid} ({name}, state {state}) was killed but does not exit"));
            }
        }
        for started in self.attempt.workers.iter_mut().flatten() {
            started.output.end(OUTPUT_DRAIN_TIMEOUT).await;
        }
    }
}
