//! The task that owns a job: turns what happens into events for [`Job`], and its actions into deeds.
//!
//! What is particular to a kind of job (how its workers are started, what they say) is its own side's: [`Work`].

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep_until;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::JobState;

use super::state::{Action, Event, Job, Outcome, Phase, StopCause};
use super::status::Board;
use super::trainer::{Trained, Trainer, TrainerPlan};
use crate::logs::{self, Tail};
use crate::rendezvous::service::{self, Message};
use crate::report::Evidence;
use crate::run_dir::RunDir;
use crate::spawn::environment;
use crate::spawn::{Exit, Spawned, Spawner, Worker};

/// Messages that may wait for this task.
const QUEUE: usize = 1024;
/// Time for the last output of a worker that has ended.
const LAST_OUTPUT: Duration = Duration::from_millis(500);
/// Pause between looks at silent workers.
const LOOK: Duration = Duration::from_secs(5);

/// What is left when a job is over.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct Finished {
    pub outcome: Outcome,
    pub evidence: Vec<Evidence>,
    pub trained: Trained,
}

/// Runs a job to its end.
pub async fn run(plan: TrainerPlan<'_>, run: &RunDir) -> std::io::Result<Finished> {
    let (messages, mut inbox) = mpsc::channel(QUEUE);
    service::serve(&run.socket, messages)?;
    let (exits, mut exited) = mpsc::unbounded_channel();
    let (console, mut lines) = mpsc::channel(QUEUE);
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminates = signal(SignalKind::terminate())?;
    let mut hangups = signal(SignalKind::hangup())?;
    let mut look = tokio::time::interval(LOOK);
    let mut driver = Driver::new(Trainer::new(plan, run)?, run, exits, console)?;

    let mut outcome = driver.act(vec![Action::Start { attempt: 0 }]).await;
    while outcome.is_none() {
        let deadline = driver.deadline();
        let event = tokio::select! {
            Some((rank, exit)) = exited.recv() => Some(driver.exited(rank, exit).await),
            Some(message) = inbox.recv() => driver.message(message),
            Some(line) = lines.recv() => {
                driver.work.say(&line);
                None
            }
            _ = interrupts.recv() => Some(Event::Stop(StopCause::Signal(Signal::INT.as_raw()))),
            _ = terminates.recv() => Some(Event::Stop(StopCause::Signal(Signal::TERM.as_raw()))),
            _ = hangups.recv() => Some(Event::Stop(StopCause::Signal(Signal::HUP.as_raw()))),
            () = sleep_until(deadline.into()) => Some(driver.timer(Instant::now())),
            _ = look.tick() => {
                driver.work.point_out_silence(Instant::now());
                None
            }
        };
        if let Some(event) = event {
            let actions = driver.job.handle(event, Instant::now());
            outcome = driver.act(actions).await;
        }
    }
    while let Ok(line) = lines.try_recv() {
        driver.work.say(&line);
    }
    Ok(driver.finish(outcome))
}

/// A started worker.
#[derive(Debug)]
struct Member {
    worker: Worker,
    tail: Tail,
    /// The ends of its output.
    output: Vec<oneshot::Receiver<()>>,
}

struct Driver<'a> {
    run: &'a RunDir,
    work: Trainer<'a>,
    job: Job,
    world: u32,
    spawner: Spawner,
    members: Vec<Option<Member>>,
    board: Board,
    reason: String,
    exits: mpsc::UnboundedSender<(u32, Exit)>,
    console: mpsc::Sender<String>,
}

impl<'a> Driver<'a> {
    fn new(
        work: Trainer<'a>,
        run: &'a RunDir,
        exits: mpsc::UnboundedSender<(u32, Exit)>,
        console: mpsc::Sender<String>,
    ) -> std::io::Result<Self> {
        let rules = work.rules();
        Ok(Self {
            world: rules.world,
            job: Job::new(rules, Instant::now()),
            spawner: Spawner::start()?,
            members: Vec::new(),
            board: Board::new(&run.id, work.name()),
            reason: String::new(),
            run,
            work,
            exits,
            console,
        })
    }

    /// When the next timer is due.
    fn deadline(&self) -> Instant {
        let far = Instant::now() + Duration::from_secs(3600);
        [self.job.deadline(), self.work.deadline(&self.job)].into_iter().flatten().min().unwrap_or(far)
    }

    fn timer(&self, now: Instant) -> Event {
        self.work.timer(&self.job, now).unwrap_or(Event::Tick)
    }

    /// Does what the state machine asks for; the outcome if the job is over.
    async fn act(&mut self, actions: Vec<Action>) -> Option<Outcome> {
        let mut queue = std::collections::VecDeque::from(actions);
        while let Some(action) = queue.pop_front() {
            match action {
                Action::Start { attempt } => queue.extend(self.start(attempt).await),
                Action::AskToStop => self.work.ask_to_stop(),
                Action::Signal(signal) => {
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        self.signal(signal);
                    }
                }
                Action::Kill => self.signal(Signal::KILL),
                Action::Say(text) => {
                    self.work.say(&format!("xlaunch: {text}"));
                    self.reason = text;
                }
                Action::End(outcome) => return Some(outcome),
            }
        }
        None
    }

    fn signal(&self, signal: Signal) {
        // Groups, also of workers that are gone: what they started may not be.
        self.members.iter().flatten().for_each(|member| member.worker.signal(signal));
    }

    /// Starts all workers of an attempt.
    async fn start(&mut self, attempt: u32) -> Vec<Action> {
        self.work.begin(attempt);
        self.board.reset(attempt, self.world);
        self.members = (0..self.world).map(|_| None).collect();
        let port = environment::free_port().unwrap_or(29_500);
        let mut actions = Vec::new();
        for rank in 0..self.world {
            let started = match self.work.command(attempt, rank, port) {
                Ok(command) => self.start_one(attempt, rank, command).await,
                Err(error) => Err(error),
            };
            match started {
                Ok(member) => {
                    self.board.spawned(rank, member.worker.pid);
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

    async fn start_one(&self, attempt: u32, rank: u32, command: Command) -> std::io::Result<Member> {
        let logs = self.logs().join(format!("attempt_{attempt}")).join(rank.to_string());
        fs_err::create_dir_all(&logs)?;
        let Spawned { worker, stdout, stderr } = self.spawner.spawn(command).await?;
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
        Ok(Member { worker, tail, output })
    }

    fn logs(&self) -> PathBuf {
        self.run.path.join("logs")
    }

    /// A worker is gone: its last lines first, then the news.
    async fn exited(&mut self, rank: u32, exit: Exit) -> Event {
        self.work.ended(rank);
        if let Some(member) = self.members.get_mut(rank as usize).and_then(Option::as_mut) {
            for end in member.output.drain(..) {
                // Something the worker started may hold its output open.
                let _ = tokio::time::timeout(LAST_OUTPUT, end).await;
            }
        }
        self.board.exited(rank, exit.to_string());
        Event::Exited { rank, exit }
    }

    fn message(&mut self, message: Message) -> Option<Event> {
        match message {
            Message::Status(reply) => {
                let state = match self.job.phase() {
                    Phase::Waiting => JobState::Starting,
                    Phase::Meeting => JobState::Rendezvous,
                    Phase::Running => JobState::Running,
                    Phase::Stopping => JobState::Stopping,
                    Phase::Ended => JobState::Done,
                };
                // A caller that is gone needs no answer.
                let _ = reply.send(self.board.reply(state, &self.reason, Instant::now()));
                None
            }
            Message::Stop => Some(Event::Stop(StopCause::Call)),
            of_a_worker => self.work.message(of_a_worker, &self.job, &mut self.board),
        }
    }

    fn finish(self, outcome: Option<Outcome>) -> Finished {
        let evidence = self.members.iter().map(|member| match member {
            Some(member) => Evidence { pid: member.worker.pid, stderr: member.tail.lines() },
            None => Evidence::default(),
        });
        let internal = Outcome { exit: ExitCode::Internal, root: None, others: Vec::new() };
        Finished {
            outcome: outcome.unwrap_or(internal),
            evidence: evidence.collect(),
            trained: self.work.finish(),
        }
    }
}
