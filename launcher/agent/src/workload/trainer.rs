//! Jobs of the built-in trainer: rendezvous, sessions, reports of workers, and the checkpoint to resume from.

mod hangs;
mod join;
mod leading;
mod nodes;
mod reports;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Status;
use xlaunch_proto::env;
use xlaunch_proto::v1::agent_command::Command as WorkerCommand;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{
    Bench, GetJobReply, GetJobRequest, JobKind, JobState, MemorySnapshot, NodeResume, RankReport, StopCommand,
};
use xlaunch_spec::job::{DoctorMode, JobSpec};
use xlaunch_spec::lineage::{DirectoryLock, Recovered};

use crate::activity::ActivityRecord;
use crate::base_environment::BaseEnvironment;
use crate::logs::Output;
use crate::rendezvous::barrier::JoinBarrier;
use crate::rendezvous::message::Message;
use crate::resolved_command::quote_line;
use crate::run_dir::RunDir;
use crate::sinks::progress::Progress;
use crate::sinks::summary::Summary;
use crate::sinks::{self, Sinks};
use crate::state::{Event, Job, Kind, Rules};
use crate::status::board::{self, Board};
use crate::waiting::Group;
use crate::worker_environment::{self, Shared, TrainerGroup};
use crate::workload::checkpoint_requests::{CheckpointRequests, Requester};
use crate::workload::hang::HangDetector;
use crate::workload::host_memory::SaveBuffers;
use crate::workload::save::SaveBarrier;
use crate::workload::sessions::Sessions;
use crate::workload::snapshots::{Snapshots, descriptor_list};
use crate::workload::stragglers::Stragglers;
use crate::workload::{Hang, Workload};
use leading::Lead;
use xlaunch_cluster::Assignment;
use xlaunch_cluster::shared;
use xlaunch_host::devices::Placement;
use xlaunch_host::libraries::Libraries;
use xlaunch_host::spawn::Options;
use xlaunch_host::spawn::port::MasterPort;

/// Time after which the status shows a hint about a rank that has no output and uses neither CPU nor GPU. The hang
/// detector is much faster.
const IDLE_STALL_TIMEOUT: Duration = Duration::from_secs(300);
/// Time for the sinks to write their queues at the end of the job.
const SINK_FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// `MASTER_PORT` if no port could be reserved: torchrun's default. The trainer itself does not use it.
const DEFAULT_MASTER_PORT: u16 = 29_500;
/// Name of the sink whose file the summary mentions.
const METRICS: &str = "metrics.jsonl";

/// A job of the built-in trainer, ready to start.
#[derive(Debug)]
pub struct TrainerPlan<'a> {
    /// The checked job description.
    pub spec: &'a JobSpec,
    /// The devices of the workers.
    pub placement: &'a Placement,
    /// Checkpoint that the first attempt resumes from.
    pub resume_from: Option<PathBuf>,
    /// Directory of the run that wrote that checkpoint. This run continues its curves.
    pub parent: Option<PathBuf>,
    /// Access to the checkpoints of this run.
    pub files: CheckpointFiles,
    /// Lock of `checkpoint.dir`, held by the node that has rank 0 in the first attempt.
    pub lock: Option<Box<dyn DirectoryLock>>,
    /// Place of the state while it is saved. Attempts on several nodes keep no snapshots.
    pub buffers: SaveBuffers,
    /// The benchmark that `xlaunch bench` runs; `None` to train.
    pub bench: Option<Bench>,
    /// Libraries of workers on GPUs.
    pub libraries: Option<&'a Libraries>,
    /// True if all ranks run as threads of one process, to compare that with a process per rank. Single node only.
    pub rank_threads: bool,
    /// The environment that the workers inherit.
    pub base: &'a BaseEnvironment,
}

/// The agent's access to the checkpoints of a run, which the worker crate implements.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointFiles {
    /// Finds the checkpoint that an attempt after the first resumes from.
    pub recover: Recover,
    /// Checks that a checkpoint has all of its files.
    pub verify: fn(&Path) -> Result<(), String>,
    /// Locks a directory of checkpoints for the job with this name.
    pub lock: AcquireLock,
}

/// Finds the newest complete checkpoint of a run, or else the checkpoint that the run began with. Arguments: directory,
/// run id, that first checkpoint, and the step of the newest memory snapshot. If that snapshot is at least as new, no
/// checkpoint is opened.
pub type Recover = fn(&Path, &str, Option<&Path>, Option<u64>) -> Result<Recovered, String>;

/// Locks a directory of checkpoints for the job with this name, or returns the reason why that is not possible.
pub type AcquireLock = fn(&Path, &str) -> Result<Box<dyn DirectoryLock>, String>;

/// The results that only training jobs have.
#[derive(Debug, Default)]
pub struct TrainingResults {
    /// The summary to print at the end.
    pub summary: Summary,
    /// Path of `metrics.jsonl`, if it is enabled and complete.
    pub metrics: Option<PathBuf>,
    /// All reports of a benchmark except heartbeats, in the order of arrival.
    pub reports: Vec<sinks::RankReport>,
}

pub(crate) struct TrainerWorkload<'a> {
    plan: TrainerPlan<'a>,
    run: &'a RunDir,
    attempt: Attempt,
    /// Workers that wait for their job description, because their attempt has not begun or the state to resume from is
    /// not known.
    waiting: Vec<(GetJobRequest, oneshot::Sender<Result<GetJobReply, Status>>)>,
    checkpoint_requests: CheckpointRequests,
    /// The highest step of all attempts.
    furthest_step: u64,
    /// True if a better interval between checkpoints was suggested to the user.
    interval_suggested: bool,
    hang_detector: HangDetector,
    /// Activity records, indexed by local rank; `None` if the memory could not be created.
    activities: Vec<Option<ActivityRecord>>,
    /// Memory snapshots; `None` if they are not used, or while the job has several nodes.
    snapshots: Option<Snapshots>,
    /// Messages to the coordinator.
    messages: mpsc::UnboundedSender<FromAgent>,
    /// Address at which other nodes reach this one.
    address: String,
    may_have_peers: bool,
    /// Set when this node gets rank 0, which it then keeps.
    lead: Option<Lead>,
    /// Notes about the group that the user has seen.
    told: BTreeSet<String>,
    /// `MASTER_PORT`, for frameworks that do their own rendezvous. The trainer does not use it.
    port: Option<MasterPort>,
    output: Output,
    sinks: Sinks,
    results: TrainingResults,
}

/// The state of one attempt.
struct Attempt {
    /// Counted from 0.
    number: u32,
    /// Place of this node.
    assignment: Assignment,
    /// True if the state that this attempt resumes from is known. On nodes without rank 0 it arrives later.
    resume_known: bool,
    /// The memory snapshot that this attempt resumes from, if any.
    resume_snapshot: Option<MemorySnapshot>,
    barrier: JoinBarrier,
    /// Device ids of the local ranks that have joined.
    devices: BTreeMap<u32, String>,
    sessions: Sessions,
    /// Progress counter of each local rank's last heartbeat.
    progress: Vec<u64>,
    /// Steps completed; `None` until this attempt trains.
    step: Option<u64>,
    saves: SaveBarrier,
    /// Hints of the hang detector that status shows.
    hang_hints: BTreeMap<u32, String>,
    stragglers: Stragglers,
    /// Reports for the agent of rank 0, sent once a second. A message per report would be too many with a thousand
    /// nodes.
    unsent_reports: Vec<RankReport>,
}

impl Attempt {
    fn new(plan: &TrainerPlan<'_>, number: u32, assignment: Assignment) -> Self {
        let workers = plan.placement.workers;
        Self {
            number,
            resume_known: assignment.node_rank == 0,
            resume_snapshot: None,
            barrier: join::barrier(plan, number, &assignment),
            devices: BTreeMap::new(),
            sessions: Sessions::new(workers),
            progress: vec![0; workers as usize],
            step: None,
            saves: SaveBarrier::new(assignment.writers),
            hang_hints: BTreeMap::new(),
            stragglers: Stragglers::new(assignment.world),
            unsent_reports: Vec::new(),
            assignment,
        }
    }
}

impl<'a> TrainerWorkload<'a> {
    pub(crate) fn new(plan: TrainerPlan<'a>, run: &'a RunDir, group: &Group) -> std::io::Result<Self> {
        let sinks = Sinks::new(Progress::default())?;
        let printer = sinks.printer().clone();
        Ok(Self {
            attempt: Attempt::new(&plan, 0, Assignment::default()),
            waiting: Vec::new(),
            checkpoint_requests: CheckpointRequests::default(),
            furthest_step: 0,
            interval_suggested: false,
            hang_detector: HangDetector::new(hangs::settings(&plan), Instant::now()),
            // Training works without the records: they only serve status displays and hang evidence.
            activities: (0..plan.placement.workers).map(|_| ActivityRecord::create().ok()).collect(),
            snapshots: None,
            messages: group.link.sender(),
            address: group.address.clone(),
            may_have_peers: group.may_have_peers(),
            lead: None,
            told: BTreeSet::new(),
            port: None,
            output: Output::for_trainer(move |line| printer.print(line)),
            sinks,
            results: TrainingResults::default(),
            plan,
            run,
        })
    }

    /// Flushes the sinks. Call it when the job is over.
    pub(crate) async fn finish(self) -> TrainingResults {
        let complete: BTreeSet<_> = self.sinks.finish(SINK_FLUSH_TIMEOUT).await;
        let metrics = self.results.metrics.filter(|_| complete.contains(METRICS));
        TrainingResults { metrics, ..self.results }
    }
}

/// The signals that stop the job when xlaunch receives them.
pub const STOP_SIGNALS: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

/// Describes a launch that has no run yet.
pub fn launch(spec: &JobSpec) -> board::Launch {
    let arguments: Vec<_> = std::env::args_os().collect();
    board::Launch {
        kind: JobKind::Trainer,
        id: String::new(),
        name: spec.job.name.clone(),
        command_line: quote_line(arguments.iter().map(|argument| argument.as_os_str())),
        max_restarts: spec.launch.max_restarts,
        // With epochs, the workers report it.
        total_steps: if spec.train.epochs.is_some() { 0 } else { spec.train.steps },
        log_dir: PathBuf::new(),
        stall_timeout: IDLE_STALL_TIMEOUT,
    }
}

impl Workload for TrainerWorkload<'_> {
    fn rules(&self) -> Rules {
        let launch = &self.plan.spec.launch;
        Rules {
            workers: self.plan.placement.workers,
            kind: Kind::Trainer,
            has_restarts: launch.max_restarts > 0,
            requeue_codes: BTreeSet::new(),
            shutdown_timeout: Duration::from_secs_f64(launch.shutdown_timeout),
            shutdown_timeout_max: Duration::from_secs_f64(launch.shutdown_timeout_max),
            propagate_exit_code: false,
        }
    }

    fn launch(&self) -> board::Launch {
        let (id, log_dir) = (self.run.id.clone(), self.run.logs.clone());
        board::Launch { id, log_dir, ..launch(self.plan.spec) }
    }

    /// Starts a new rendezvous; a restart resumes from the newest snapshot or checkpoint.
    fn begin_attempt(&mut self, attempt: u32, assignment: &Assignment) -> std::io::Result<()> {
        self.attempt.barrier.refuse("the attempt is over");
        self.attempt = Attempt::new(&self.plan, attempt, assignment.clone());
        self.hang_detector.begin_attempt(Instant::now());
        self.output.begin_attempt(assignment.first_rank);
        self.use_memory()?;
        if self.leads() {
            self.lead()?;
            if attempt > 0 {
                self.recover()?;
            }
            self.describe_group();
            if assignment.has_peers() {
                let path = self.plan.resume_from.as_deref().map(Path::to_string_lossy);
                let path = path.unwrap_or_default().into_owned();
                self.send(FromAgent::Resume(NodeResume { attempt, path }));
            }
            self.answer_waiting();
        }
        Ok(())
    }

    fn command(&self, attempt: u32, rank: u32, _dir: &Path) -> std::io::Result<(Command, Options)> {
        let (plan, assignment) = (&self.plan, &self.attempt.assignment);
        let shared = Shared {
            base: plan.base,
            run_id: &self.run.id,
            socket: &self.run.socket,
            attempt,
            max_restarts: plan.spec.launch.max_restarts,
            workers: plan.placement.workers,
            role: "default",
            master_address: &assignment.master_address,
            assignment,
        };
        let group = TrainerGroup {
            shared,
            placement: plan.placement,
            address: &self.address,
            rank_threads: plan.rank_threads,
            libraries: plan.libraries,
        };
        let mut command = worker_environment::trainer_command(&group, rank)?;
        let mut inherited =
            self.snapshots.as_ref().map_or(&[][..], |snapshots| snapshots.of_rank(rank)).to_vec();
        if !inherited.is_empty() {
            command.env(env::SNAPSHOT_FDS, descriptor_list(&inherited));
        }
        if let Some(activity) = self.activity(rank) {
            command.env(env::ACTIVITY_FD, activity.number().to_string());
            inherited.push(activity.file());
        }
        Ok((command, Options { leave_signals_to_agent: true, inherited, ..Options::default() }))
    }

    fn processes(&self) -> u32 {
        if self.plan.rank_threads { 1 } else { self.plan.placement.workers }
    }

    fn group_message(&mut self, message: ToAgent, _job: &Job, board: &watch::Sender<Board>) -> Option<Event> {
        self.hear(message, board)
    }

    fn is_shared(&self, instance: &[u8]) -> bool {
        !self.may_have_peers || shared::is_visible(&shared::directory(self.plan.spec), instance)
    }

    fn reserve_port(&mut self) -> io::Result<u16> {
        if self.port.is_none() {
            self.port = MasterPort::reserve().ok();
        }
        Ok(self.port.as_ref().map_or(DEFAULT_MASTER_PORT, MasterPort::number))
    }

    fn gpus_to_check(&self) -> Option<Option<String>> {
        let placement = self.plan.placement;
        let is_wanted = placement.cuda && self.plan.bench.is_none();
        let inherited = || self.plan.base.get("CUDA_VISIBLE_DEVICES")?.into_string().ok();
        (is_wanted && self.plan.spec.launch.doctor == DoctorMode::Quick)
            .then(|| placement.visible.clone().or_else(inherited))
    }

    fn base_environment(&self) -> &BaseEnvironment {
        self.plan.base
    }

    fn output(&self) -> &Output {
        &self.output
    }

    /// Returns the time at which the rendezvous, or the opening of the communicator after it, times out.
    fn deadline(&self, job: &Job) -> Option<Instant> {
        match job.state() {
            JobState::Rendezvous => self.attempt.barrier.deadline(),
            JobState::Running => self.attempt.sessions.deadline(),
            _ => None,
        }
    }

    fn timer(&self, job: &Job, now: Instant) -> Option<Event> {
        let reason = match job.state() {
            JobState::Rendezvous => self.attempt.barrier.expired(now),
            JobState::Running => self.attempt.sessions.expired(now),
            _ => None,
        };
        reason.map(Event::RendezvousFailed)
    }

    fn request_stop(&self) {
        self.attempt.sessions.send_to_all(&WorkerCommand::Stop(StopCommand {}));
    }

    /// Takes SIGUSR1 as a request for a checkpoint: some schedulers announce the end of an allocation with it.
    fn takes_signal(&mut self, signal: Signal, job: &Job) -> bool {
        if signal == Signal::USR1 {
            self.request_checkpoint(Requester::Signal, job);
        }
        signal == Signal::USR1
    }

    fn worker_exited(&mut self, rank: u32) {
        self.attempt.sessions.closed(rank);
        self.hang_detector.session_closed(rank);
        // Rank 0 reports checkpoints, and its last report is processed before its exit.
        if rank == 0 {
            let line = self.checkpoint_requests.fail("rank 0 exited before a checkpoint was complete");
            self.notify_if(line);
        }
    }

    fn message(&mut self, message: Message, job: &Job, board: &watch::Sender<Board>) -> Option<Event> {
        match message {
            Message::GetJob(request, reply) => {
                if request.attempt > self.attempt.number || !self.attempt.resume_known {
                    self.waiting.push((request, reply))
                } else {
                    // The caller may be gone.
                    drop(reply.send(self.get_job(&request)))
                }
            }
            Message::Join(join, reply) => return self.join(join, reply, board),
            Message::SessionOpened { rank, attempt, commands } => {
                if attempt == job.attempt() && self.attempt.sessions.opened(rank, commands) {
                    if job.state() == JobState::Stopping {
                        self.attempt.sessions.send(rank, WorkerCommand::Stop(StopCommand {}));
                    }
                    if self.leads() {
                        self.hang_detector.session_opened(rank, Instant::now());
                    }
                    return Some(Event::SessionOpened { rank });
                }
            }
            Message::SessionClosed { rank, attempt } => {
                if attempt == job.attempt() {
                    self.attempt.sessions.closed(rank);
                    self.hang_detector.session_closed(rank);
                    return Some(Event::SessionClosed { rank });
                }
            }
            Message::Report { rank, attempt, report } => {
                if attempt == job.attempt() {
                    return self.report(rank, report, board);
                }
            }
            Message::Checkpoint(reply) => self.request_checkpoint(Requester::Call(reply), job),
            Message::Stop(_) | Message::Signal(_) => {}
        }
        None
    }

    fn activity(&self, rank: u32) -> Option<ActivityRecord> {
        self.activities.get(rank as usize).cloned().flatten()
    }

    fn report_stalls(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Hang> {
        self.keep_lock();
        self.find_hang(board, now)
    }

    fn hang_lasts(&self, hang: &Hang) -> bool {
        // The findings of the agent of rank 0 are final on the other nodes.
        !self.leads() || self.hang_detector.lasts(hang)
    }
}
