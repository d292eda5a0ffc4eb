//! The task that owns a job: turns what happens into events for [`Job`], and its actions into deeds.
//!
//! What is particular to a kind of job (how its workers are started, what they say) is in `Work`. Processes belong to a
//! [`Scope`] for each attempt, which is empty before the next one starts or the job ends; a [`Guard`] stands by for the case
//! that this process is killed.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, sleep_until};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::{JobState, Restart, StatusReply};

use crate::clock;
use crate::devices;
use crate::logs::RankOutput;
use crate::rendezvous::service::{self, Message};
use crate::report::Evidence;
use crate::run_dir::{RunDir, rank_dir};
use crate::signals::{self, Asked};
use crate::spawn::guard::Guard;
use crate::spawn::scope::Scope;
use crate::spawn::{Exit, Spawned, Spawner, Worker, adopt_orphans, gpu_memory, reap_orphans};
use crate::state::{Action, Event, Job, Outcome, Phase, StopCause};
use crate::status::board::Board;
use crate::workload::trainer::Trained;
use crate::workload::{Plan, Work};

/// Messages that may wait for this task.
const QUEUE: usize = 1024;
/// Time for the last output of workers that have ended; something else may hold it open.
const LAST_OUTPUT: Duration = Duration::from_millis(500);
/// Time for killed processes to be gone: more means that the kernel cannot end them.
const LAST_BREATH: Duration = Duration::from_secs(10);
/// Time for the driver to take back the memory of GPUs, before workers are started on them again.
const GPU_MEMORY: Duration = Duration::from_secs(15);
/// Bytes of a worker's error file that are looked at.
const ERROR_FILE: u64 = 1 << 20;
/// Pause between looks at silent workers.
const LOOK: Duration = Duration::from_secs(1);

/// What is left when a job is over.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct Finished {
    pub outcome: Outcome,
    /// By rank, where the job has failed.
    pub evidence: Vec<Evidence>,
    /// What callers were shown last.
    pub status: StatusReply,
    /// Of a job of the built-in trainer.
    pub trained: Trained,
}

/// Runs a job to its end. Of its processes, sockets and private directories nothing is left then.
///
/// # Errors
/// The system's, before the first worker is started.
pub async fn run(plan: Plan<'_>, run: RunDir) -> std::io::Result<Finished> {
    adopt_orphans()?;
    let private: Vec<_> = run.private().map(Path::to_path_buf).into_iter().collect();
    let guard = Guard::start(&run.id, &private)?;
    let finished = drive(plan, &run, &guard).await;
    // In this order: whatever happens in between, somebody cleans up.
    drop(run);
    drop(guard);
    finished
}

async fn drive(plan: Plan<'_>, run: &RunDir, guard: &Guard) -> std::io::Result<Finished> {
    let (console, mut lines) = mpsc::channel(QUEUE);
    let mut work = Work::new(plan, run, console)?;
    let (messages, mut inbox) = mpsc::channel(QUEUE);
    let board = watch::Sender::new(Board::new(work.launch()));
    let serving = service::serve(&run.socket, messages, board.clone()).await?;
    let (exits, mut exited) = mpsc::unbounded_channel();
    let mut asked = signals::listen(&work.ending_signals())?;
    let mut children = signal(SignalKind::child())?;
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let rules = work.rules();
    let mut driver = Driver {
        run,
        guard,
        world: rules.world,
        job: Job::new(rules, Instant::now()),
        spawner: Spawner::start()?,
        scope: None,
        members: Vec::new(),
        ends: Vec::new(),
        signalled: false,
        board,
        failed: false,
        exits,
    };

    let mut outcome = driver.act(&mut work, vec![Action::Start { attempt: 0 }]).await;
    while outcome.is_none() {
        let deadline = driver.deadline(&work);
        let event = tokio::select! {
            Some((rank, exit)) = exited.recv() => Some(driver.exited(&mut work, rank, exit)),
            Some(message) = inbox.recv() => driver.message(&mut work, message),
            Some(line) = lines.recv() => {
                work.say(&line);
                None
            }
            Some(asked) = asked.recv() => driver.asked(asked),
            _ = children.recv() => {
                reap_orphans();
                None
            }
            () = sleep_until(deadline.into()) => Some(driver.timer(&work, Instant::now())),
            _ = look.tick() => {
                if driver.job.phase() == Phase::Running {
                    work.report_stalls(&driver.board, Instant::now());
                }
                None
            }
        };
        if let Some(event) = event {
            let actions = driver.job.handle(event, Instant::now());
            outcome = driver.act(&mut work, actions).await;
        }
    }
    while let Ok(line) = lines.try_recv() {
        work.say(&line);
    }
    serving.finish().await;
    let finished = driver.finish(&work, outcome);
    Ok(Finished { trained: work.finish().await, ..finished })
}

/// How a rank's attempt ended, or failed to begin.
#[derive(Clone, Copy, Debug, Default)]
struct End {
    exit: Option<Exit>,
    died: Option<SystemTime>,
    /// We had sent it a signal.
    signalled: bool,
    /// The system's error number, where there was no process.
    spawn_error: Option<i32>,
}

/// A started worker.
#[derive(Debug)]
struct Member {
    worker: Worker,
    output: RankOutput,
}

struct Driver<'a> {
    run: &'a RunDir,
    guard: &'a Guard,
    job: Job,
    world: u32,
    spawner: Spawner,
    /// Before `members` in the order of drops: it knows workers by process ids, which are theirs as long as they are kept.
    scope: Option<Scope>,
    members: Vec<Option<Member>>,
    /// By rank.
    ends: Vec<End>,
    /// Workers of this attempt have been sent a signal.
    signalled: bool,
    board: watch::Sender<Board>,
    failed: bool,
    exits: mpsc::UnboundedSender<(u32, Exit)>,
}

impl Driver<'_> {
    /// When the next timer is due.
    fn deadline(&self, work: &Work<'_>) -> Instant {
        let far = Instant::now() + Duration::from_secs(3600);
        [self.job.deadline(), work.deadline(&self.job)].into_iter().flatten().min().unwrap_or(far)
    }

    fn timer(&self, work: &Work<'_>, now: Instant) -> Event {
        work.timer(&self.job, now).unwrap_or(Event::Tick)
    }

    /// Does what the state machine asks for; the outcome if the job is over.
    async fn act(&mut self, work: &mut Work<'_>, actions: Vec<Action>) -> Option<Outcome> {
        let mut queue = VecDeque::from(actions);
        let mut outcome = None;
        while let Some(action) = queue.pop_front() {
            match action {
                Action::Start { attempt } => queue.extend(self.start(work, attempt).await),
                Action::AskToStop => work.ask_to_stop(),
                Action::Signal(signal) => {
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        self.signalled = true;
                        self.signal(signal);
                    }
                }
                Action::Kill => {
                    self.signalled = true;
                    self.scope.iter().for_each(Scope::kill);
                }
                Action::Say(text) => {
                    work.say(&format!("xlaunch: {text}"));
                    self.board.send_modify(|board| board.because(&text));
                }
                Action::Restart { attempt, rank, cause } => {
                    let restart = Restart { unix_ms: clock::unix_ms(), attempt, rank, cause };
                    self.board.send_modify(|board| board.restarts(restart));
                }
                Action::End(end) => {
                    self.end_attempt(work).await;
                    self.failed = end.root.is_some();
                    outcome = Some(end);
                }
            }
        }
        self.show_state();
        outcome
    }

    /// Lets callers see where the job is.
    fn show_state(&self) {
        let state = match self.job.phase() {
            Phase::Waiting => JobState::Starting,
            Phase::Meeting => JobState::Rendezvous,
            Phase::Running => JobState::Running,
            Phase::Stopping => JobState::Stopping,
            Phase::Ended if self.failed => JobState::Failed,
            Phase::Ended => JobState::Done,
        };
        self.board.send_modify(|board| board.now_in(state));
    }

    fn signal(&self, signal: Signal) {
        self.scope.iter().for_each(|scope| scope.signal(signal));
    }

    /// Starts all workers of an attempt.
    async fn start(&mut self, work: &mut Work<'_>, attempt: u32) -> Vec<Action> {
        if attempt > 0 {
            let pids: Vec<u32> = self.members.iter().flatten().map(|member| member.worker.pid).collect();
            self.end_attempt(work).await;
            if !gpu_memory::released(&pids, GPU_MEMORY).await {
                work.say("xlaunch: GPU memory of the last attempt is still held; starting anyway");
            }
        }
        self.scope = None;
        self.members = (0..self.world).map(|_| None).collect();
        (self.ends, self.signalled) = (vec![End::default(); self.world as usize], false);
        self.board.send_modify(|board| board.reset(attempt, self.world));
        let begun = work.begin(attempt);
        let mut scope = Scope::create(&self.run.id, attempt, self.world);
        let mut actions = Vec::new();
        for rank in 0..self.world {
            let dir = rank_dir(&self.run.logs, attempt, rank);
            let started = match &begun {
                Ok(()) => self.start_one(work, &mut scope, attempt, rank, &dir).await,
                Err(error) => Err(std::io::Error::new(error.kind(), error.to_string())),
            };
            match started {
                Ok(member) => {
                    let pid = member.worker.pid;
                    self.board.send_modify(|board| board.spawned(rank, pid, Instant::now()));
                    self.members[rank as usize] = Some(member);
                }
                Err(error) => {
                    self.ends[rank as usize].spawn_error = error.raw_os_error();
                    let event = Event::SpawnFailed { rank, reason: error.to_string() };
                    actions.extend(self.job.handle(event, Instant::now()));
                }
            }
        }
        self.scope = Some(scope);
        actions
    }

    async fn start_one(
        &self,
        work: &Work<'_>,
        scope: &mut Scope,
        attempt: u32,
        rank: u32,
        dir: &Path,
    ) -> std::io::Result<Member> {
        fs_err::create_dir_all(dir)?;
        let (mut command, options) = work.command(attempt, rank, dir)?;
        scope.enter(rank, &mut command);
        let Spawned { worker, stdout, stderr } = self.spawner.spawn(command, options).await?;
        scope.started(worker.pid);
        self.guard.watch(scope);
        // What fails here leaves a process to the scope, and tells of no exit: the rank has not started.
        let output = work.output().start(rank, dir, stdout, stderr)?;
        let (exits, pidfd) = (self.exits.clone(), worker.watch()?);
        tokio::spawn(async move {
            // The driver is gone only when the whole process ends.
            let _ = exits.send((rank, Worker::exit(pidfd).await));
        });
        Ok(Member { worker, output })
    }

    /// Nothing of an attempt is left behind this, and all that its workers wrote is where it belongs.
    async fn end_attempt(&mut self, work: &mut Work<'_>) {
        if let Some(scope) = &self.scope {
            for left in scope.gone(LAST_BREATH).await {
                let (pid, name, state) = (left.pid, left.name, left.state);
                work.say(&format!(
                    "xlaunch: process {pid} ({name}, state {state}) does not end, although killed"
                ));
            }
        }
        let outputs = self.members.iter_mut().flatten();
        for member in outputs {
            member.output.end(LAST_OUTPUT).await;
        }
    }

    fn exited(&mut self, work: &mut Work<'_>, rank: u32, exit: Exit) -> Event {
        work.ended(rank);
        if let Some(end) = self.ends.get_mut(rank as usize) {
            (end.exit, end.died, end.signalled) = (Some(exit), Some(SystemTime::now()), self.signalled);
        }
        self.board.send_modify(|board| board.exited(rank, exit.to_string()));
        Event::Exited { rank, exit }
    }

    fn message(&mut self, work: &mut Work<'_>, message: Message) -> Option<Event> {
        match message {
            Message::Stop => Some(Event::Stop(StopCause::Call)),
            of_a_worker => work.message(of_a_worker, &self.job, &self.board),
        }
    }

    fn asked(&self, asked: Asked) -> Option<Event> {
        match asked {
            Asked::End(signal) => return Some(Event::Stop(StopCause::Signal(signal.as_raw()))),
            Asked::Pass(signal) => self.signal(signal),
            Asked::Suspend => self.scope.iter().for_each(Scope::suspend),
            Asked::Continue => self.scope.iter().for_each(Scope::resume),
        }
        None
    }

    fn finish(&self, work: &Work<'_>, outcome: Option<Outcome>) -> Finished {
        let internal = Outcome { exit: ExitCode::Internal, root: None, others: Vec::new() };
        let outcome = outcome.unwrap_or(internal);
        // Nobody asks how a job went well.
        let told = if outcome.root.is_some() { self.world } else { 0 };
        Finished {
            outcome,
            status: self.board.borrow().reply(Instant::now(), true),
            evidence: (0..told).map(|rank| self.evidence(work, rank)).collect(),
            trained: Trained::default(),
        }
    }

    /// All that is known of a rank's last attempt.
    fn evidence(&self, work: &Work<'_>, rank: u32) -> Evidence {
        let member = self.members.get(rank as usize).and_then(Option::as_ref);
        let end = self.ends.get(rank as usize).copied().unwrap_or_default();
        let program = work.program();
        Evidence {
            pid: member.map_or(0, |member| member.worker.pid),
            host: devices::host_name(),
            // The built-in trainer's codes have meanings of their own; signals mean the same to all.
            exit: end.exit.filter(|exit| program.is_some() || matches!(exit, Exit::Signal(_))),
            died: end.died,
            signalled: end.signalled,
            stderr: member.map(|member| member.output.tail()).unwrap_or_default(),
            error_file: read_some(&rank_dir(&self.run.logs, self.job.attempt(), rank).join("error.json")),
            oom_kills: self.scope.as_ref().map(|scope| scope.oom_kills(rank)).unwrap_or_default(),
            spawn_error: end.spawn_error,
            program: program.map(OsStr::to_owned).unwrap_or_default(),
            search_path: std::env::var_os("PATH").unwrap_or_default(),
        }
    }
}

/// The beginning of a file that a worker may have written.
fn read_some(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    fs_err::File::open(path).ok()?.take(ERROR_FILE).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}
