//! The task that owns a job. It turns everything that happens into events for the state machine ([`Job`]), and performs
//! the resulting actions.
//!
//! ```text
//! exits (pidfds), calls (gRPC), signals, deadlines --events--> Job (pure) --actions--> start, signal, kill, notify
//! ```
//! - `events`: what happens to the job; `group`: messages from and to the coordinator of the job's nodes;
//! - `attempt`: the processes of one attempt; `next_attempt`: processes that wait for it to end; `preload`: the process
//!   that forks workers, if there is one; `evidence`: evidence about a failure; `hang`: evidence about hanging ranks,
//!   and their end; `leftovers`: processes that a successful command leaves running; `terminal`: workers that use the
//!   terminal.
//! - Everything that depends on the kind of job is in a [`Workload`]; the driver knows only `dyn Workload`.
//! - The processes of an attempt belong to a [`ProcessTree`](xlaunch_host::spawn::process_tree::ProcessTree), which is
//!   empty before the next attempt starts or the job ends. A [`Reaper`] process cleans up if this process is killed.

mod attempt;
mod events;
mod evidence;
mod group;
mod hang;
mod leftovers;
mod next_attempt;
mod preload;
mod terminal;

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, sleep_until};
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::{JobState, Restart};
use xlaunch_spec::exit::ExitCode;

use crate::ending::{Ending, Evidence};
use crate::python::preload::Preloader;
use crate::rendezvous::peers::Peers;
use crate::run_dir::RunDir;
use crate::state::{Action, Event, Job};
use crate::status::board::Board;
use crate::waiting::{Group, Queries};
use crate::workload::Workload;
use crate::workload::command::{CommandPlan, CommandWorkload};
use crate::workload::trainer::{TrainerPlan, TrainerWorkload, TrainingResults};
use attempt::{Attempt, WorkerExit};
use group::Membership;
use hang::Examined;
use xlaunch_cluster::Assignment;
use xlaunch_host::clock;
use xlaunch_host::signals::Signals;
use xlaunch_host::spawn::reaper::Reaper;
use xlaunch_host::spawn::terminal::{Relayed, Terminal};
use xlaunch_host::spawn::{
    Spawner, adopt_orphans, check_system_calls, raise_open_file_limit, reap_orphans, sys,
};

/// Maximum number of queued calls that are handled before an exit.
const MAX_EARLIER_CALLS: usize = 1024;
const STALL_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Runs a job of the built-in trainer to its end. Leaves no processes, sockets or private directories behind.
///
/// # Errors
/// Fails on system errors before the first worker is started.
pub async fn run_trainer(
    plan: TrainerPlan<'_>,
    run: RunDir,
    group: Group,
    signals: Signals,
) -> io::Result<(Ending, TrainingResults)> {
    sys::close_inherited_on_exec(&[]);
    with_reaper(run, async |run, reaper| {
        let mut workload = TrainerWorkload::new(plan, run, &group)?;
        let mut ending = drive(&mut workload, run, reaper, group, signals).await?;
        ending.losses = workload.output().losses();
        Ok((ending, workload.finish().await))
    })
    .await
}

/// Runs a command's workers to their end, like [`run_trainer`].
///
/// # Errors
/// Fails on system errors before the first worker is started.
pub async fn run_command(
    plan: CommandPlan<'_>,
    run: RunDir,
    group: Group,
    signals: Signals,
) -> io::Result<Ending> {
    sys::close_inherited_on_exec(&plan.command.descriptors());
    with_reaper(run, async |run, reaper| {
        let mut workload = CommandWorkload::new(plan, run, &group)?;
        let mut ending = drive(&mut workload, run, reaper, group, signals).await?;
        workload.finish(&mut ending).await;
        Ok(ending)
    })
    .await
}

async fn with_reaper<T>(
    run: RunDir,
    job: impl AsyncFnOnce(&RunDir, &mut Reaper) -> io::Result<T>,
) -> io::Result<T> {
    check_system_calls()?;
    raise_open_file_limit();
    adopt_orphans()?;
    let private: Vec<_> = run.private().map(Path::to_path_buf).into_iter().collect();
    let mut reaper = Reaper::start(&run.id, &private)?;
    let result = job(&run, &mut reaper).await;
    // The order matters: the reaper removes the private directory if this process dies before doing so.
    drop(run);
    drop(reaper);
    result
}

async fn drive(
    workload: &mut dyn Workload,
    run: &RunDir,
    reaper: &mut Reaper,
    mut group: Group,
    mut signals: Signals,
) -> io::Result<Ending> {
    let queries = group.take_queries(&run.socket, workload.launch()).await?;
    let Queries { service, mut inbox, board } = queries;
    let (exits, mut exited) = mpsc::unbounded_channel();
    let (examined, mut hangs) = mpsc::unbounded_channel();
    let mut children = signal(SignalKind::child())?;
    let mut stall_poll = tokio::time::interval(STALL_POLL_INTERVAL);
    stall_poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let plan = workload.preload();
    let (imported, mut imports) = mpsc::unbounded_channel();
    let (relayed, mut terminal_signals) = mpsc::unbounded_channel();
    let senders = Senders { exits, examined, relayed };
    let mut driver = Driver::new(workload, run, reaper, &group, service.peers.clone(), board, senders)?;

    match plan {
        // The node is ready for its first attempt when the imports are done.
        Some(plan) => driver.preload(plan, imported).await,
        None => driver.prepare_attempt(group.first.clone()),
    }
    let mut ending = None;
    while ending.is_none() {
        let deadline = driver.deadline();
        let events = tokio::select! {
            Some(exit) = exited.recv() => {
                // Reports that workers sent before this exit count first.
                let earlier = std::iter::from_fn(|| inbox.try_recv().ok()).take(MAX_EARLIER_CALLS);
                let mut events: Vec<Event> = earlier.flat_map(|message| driver.message(message)).collect();
                events.extend(driver.exited(exit));
                events
            }
            Some(message) = group.link.next() => driver.group_message(message),
            Some(imported) = imports.recv() => {
                driver.imported(imported);
                Vec::new()
            }
            Some(message) = inbox.recv() => driver.message(message),
            Some(relayed) = terminal_signals.recv() => {
                driver.relayed(relayed);
                Vec::new()
            }
            request = signals.next() => Vec::from_iter(driver.signal_request(request)),
            Some(examined) = hangs.recv() => Vec::from_iter(driver.hang_examined(examined)),
            _ = children.recv() => {
                reap_orphans();
                driver.restore_reaper();
                driver.answer_terminal_users(&signals).await;
                Vec::new()
            }
            () = sleep_until(driver.terminal_deadline().into()) => {
                driver.next_terminal_user();
                Vec::new()
            }
            () = sleep_until(deadline.into()) => vec![driver.timer(Instant::now())],
            _ = stall_poll.tick() => Vec::from_iter(driver.poll(Instant::now())),
        };
        for event in events {
            let actions = driver.decide(event);
            ending = driver.act(actions).await.or(ending);
        }
    }
    service.finish().await;
    let ending = driver.finish(ending);
    group.finish().await;
    Ok(ending)
}

struct Driver<'a> {
    workload: &'a mut dyn Workload,
    run: &'a RunDir,
    reaper: &'a mut Reaper,
    job: Job,
    /// Number of workers on this node.
    workers: u32,
    membership: Membership,
    /// The other nodes, in a job that may have several.
    peers: Option<Peers>,
    spawner: Spawner,
    attempt: Attempt,
    terminal: Terminal,
    /// Workers that wait for the next attempt, and the assignment for which they were started.
    next: Option<(Attempt, Assignment)>,
    preloader: Option<Preloader>,
    /// Imports are in progress, so the node is not ready for an attempt.
    importing: bool,
    board: watch::Sender<Board>,
    /// Evidence, by rank, of the last attempt for which it was kept.
    kept_evidence: Vec<Evidence>,
    /// The run's private directory was deleted and could not be created again, which was reported.
    private_is_lost: bool,
    /// The reaper has died and another one could not be started, which was reported.
    reaper_is_lost: bool,
    exits: mpsc::UnboundedSender<WorkerExit>,
    examined: mpsc::UnboundedSender<Examined>,
}

/// Channels by which tasks report to the driver.
struct Senders {
    exits: mpsc::UnboundedSender<WorkerExit>,
    examined: mpsc::UnboundedSender<Examined>,
    relayed: mpsc::UnboundedSender<Relayed>,
}

impl<'a> Driver<'a> {
    /// Creates the driver of a job that waits for its first attempt.
    fn new(
        workload: &'a mut dyn Workload,
        run: &'a RunDir,
        reaper: &'a mut Reaper,
        group: &Group,
        peers: Option<Peers>,
        board: watch::Sender<Board>,
        senders: Senders,
    ) -> io::Result<Self> {
        let (rules, Senders { exits, examined, relayed }) = (workload.rules(), senders);
        Ok(Self {
            workload,
            run,
            reaper,
            workers: rules.workers,
            job: Job::new(rules),
            membership: Membership::new(group),
            peers,
            spawner: Spawner::start()?,
            attempt: Attempt::default(),
            terminal: Terminal::new(relayed),
            next: None,
            preloader: None,
            importing: false,
            board,
            kept_evidence: Vec::new(),
            private_is_lost: false,
            reaper_is_lost: false,
            exits,
            examined,
        })
    }
}

impl Driver<'_> {
    fn deadline(&self) -> Instant {
        let deadlines = [self.job.deadline(), self.workload.deadline(&self.job)];
        deadlines.into_iter().flatten().min().unwrap_or_else(|| Instant::now() + clock::IDLE_SLEEP)
    }

    fn timer(&self, now: Instant) -> Event {
        self.workload.timer(&self.job, now).unwrap_or(Event::Tick)
    }

    /// Checks for progress and for hanging ranks. Called every second.
    fn poll(&mut self, now: Instant) -> Option<Event> {
        self.restore_private();
        self.restore_reaper();
        self.report_survivors(now);
        let progress = match self.job.state() {
            JobState::Running => self.workload.read_heartbeats(&self.board, now),
            // Ranks of other nodes may hang after the last rank of this node has exited.
            JobState::Starting if self.job.waits_for_other_nodes() => None,
            _ => return None,
        };
        if let Some(hang) = self.workload.report_stalls(&self.board, now) {
            self.examine(hang);
        }
        progress
    }

    /// Creates the run's private directory again if it was deleted, and reports once if it cannot be.
    fn restore_private(&mut self) {
        match self.run.restore_private() {
            Ok(_) => self.private_is_lost = false,
            Err(error) if !std::mem::replace(&mut self.private_is_lost, true) => {
                let dir = self.run.private().unwrap_or(&self.run.path).display();
                self.notify(&format!(
                    "{dir} was deleted and cannot be created again: {error}; until it exists again, `xlaunch status` \
                     does not find this launch"
                ));
            }
            Err(_) => {}
        }
    }

    /// Starts another reaper if it has died, and reports once if that fails.
    fn restore_reaper(&mut self) {
        match self.reaper.restore() {
            Ok(()) => self.reaper_is_lost = false,
            Err(error) if !std::mem::replace(&mut self.reaper_is_lost, true) => self.notify(&format!(
                "the process launch-reaper was killed, and another one cannot be started: {error}; until it can, \
                 workers keep running if xlaunch is killed by SIGKILL"
            )),
            Err(_) => {}
        }
    }

    /// Passes an event to the job. Returns the resulting actions.
    fn decide(&mut self, event: Event) -> Vec<Action> {
        if matches!(event, Event::Hung { .. }) {
            self.board.send_modify(|board| board.time.hung());
        }
        let actions = self.job.handle(event, Instant::now());
        if let Some(at) = self.job.take_failure() {
            self.board.send_modify(|board| board.time.failed(at));
        }
        actions
    }

    /// Performs actions of the state machine, and further ones that result from them. Returns the ending if the job is
    /// over.
    async fn act(&mut self, actions: Vec<Action>) -> Option<Box<Ending>> {
        let mut queue = VecDeque::from(actions);
        let mut ending = None;
        if !queue.is_empty() {
            // An action may take long, so no worker keeps the terminal meanwhile.
            self.terminal.revoke();
        }
        while let Some(action) = queue.pop_front() {
            match action {
                Action::ReportFailure(failed) => self.membership.send(FromAgent::Failed(failed)),
                Action::ReportEnd(ended) => {
                    self.send_logs().await;
                    self.membership.send(FromAgent::Ended(ended));
                }
                Action::Start { attempt } => queue.extend(self.start(attempt).await),
                Action::Prepare { attempt } => self.prepare(attempt).await,
                Action::RequestStop => {
                    self.board.send_modify(|board| board.time.stopping());
                    self.workload.request_stop();
                }
                Action::Signal(signal) => {
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        self.attempt.signal(signal);
                    }
                }
                Action::PrintStacks(ranks) => {
                    if !self.attempt.print_stacks(&ranks) {
                        queue.extend(self.decide(Event::NoStacks));
                    }
                }
                Action::Kill => self.kill_attempt().await,
                Action::Notify(text) => {
                    self.notify(&text);
                    self.board.send_modify(|board| board.set_reason(&text));
                }
                Action::Restart { attempt, rank, cause, keep_evidence, counted_as } => {
                    self.attempt.keep_evidence |= keep_evidence;
                    let restart = Restart { unix_ms: clock::unix_ms(), attempt, rank, cause };
                    self.board.send_modify(|board| {
                        board.add_restart(restart);
                        board.time.restarts(counted_as, Instant::now());
                    });
                }
                Action::End(end) => {
                    self.drop_next().await;
                    self.end_attempt().await;
                    self.report_leftovers(&end);
                    if let Some(preloader) = self.preloader.take() {
                        preloader.end().await;
                    }
                    self.board.send_modify(|board| board.time.end(Instant::now()));
                    ending = Some(end);
                }
            }
        }
        self.publish_state();
        ending
    }

    /// Shows the user a line, without waiting.
    fn notify(&self, text: &str) {
        self.workload.notify(&format!("xlaunch: {text}"));
    }

    fn publish_state(&self) {
        self.board.send_modify(|board| board.set_state(self.job.state()));
    }

    /// Adds to the ending what the driver has collected.
    fn finish(mut self, ending: Option<Box<Ending>>) -> Ending {
        let ending = ending.map_or_else(|| Ending::new(ExitCode::Internal), |ending| *ending);
        let mut evidence = match ending.root {
            Some(_) if ending.of_kept_attempt => std::mem::take(&mut self.kept_evidence),
            Some(_) => self.all_evidence(),
            None => Vec::new(),
        };
        // The report names the file.
        let hung = ending.root.as_ref().filter(|root| root.hung).and_then(|root| root.rank);
        if let Some(evidence) = hung.and_then(|rank| evidence.get_mut(rank as usize)) {
            evidence.hang_file = evidence.hang_file.take().map(|file| self.run.keep(file));
        }
        let board = self.board.borrow();
        let (status, peak_memory_bytes) = (board.reply(Instant::now(), true), board.peak_memory_bytes());
        let leads = self.membership.assignment().node_rank == 0;
        Ending { evidence, status, peak_memory_bytes, leads, ..ending }
    }
}
