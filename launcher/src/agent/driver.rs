//! The task that owns a job: turns what happens into events for [`Job`], and its actions into deeds.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::sleep_until;
use tonic::Status;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::agent_command::Command;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    AgentCommand, Bench, GetJobReply, GetJobRequest, JobKind, JobState, JoinReply, StopCommand,
};

use super::state::{Action, Event, Job, Outcome, Phase, StopCause};
use crate::devices::Placement;
use crate::logs::{self, Tail};
use crate::metrics::Metrics;
use crate::progress::Progress;
use crate::rendezvous::service::{self, Message};
use crate::rendezvous::{self, Rendezvous};
use crate::report::Evidence;
use crate::run_dir::RunDir;
use crate::spawn::environment::{self, Group};
use crate::spawn::{Exit, Spawned, Spawner, Worker};
use crate::status::board::{self, Board};
use crate::summary::Summary;

/// Messages that may wait for this task.
const QUEUE: usize = 1024;
/// Silence of a running worker that is pointed out.
const SILENCE: Duration = Duration::from_secs(15);
/// Time for the last output of a worker that has ended.
const LAST_OUTPUT: Duration = Duration::from_millis(500);
/// Pause between looks at silent workers.
const LOOK: Duration = Duration::from_secs(5);
/// Silence of a rank that does nothing either, in status.
const IDLE_SILENCE: Duration = Duration::from_secs(300);

/// What an agent needs to run a job.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct Plan<'a> {
    pub spec: &'a JobSpec,
    pub placement: &'a Placement,
    pub run: &'a RunDir,
    pub resume_from: Option<PathBuf>,
    pub newest_checkpoint: fn(&Path) -> Option<PathBuf>,
    /// What `xlaunch bench` measures; `None` trains.
    pub bench: Option<Bench>,
}

/// What is left when a job is over.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct Finished {
    pub outcome: Outcome,
    pub evidence: Vec<Evidence>,
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

/// Runs a job to its end.
pub async fn run(plan: Plan<'_>) -> std::io::Result<Finished> {
    let (messages, mut inbox) = mpsc::channel(QUEUE);
    let arguments: Vec<_> = std::env::args_os().collect();
    let board = watch::Sender::new(Board::new(board::Launch {
        kind: JobKind::Trainer,
        id: plan.run.id.clone(),
        name: plan.spec.job.name.clone(),
        command_line: board::command_line(arguments.iter().map(|argument| argument.as_os_str())),
        max_restarts: plan.spec.launch.max_restarts,
        log_dir: plan.run.logs.clone(),
        silence: IDLE_SILENCE,
    }));
    let serving = service::serve(&plan.run.socket, messages, board.clone()).await?;
    let (exits, mut exited) = mpsc::unbounded_channel();
    let (console, mut lines) = mpsc::channel(QUEUE);
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminates = signal(SignalKind::terminate())?;
    let mut hangups = signal(SignalKind::hangup())?;
    let mut look = tokio::time::interval(LOOK);
    let mut driver = Driver::new(plan, board, exits, console)?;

    let mut outcome = driver.act(vec![Action::Start { attempt: 0 }]).await;
    driver.show_state();
    while outcome.is_none() {
        let deadline = driver.deadline();
        let event = tokio::select! {
            Some((rank, exit)) = exited.recv() => Some(driver.exited(rank, exit).await),
            Some(message) = inbox.recv() => driver.message(message),
            Some(line) = lines.recv() => {
                driver.progress.say(&line);
                None
            }
            _ = interrupts.recv() => Some(Event::Stop(StopCause::Interrupt)),
            _ = terminates.recv() => Some(Event::Stop(StopCause::Terminate)),
            _ = hangups.recv() => Some(Event::Stop(StopCause::Terminate)),
            () = sleep_until(deadline.into()) => Some(driver.timer(Instant::now())),
            _ = look.tick() => {
                driver.point_out_silence(Instant::now());
                None
            }
        };
        if let Some(event) = event {
            let actions = driver.job.handle(event, Instant::now());
            driver.show_state();
            outcome = driver.act(actions).await;
        }
    }
    while let Ok(line) = lines.try_recv() {
        driver.progress.say(&line);
    }
    driver.progress.finish();
    serving.finish().await;
    Ok(driver.finish(outcome))
}

/// A started worker.
#[derive(Debug)]
struct Member {
    worker: Worker,
    tail: Tail,
    /// The ends of its output.
    output: Vec<oneshot::Receiver<()>>,
    commands: Option<mpsc::Sender<Result<AgentCommand, Status>>>,
    heard: Option<Instant>,
    silent: bool,
    alive: bool,
}

struct Driver<'a> {
    plan: Plan<'a>,
    job: Job,
    spawner: Spawner,
    members: Vec<Option<Member>>,
    rendezvous: Rendezvous,
    waiting: Vec<oneshot::Sender<Result<JoinReply, Status>>>,
    board: watch::Sender<Board>,
    progress: Progress,
    metrics: Option<Metrics>,
    summary: Summary,
    heard: Vec<Heard>,
    exits: mpsc::UnboundedSender<(u32, Exit)>,
    console: mpsc::Sender<String>,
}

impl<'a> Driver<'a> {
    fn new(
        plan: Plan<'a>,
        board: watch::Sender<Board>,
        exits: mpsc::UnboundedSender<(u32, Exit)>,
        console: mpsc::Sender<String>,
    ) -> std::io::Result<Self> {
        let launch = &plan.spec.launch;
        let world = plan.placement.workers;
        let grace = Duration::from_secs_f64(launch.shutdown_timeout);
        let metrics = match plan.spec.observe.metrics {
            true => Some(Metrics::create(&plan.run.path)?),
            false => None,
        };
        Ok(Self {
            job: Job::new(world, launch.max_restarts, grace),
            spawner: Spawner::start()?,
            members: Vec::new(),
            rendezvous: Rendezvous::new(world, 0, plan.spec.digest(), Instant::now()),
            waiting: Vec::new(),
            board,
            progress: Progress::default(),
            metrics,
            summary: Summary::default(),
            heard: Vec::new(),
            exits,
            console,
            plan,
        })
    }

    /// When the next timer is due.
    fn deadline(&self) -> Instant {
        let meeting = (self.job.phase() == Phase::Meeting).then(|| self.rendezvous.deadline()).flatten();
        let far = Instant::now() + Duration::from_secs(3600);
        [self.job.deadline(), meeting].into_iter().flatten().min().unwrap_or(far)
    }

    fn timer(&self, now: Instant) -> Event {
        match self.rendezvous.expired(now) {
            Some(reason) if self.job.phase() == Phase::Meeting => Event::MeetingFailed(reason),
            _ => Event::Tick,
        }
    }

    /// Does what the state machine asks for; the outcome if the job is over.
    async fn act(&mut self, actions: Vec<Action>) -> Option<Outcome> {
        let mut queue = std::collections::VecDeque::from(actions);
        while let Some(action) = queue.pop_front() {
            match action {
                Action::Start { attempt } => queue.extend(self.start(attempt).await),
                Action::AskToStop => {
                    for member in self.members.iter().flatten() {
                        let command = AgentCommand { command: Some(Command::Stop(StopCommand {})) };
                        if let Some(commands) = &member.commands {
                            // A worker whose queue is full hangs: the deadline deals with it.
                            let _ = commands.try_send(Ok(command));
                        }
                    }
                }
                Action::Terminate => self.signal(Signal::TERM),
                Action::Kill => self.signal(Signal::KILL),
                Action::Say(text) => {
                    self.progress.say(&format!("xlaunch: {text}"));
                    self.board.send_modify(|board| board.because(&text));
                }
                Action::End(outcome) => return Some(outcome),
            }
        }
        None
    }

    /// Lets callers see where the job is.
    fn show_state(&self) {
        let state = match self.job.phase() {
            Phase::Meeting => JobState::Rendezvous,
            Phase::Running => JobState::Running,
            Phase::Stopping => JobState::Stopping,
            Phase::Ended => JobState::Done,
        };
        self.board.send_modify(|board| board.now_in(state));
    }

    fn signal(&self, signal: Signal) {
        // Groups, also of workers that are gone: what they started may not be.
        self.members.iter().flatten().for_each(|member| member.worker.signal(signal));
    }

    /// Starts all workers of an attempt.
    async fn start(&mut self, attempt: u32) -> Vec<Action> {
        let world = self.plan.placement.workers;
        if attempt > 0 {
            let saved = (self.plan.newest_checkpoint)(&self.checkpoint_dir());
            self.plan.resume_from = saved.or_else(|| self.plan.resume_from.take());
        }
        let timeout = Duration::from_secs_f64(self.plan.spec.launch.join_timeout);
        self.rendezvous = Rendezvous::new(world, attempt, self.plan.spec.digest(), Instant::now() + timeout);
        self.refuse_waiting("the attempt is over");
        self.board.send_modify(|board| board.reset(attempt, world));
        self.members = (0..world).map(|_| None).collect();
        let port = environment::free_port().unwrap_or(29_500);
        let mut actions = Vec::new();
        for rank in 0..world {
            match self.start_one(attempt, rank, port).await {
                Ok(member) => {
                    let pid = member.worker.pid;
                    self.board.send_modify(|board| board.spawned(rank, pid, Instant::now()));
                    self.members[rank as usize] = Some(member);
                }
                Err(error) => {
                    let event = Event::SpawnFailed { rank, reason: error.to_string() };
                    actions.extend(self.job.handle(event, Instant::now()));
                }
            }
        }
        actions
    }

    async fn start_one(&self, attempt: u32, rank: u32, master_port: u16) -> std::io::Result<Member> {
        let logs = self.plan.run.logs.join(format!("attempt_{attempt}")).join(rank.to_string());
        fs_err::create_dir_all(&logs)?;
        let group = Group {
            run_id: &self.plan.run.id,
            socket: &self.plan.run.socket,
            placement: self.plan.placement,
            attempt,
            max_restarts: self.plan.spec.launch.max_restarts,
            master_port,
        };
        let Spawned { worker, stdout, stderr } =
            self.spawner.spawn(environment::command(&group, rank)?).await?;
        let tail = Tail::default();
        let (exits, pidfd) = (self.exits.clone(), worker.watch()?);
        tokio::spawn(async move {
            // The driver is gone only when the whole process ends.
            let _ = exits.send((rank, Worker::exit(pidfd).await));
        });
        let (prefixed, console) = (mpsc::channel(QUEUE), self.console.clone());
        let (lines, mut prefix) = prefixed;
        tokio::spawn(async move {
            while let Some(line) = prefix.recv().await {
                // As above.
                let _ = console.send(format!("[rank {rank}] {line}")).await;
            }
        });
        let output = vec![
            logs::to_file(stdout, &logs.join("stdout.log"))?,
            logs::to_file_and_console(stderr, &logs.join("stderr.log"), tail.clone(), lines)?,
        ];
        Ok(Member { worker, tail, output, commands: None, heard: None, silent: false, alive: true })
    }

    fn checkpoint_dir(&self) -> PathBuf {
        let own = self.plan.spec.checkpoint.dir.as_ref().map(PathBuf::from);
        own.unwrap_or_else(|| self.plan.run.path.join("checkpoints"))
    }

    /// A worker is gone: its last lines first, then the news.
    async fn exited(&mut self, rank: u32, exit: Exit) -> Event {
        if let Some(member) = self.members.get_mut(rank as usize).and_then(Option::as_mut) {
            member.alive = false;
            member.commands = None;
            for end in member.output.drain(..) {
                // Something the worker started may hold its output open.
                let _ = tokio::time::timeout(LAST_OUTPUT, end).await;
            }
        }
        self.board.send_modify(|board| board.exited(rank, exit.to_string()));
        Event::Exited { rank, exit }
    }

    fn message(&mut self, message: Message) -> Option<Event> {
        match message {
            Message::GetJob(request, reply) => {
                // A caller that is gone needs no answer; here and below.
                let _ = reply.send(self.get_job(&request));
                None
            }
            Message::Join(join, reply) => self.join(join, reply),
            Message::SessionOpened { rank, attempt, commands } => {
                if attempt == self.job.attempt()
                    && let Some(member) = self.members.get_mut(rank as usize).and_then(Option::as_mut)
                {
                    if self.job.phase() == Phase::Stopping {
                        let command = AgentCommand { command: Some(Command::Stop(StopCommand {})) };
                        let _ = commands.try_send(Ok(command));
                    }
                    member.heard = Some(Instant::now());
                    member.commands = Some(commands);
                }
                None
            }
            Message::SessionClosed { rank, attempt } => {
                if attempt == self.job.attempt()
                    && let Some(member) = self.members.get_mut(rank as usize).and_then(Option::as_mut)
                {
                    // The last sender: without it the stream of commands ends, and the worker knows it was heard.
                    member.commands = None;
                }
                None
            }
            Message::Report { rank, attempt, report } => {
                if attempt == self.job.attempt() {
                    self.report(rank, report);
                }
                None
            }
            Message::Stop => Some(Event::Stop(StopCause::Call)),
        }
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
            run_dir: path(&self.plan.run.path),
            resume_from: self.plan.resume_from.as_deref().map(path).unwrap_or_default(),
            bench: self.plan.bench.clone(),
        })
    }

    fn join(
        &mut self,
        join: xlaunch_proto::convert::Join,
        reply: oneshot::Sender<Result<JoinReply, Status>>,
    ) -> Option<Event> {
        let (rank, device) = (join.rank.0, join.device_uuid.clone());
        match self.rendezvous.join(join) {
            rendezvous::Progress::Waiting => {
                self.board.send_modify(|board| board.joined(rank, &device));
                self.waiting.push(reply);
                None
            }
            rendezvous::Progress::Complete(joined) => {
                self.board.send_modify(|board| board.joined(rank, &device));
                self.waiting.push(reply);
                for reply in self.waiting.drain(..) {
                    let _ = reply.send(Ok(joined.clone().into()));
                }
                Some(Event::Met)
            }
            rendezvous::Progress::Ignored(problem) => {
                let _ = reply.send(Err(Status::already_exists(problem)));
                None
            }
            rendezvous::Progress::Failed(problem) => {
                let _ = reply.send(Err(Status::failed_precondition(problem.clone())));
                self.refuse_waiting(&problem);
                Some(Event::MeetingFailed(problem))
            }
        }
    }

    fn refuse_waiting(&mut self, problem: &str) {
        for reply in self.waiting.drain(..) {
            let _ = reply.send(Err(Status::failed_precondition(problem.to_string())));
        }
    }

    fn report(&mut self, rank: u32, report: Report) {
        let now = Instant::now();
        self.board.send_modify(|board| board.reported(rank, &report, now));
        if let Some(member) = self.members.get_mut(rank as usize).and_then(Option::as_mut) {
            member.heard = Some(now);
            member.silent = false;
        }
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
        let written = match report {
            Report::TrainStarted(started) => {
                self.progress.started(&started);
                if started.first_step > 0 {
                    self.progress.say(&format!("resuming at step {}", started.first_step));
                }
                self.summary.started = Some(started);
                Ok(())
            }
            Report::Step(step) => {
                self.progress.step(&step, now);
                self.summary.step(&step);
                self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.step(&step))
            }
            Report::Eval(eval) => {
                self.progress.eval(&eval);
                self.summary.eval = Some(eval);
                self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.eval(&eval))
            }
            Report::Checkpoint(checkpoint) => {
                self.summary.checkpoint = Some(checkpoint.path);
                Ok(())
            }
            Report::Finished(finished) => {
                self.summary.sample = finished.sample;
                Ok(())
            }
            Report::Hello(_)
            | Report::Heartbeat(_)
            | Report::Profile(_)
            | Report::Sum(_)
            | Report::Calibration(_) => Ok(()),
        };
        if let Err(error) = written {
            self.progress.say(&format!("xlaunch: metrics are no longer written: {error}"));
            self.metrics = None;
        }
    }

    /// A running worker that says nothing, not even heartbeats, hangs: only a person can tell why.
    fn point_out_silence(&mut self, now: Instant) {
        for (rank, member) in self.members.iter_mut().enumerate() {
            let Some(member) = member else { continue };
            let Some(heard) = member.heard.filter(|_| member.alive && !member.silent) else { continue };
            if now.duration_since(heard) > SILENCE {
                member.silent = true;
                let seconds = now.duration_since(heard).as_secs();
                self.progress
                    .say(&format!("xlaunch: rank {rank} has been silent for {seconds} s: it may hang"));
            }
        }
    }

    fn finish(self, outcome: Option<Outcome>) -> Finished {
        let evidence = self.members.iter().map(|member| match member {
            Some(member) => Evidence { pid: member.worker.pid, stderr: member.tail.lines() },
            None => Evidence::default(),
        });
        let internal =
            Outcome { exit: xlaunch_proto::exit::ExitCode::Internal, root: None, others: Vec::new() };
        Finished {
            outcome: outcome.unwrap_or(internal),
            evidence: evidence.collect(),
            summary: self.summary,
            metrics: self.metrics.as_ref().map(|metrics| metrics.path().to_path_buf()),
            heard: self.heard,
        }
    }
}
