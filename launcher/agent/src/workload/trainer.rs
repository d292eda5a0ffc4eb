//! What is particular to a job of the built-in trainer: its meeting, its sessions, what workers report, and where it
//! resumes. The driver owns it and gives it what concerns it.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tonic::Status;
use xlaunch_proto::convert::Join;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::agent_command::Command as Order;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{AgentCommand, Bench, GetJobReply, GetJobRequest, JobKind, StopCommand};

use crate::command::{Restarts, quote_line};
use crate::devices::Placement;
use crate::logs::Output;
use crate::rendezvous::Rendezvous;
use crate::rendezvous::meeting::{Meeting, Outcome, Reply};
use crate::rendezvous::service::Message;
use crate::run_dir::RunDir;
use crate::sinks::metrics::Metrics;
use crate::sinks::progress::Progress;
use crate::sinks::summary::Summary;
use crate::sinks::tensorboard::TensorBoard;
use crate::spawn::environment::{self, Group};
use crate::spawn::port::MasterPort;
use crate::state::{Event, Job, Kind, Phase, Rules};
use crate::status::board::{self, Board};
use crate::workload::hang::Watch;

/// Silence of a rank that does nothing either, in status.
const IDLE_SILENCE: Duration = Duration::from_secs(300);

/// A job of the built-in trainer.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct TrainerPlan<'a> {
    pub spec: &'a JobSpec,
    pub placement: &'a Placement,
    pub resume_from: Option<PathBuf>,
    pub newest_checkpoint: fn(&Path) -> Option<PathBuf>,
    /// What `xlaunch bench` measures; `None` trains.
    pub bench: Option<Bench>,
}

/// What is left of it when it is over.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct Trained {
    pub summary: Summary,
    pub metrics: Option<PathBuf>,
    /// What the ranks of a bench said, in the order in which it came.
    pub heard: Vec<Heard>,
}

/// A report of a bench.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "named after what they hold")]
pub struct Heard {
    pub rank: u32,
    pub at: Instant,
    pub report: Report,
}

/// What connects one worker.
#[derive(Debug, Default)]
struct Session {
    commands: Option<mpsc::Sender<Result<AgentCommand, Status>>>,
}

/// The trainer's side of a job that runs.
pub(crate) struct Trainer<'a> {
    plan: TrainerPlan<'a>,
    run: &'a RunDir,
    meeting: Meeting,
    sessions: Vec<Session>,
    watch: Watch,
    /// For frameworks that rendezvous by themselves. The trainer does without.
    port: Option<MasterPort>,
    output: Output,
    progress: Progress,
    metrics: Option<Metrics>,
    tensorboard: Option<TensorBoard>,
    summary: Summary,
    heard: Vec<Heard>,
}

impl<'a> Trainer<'a> {
    pub(crate) fn new(
        plan: TrainerPlan<'a>,
        run: &'a RunDir,
        console: mpsc::Sender<String>,
    ) -> std::io::Result<Self> {
        let observe = &plan.spec.observe;
        let metrics = observe.metrics.then(|| Metrics::create(&run.path)).transpose()?;
        let tensorboard = observe.tensorboard.then(|| TensorBoard::create(&run.path)).transpose()?;
        Ok(Self {
            meeting: meeting(&plan, 0),
            sessions: Vec::new(),
            watch: Watch::new(Duration::from_secs_f64(plan.spec.launch.stall_timeout), Instant::now()),
            port: None,
            output: Output::for_trainer(console),
            progress: Progress::default(),
            metrics,
            tensorboard,
            summary: Summary::default(),
            heard: Vec::new(),
            plan,
            run,
        })
    }

    pub(crate) fn rules(&self) -> Rules {
        let launch = &self.plan.spec.launch;
        let final_codes = [ExitCode::Usage, ExitCode::Data].map(|exit| i32::from(exit.code()));
        Rules {
            world: self.plan.placement.workers,
            kind: Kind::Trainer,
            restarts: Restarts { most: launch.max_restarts, not_after: final_codes.into() },
            shutdown_timeout: Duration::from_secs_f64(launch.shutdown_timeout),
            propagate_exit_code: false,
            seed: RandomState::new().hash_one(&self.run.id),
        }
    }

    pub(crate) fn launch(&self) -> board::Launch {
        let arguments: Vec<_> = std::env::args_os().collect();
        board::Launch {
            kind: JobKind::Trainer,
            id: self.run.id.clone(),
            name: self.plan.spec.job.name.clone(),
            command_line: quote_line(arguments.iter().map(|argument| argument.as_os_str())),
            max_restarts: self.plan.spec.launch.max_restarts,
            log_dir: self.run.logs.clone(),
            stall_timeout: IDLE_SILENCE,
        }
    }

    pub(crate) fn output(&self) -> &Output {
        &self.output
    }

    /// A new meeting, from the newest checkpoint.
    pub(crate) fn begin(&mut self, attempt: u32) {
        if attempt > 0 {
            let saved = (self.plan.newest_checkpoint)(&self.checkpoint_dir());
            self.plan.resume_from = saved.or_else(|| self.plan.resume_from.take());
        }
        self.meeting.refuse("the attempt is over");
        self.meeting = meeting(&self.plan, attempt);
        self.port = MasterPort::reserve().ok();
        self.sessions = (0..self.plan.placement.workers).map(|_| Session::default()).collect();
        self.watch.begin(Instant::now());
    }

    fn checkpoint_dir(&self) -> PathBuf {
        let own = self.plan.spec.checkpoint.dir.as_ref().map(PathBuf::from);
        own.unwrap_or_else(|| self.run.path.join("checkpoints"))
    }

    /// What starts one worker.
    pub(crate) fn command(&self, attempt: u32, rank: u32) -> std::io::Result<Command> {
        let group = Group {
            run_id: &self.run.id,
            socket: &self.run.socket,
            placement: self.plan.placement,
            attempt,
            max_restarts: self.plan.spec.launch.max_restarts,
            master_port: self.port.as_ref().map_or(29_500, MasterPort::number),
        };
        environment::command(&group, rank)
    }

    /// When the meeting fails.
    pub(crate) fn deadline(&self, job: &Job) -> Option<Instant> {
        (job.phase() == Phase::Meeting).then(|| self.meeting.deadline()).flatten()
    }

    /// The news that it has failed, if it has.
    pub(crate) fn timer(&self, job: &Job, now: Instant) -> Option<Event> {
        let reason = self.meeting.expired(now).filter(|_| job.phase() == Phase::Meeting)?;
        Some(Event::MeetingFailed(reason))
    }

    pub(crate) fn ask_to_stop(&self) {
        for commands in self.sessions.iter().filter_map(|session| session.commands.as_ref()) {
            // A worker whose queue is full hangs: the deadline deals with it.
            let _ = commands.try_send(Ok(stop_order()));
        }
    }

    /// A worker is gone.
    pub(crate) fn ended(&mut self, rank: u32) {
        if let Some(session) = self.sessions.get_mut(rank as usize) {
            *session = Session::default();
        }
        self.watch.closed(rank);
    }

    pub(crate) fn say(&mut self, text: &str) {
        self.progress.say(text);
    }

    /// What a worker wants or reports.
    pub(crate) fn message(
        &mut self,
        message: Message,
        job: &Job,
        board: &watch::Sender<Board>,
    ) -> Option<Event> {
        match message {
            Message::GetJob(request, reply) => {
                // A caller that is gone needs no answer; here and below.
                let _ = reply.send(self.get_job(&request));
                None
            }
            Message::Join(join, reply) => self.join(join, reply, board),
            Message::SessionOpened { rank, attempt, commands } => {
                if let Some(session) = self.session(rank, attempt, job) {
                    if job.phase() == Phase::Stopping {
                        let _ = commands.try_send(Ok(stop_order()));
                    }
                    session.commands = Some(commands);
                    self.watch.opened(rank, Instant::now());
                }
                None
            }
            Message::SessionClosed { rank, attempt } => {
                if let Some(session) = self.session(rank, attempt, job) {
                    // The last sender: without it the stream of commands ends, and the worker knows it was heard.
                    session.commands = None;
                    self.watch.closed(rank);
                }
                None
            }
            Message::Report { rank, attempt, report } => {
                if attempt == job.attempt() {
                    self.report(rank, report, board);
                }
                None
            }
            Message::Stop => None,
        }
    }

    fn session(&mut self, rank: u32, attempt: u32, job: &Job) -> Option<&mut Session> {
        self.sessions.get_mut(rank as usize).filter(|_| attempt == job.attempt())
    }

    fn get_job(&self, request: &GetJobRequest) -> Result<GetJobReply, Status> {
        if request.version != xlaunch_proto::VERSION {
            let message = format!(
                "rank {} is xlaunch {}, the agent is {}",
                request.rank,
                request.version,
                xlaunch_proto::VERSION
            );
            return Err(Status::failed_precondition(message));
        }
        let path = |path: &Path| path.to_string_lossy().into_owned();
        Ok(GetJobReply {
            spec_json: self.plan.spec.to_json(),
            run_dir: path(&self.run.path),
            resume_from: self.plan.resume_from.as_deref().map(path).unwrap_or_default(),
            bench: self.plan.bench.clone(),
        })
    }

    fn join(&mut self, join: Join, reply: Reply, board: &watch::Sender<Board>) -> Option<Event> {
        let (rank, device) = (join.rank.0, join.device_uuid.clone());
        let outcome = self.meeting.join(join, reply);
        if matches!(outcome, Outcome::Waiting | Outcome::Met) {
            board.send_modify(|board| board.joined(rank, &device));
        }
        match outcome {
            Outcome::Waiting | Outcome::Ignored => None,
            Outcome::Met => Some(Event::Met),
            Outcome::Failed(problem) => Some(Event::MeetingFailed(problem)),
        }
    }

    fn report(&mut self, rank: u32, report: Report, board: &watch::Sender<Board>) {
        let now = Instant::now();
        board.send_modify(|board| board.reported(rank, &report, now));
        self.watch.heard(rank, &report, now);
        if let Report::Finished(finished) = &report
            && let Some(difference) = finished.max_parameter_difference
        {
            let largest = self.summary.replica_difference.get_or_insert(0.0);
            *largest = largest.max(difference);
        }
        if self.plan.bench.is_some() && !matches!(report, Report::Heartbeat(_)) {
            self.heard.push(Heard { rank, at: now, report: report.clone() });
        }
        if rank != 0 {
            return;
        }
        match report {
            Report::TrainStarted(started) => {
                self.progress.started(&started);
                if started.first_step > 0 {
                    self.progress.say(&format!("resuming at step {}", started.first_step));
                }
                self.summary.started = Some(started);
            }
            Report::Step(step) => {
                self.progress.step(&step, now);
                self.summary.step(&step);
                self.write(|metrics| metrics.step(&step), |board| board.step(&step));
            }
            Report::Eval(eval) => {
                self.progress.eval(&eval);
                self.write(|metrics| metrics.eval(&eval), |board| board.eval(&eval));
                self.summary.eval = Some(eval);
            }
            Report::Checkpoint(checkpoint) => self.summary.checkpoint = Some(checkpoint.path),
            Report::Finished(finished) => self.summary.sample = finished.sample,
            Report::Hello(_)
            | Report::Heartbeat(_)
            | Report::Profile(_)
            | Report::AllReduce(_)
            | Report::Calibration(_) => {}
        }
    }

    /// Adds to both files, to each as long as it can be written.
    fn write(
        &mut self,
        metrics: impl FnOnce(&mut Metrics) -> std::io::Result<()>,
        tensorboard: impl FnOnce(&mut TensorBoard) -> std::io::Result<()>,
    ) {
        if let Some(Err(error)) = self.metrics.as_mut().map(metrics) {
            self.progress.say(&format!("xlaunch: metrics are no longer written: {error}"));
            self.metrics = None;
        }
        if let Some(Err(error)) = self.tensorboard.as_mut().map(tensorboard) {
            self.progress.say(&format!("xlaunch: events for TensorBoard are no longer written: {error}"));
            self.tensorboard = None;
        }
    }

    /// Says which ranks hold up the others, if any do, and when that is over.
    pub(crate) fn report_stalls(&mut self, board: &watch::Sender<Board>, now: Instant) {
        if let Some(change) = self.watch.look(now) {
            self.progress.say(&format!("xlaunch: {}", change.line));
            board.send_modify(|board| board.point_out(change.hints));
        }
    }

    pub(crate) fn finish(self) -> Trained {
        self.progress.finish();
        let metrics = self.metrics.as_ref().map(|metrics| metrics.path().to_path_buf());
        Trained { summary: self.summary, metrics, heard: self.heard }
    }
}

/// The meeting of an attempt that begins now.
fn meeting(plan: &TrainerPlan<'_>, attempt: u32) -> Meeting {
    let deadline = Instant::now() + Duration::from_secs_f64(plan.spec.launch.join_timeout);
    Meeting::new(Rendezvous::new(plan.placement.workers, attempt, plan.spec.digest(), deadline))
}

fn stop_order() -> AgentCommand {
    AgentCommand { command: Some(Order::Stop(StopCommand {})) }
}
