//! The manager: the only task that changes jobs.
//!
//! Each event (a command, an agent's event, a GPU change, a reload) is turned into records, which are written to the
//! journal and applied to [`Jobs`] before the manager acts on them. After each event, the manager starts the jobs that
//! can start, and publishes the view if it has changed.
//!
//! Commands are refused and no jobs are started while the journal cannot be written. Events that have already happened,
//! such as the end of a job, are applied nevertheless, and the journal is rewritten as soon as the disk permits.

mod examination;
mod execute;
mod publish;
mod records;
mod recovery;
mod resources;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tracing::{info, warn};
use xlaunch_proto::v1::{NodeStatus, Restart, StatusReply};

use super::accounting::Accounting;
use super::agents::AgentStarter;
use super::agents::follow::{AgentEvent, FollowSetup, JobStart, follow};
use super::agents::hooks::{Facts, Moment};
use super::commands::Command;
use super::config::{HooksSection, LiveConfig};
use super::files::{JobDirs, JobResult, StartOptions};
use super::gpus::{GpuFacts, GpuMonitor, Inventory};
use super::ids::Ids;
use super::journal::{Integrity, Journal};
use super::runtime::{JobRuntime, Stop};
use super::state::Usage;
use super::state::examination::ExaminationEnd;
use super::state::limits::{Due, due};
use super::state::schedule::{Schedule, Wait, schedule};
use super::state::{End, Entry, Jobs, Phase, Record, bounded};
use super::view::NodeView;
use super::{boot_id, directory_limit};
use examination::Running;
use records::AccountingState;
use xlaunch_host::clock;

/// Capacity of the channel of agents' events.
const AGENT_EVENT_CAPACITY: usize = 1024;
/// Interval of watchdog notifications, and of attempts to rewrite a journal that could not be written.
const MANAGER_TICK_INTERVAL: Duration = Duration::from_secs(5);

/// Everything that the manager is created from.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) journal: Journal<Record>,
    /// The result of replaying the journal.
    pub(crate) jobs: Jobs,
    /// Completeness of the journal.
    pub(crate) integrity: Integrity,
    pub(crate) ids: Ids,
    /// Jobs whose units run, each with its user id.
    pub(crate) units: Vec<(u64, u32)>,
    pub(crate) dirs: JobDirs,
    pub(crate) accounting: Accounting,
    pub(crate) starter: AgentStarter,
    /// Directory for the files of GPU examinations.
    pub(crate) doctor_dir: PathBuf,
    pub(crate) hooks: HooksSection,
    pub(crate) gpu_monitor: GpuMonitor,
    pub(crate) gpus: watch::Receiver<Inventory>,
    /// Configuration in effect; a reload replaces it.
    pub(crate) config: watch::Receiver<LiveConfig>,
    /// Tells in messages where `config` is set and how a change is applied: `in FILE, then ...`.
    pub(crate) how_to_configure: String,
    /// The reason why the page is not served, empty if it is; `None` if no page is configured.
    pub(crate) page_problem: Option<watch::Receiver<String>>,
    pub(crate) cores: u32,
    /// The node's status, with the fields that never change filled in.
    pub(crate) node: NodeStatus,
}

/// Manages the jobs until all senders of `commands` are dropped. Calls `on_tick` periodically.
pub(crate) async fn run(
    setup: Setup,
    mut commands: mpsc::Receiver<Command>,
    view: watch::Sender<Arc<NodeView>>,
    on_tick: impl Fn(&NodeStatus) + Send,
) {
    let (event_sender, mut events) = mpsc::channel(AGENT_EVENT_CAPACITY);
    // There is only one examination at a time.
    let (ending_sender, mut endings) = mpsc::channel(1);
    tokio::spawn(directory_limit::watch(setup.dirs.clone(), view.subscribe(), event_sender.clone()));
    let mut manager = Manager::new(setup, event_sender, ending_sender, view);
    manager.recover();
    let mut tick = tokio::time::interval(MANAGER_TICK_INTERVAL);
    manager.settle();
    loop {
        let until_next_limit = manager.until_next_limit();
        tokio::select! {
            command = commands.recv() => match command {
                Some(command) => {
                    manager.execute(command);
                    continue;
                }
                None => return,
            },
            Some((job, event)) = events.recv() => manager.on_agent_event(job, event),
            Some(ending) = endings.recv() => manager.on_examined(ending),
            Ok(()) = manager.gpus.changed() => {}
            Ok(()) = manager.config.changed() => {}
            () = changed(&mut manager.page_problem) => {}
            () = wait(until_next_limit) => {}
            _ = tick.tick() => {
                manager.rewrite_journal_if_needed();
                manager.retry_accounts();
                on_tick(&manager.published.node);
            }
        }
        manager.settle();
    }
}

/// Waits for a change of a value that may not exist.
async fn changed(value: &mut Option<watch::Receiver<String>>) {
    let is_gone = match value {
        Some(receiver) => receiver.changed().await.is_err(),
        None => std::future::pending().await,
    };
    if is_gone {
        *value = None;
    }
}

/// Waits for this time, or forever if there is none. Time in which the node is suspended does not count, so each tick
/// checks too.
async fn wait(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

struct Manager {
    journal: Journal<Record>,
    jobs: Jobs,
    integrity: Integrity,
    ids: Ids,
    units: Vec<(u64, u32)>,
    /// Jobs up to this id are not forgotten. Set if the journal was incomplete when this daemon was started.
    kept_up_to: u64,
    dirs: JobDirs,
    accounting: Accounting,
    accounting_state: AccountingState,
    starter: Arc<AgentStarter>,
    doctor_dir: PathBuf,
    /// The running examination of GPUs, if any.
    examination: Option<Running>,
    /// Number of GPUs examined since the start, as in [`NodeView::examined`].
    examined: [u64; 3],
    endings: mpsc::Sender<ExaminationEnd>,
    hooks: Arc<HooksSection>,
    gpu_monitor: GpuMonitor,
    gpus: watch::Receiver<Inventory>,
    config: watch::Receiver<LiveConfig>,
    how_to_configure: String,
    page_problem: Option<watch::Receiver<String>>,
    cores: u32,
    base: NodeStatus,
    events: mpsc::Sender<(u64, AgentEvent)>,
    /// State of jobs that are followed, that ended while this daemon ran, or that left a last status.
    runtime: BTreeMap<u64, JobRuntime>,
    /// True if `jobs` has changes that are not in the journal.
    unsaved: bool,
    /// Size of the journal after its last compaction; 0 if it has not been compacted since the start.
    compacted_bytes: u64,
    /// System clock minus the node's clock at the last publication, in milliseconds.
    skew: i64,
    published: NodeView,
    view: watch::Sender<Arc<NodeView>>,
    /// Jobs to publish again.
    changed: BTreeSet<u64>,
    /// The reasons why queued jobs wait.
    waits: BTreeMap<u64, Wait>,
    /// Time at which the next warning or time limit is due, on the node's clock.
    next_limit: Option<u64>,
    /// The queue in order at the last schedule, including jobs that have started since.
    queue: Vec<u64>,
    /// Published queue positions, counted from 1.
    positions: BTreeMap<u64, u32>,
}

impl Manager {
    fn new(
        setup: Setup,
        events: mpsc::Sender<(u64, AgentEvent)>,
        endings: mpsc::Sender<ExaminationEnd>,
        view: watch::Sender<Arc<NodeView>>,
    ) -> Self {
        let Setup { journal, jobs, dirs, accounting, starter, gpu_monitor, gpus, config, .. } = setup;
        let Setup {
            integrity,
            ids,
            units,
            doctor_dir,
            hooks,
            how_to_configure,
            page_problem,
            cores,
            node,
            ..
        } = setup;
        let accounting_state = AccountingState::of(&jobs);
        Self {
            changed: jobs.jobs.keys().copied().collect(),
            journal,
            jobs,
            integrity,
            ids,
            units,
            kept_up_to: 0,
            dirs,
            accounting,
            accounting_state,
            starter: Arc::new(starter),
            doctor_dir,
            examination: None,
            examined: [0; 3],
            endings,
            hooks: Arc::new(hooks),
            gpu_monitor,
            gpus,
            config,
            how_to_configure,
            page_problem,
            cores,
            base: node,
            events,
            runtime: BTreeMap::new(),
            unsaved: false,
            compacted_bytes: 0,
            skew: 0,
            published: NodeView::default(),
            view,
            waits: BTreeMap::new(),
            next_limit: None,
            queue: Vec::new(),
            positions: BTreeMap::new(),
        }
    }

    fn on_agent_event(&mut self, job: u64, event: AgentEvent) {
        self.changed.insert(job);
        match event {
            AgentEvent::Started => {
                info!(job, "job {job} runs");
                self.runtime.entry(job).or_default().runs = true;
            }
            AgentEvent::Status(status) => self.on_status(job, *status),
            AgentEvent::Oversized(reason) => self.on_oversized(job, reason),
            AgentEvent::Ended(result, usage) => self.on_ended(job, result, usage),
            AgentEvent::Lost(reason, usage) => self.on_lost(job, &reason, usage),
            AgentEvent::NotStarted(reason) => self.on_not_started(job, reason),
            AgentEvent::PrologFailed(reason) => self.on_prolog_failed(job, &reason),
        }
    }

    fn on_status(&mut self, job: u64, status: StatusReply) {
        for Restart { attempt, rank, cause, .. } in self.runtime.entry(job).or_default().update(status) {
            warn!(
                job,
                attempt, rank, cause, "attempt {attempt} of job {job} has failed; restarting its workers"
            );
        }
    }

    /// Returns the time on the node's clock, in milliseconds.
    fn now(&self) -> u64 {
        self.jobs.clock.at(clock::uptime_ms())
    }

    fn until_next_limit(&self) -> Option<Duration> {
        self.next_limit.map(|at| Duration::from_millis(at.saturating_sub(self.now())))
    }

    /// Returns the user who has cancelled a running job, if any.
    fn cancelled_by(&self, job: u64) -> Option<String> {
        match &self.jobs.jobs.get(&job)?.phase {
            Phase::Active { cancelled: Some(by), .. } => Some(self.jobs.user_label(by.uid, &by.user)),
            _ => None,
        }
    }

    /// Returns the reason if the job has reached its time limit, in which case it has failed whatever its agent
    /// reports.
    fn limit_reached(&self, job: u64) -> Option<String> {
        match self.jobs.jobs.get(&job)? {
            Entry { submitted, phase: Phase::Active { over_limit: true, .. } } => {
                Some(submitted.limit_reached())
            }
            _ => None,
        }
    }

    fn on_ended(&mut self, job: u64, result: JobResult, usage: Option<Usage>) {
        let end = match result.exit {
            0 => End::Done,
            _ if result.stopped => End::Cancelled,
            _ => End::Failed,
        };
        self.load_last_status(job);
        let JobResult { exit, rank, attempt, usage: used, .. } = result;
        let (reason, report) = (bounded(result.reason), bounded(result.report));
        if let Some(rank) = rank {
            warn!(job, attempt, rank, "rank {rank} of job {job} has failed in attempt {attempt}");
        }
        let (end, reason) = match (self.limit_reached(job), self.cancelled_by(job)) {
            (Some(reason), _) => (End::Failed, reason),
            (None, Some(user)) if end == End::Cancelled => {
                let rest = if reason.is_empty() { String::new() } else { format!(": {reason}") };
                (end, bounded(format!("cancelled by user {user}{rest}")))
            }
            (None, _) => (end, reason),
        };
        // Without systemd, only the agent knows the usage.
        let usage = usage.or(used);
        let (at, order) = (self.now(), 0);
        self.record_event(Record::Ended { job, end, exit: Some(exit), reason, report, at, order, usage });
    }

    /// Kills a job whose directory exceeds the limit, or removes the directory if the job does not run.
    fn on_oversized(&mut self, job: u64, reason: String) {
        warn!(job, reason, "the directory of job {job} exceeds the limit");
        match self.jobs.jobs.get(&job).map(|entry| &entry.phase) {
            Some(Phase::Active { .. }) => {
                let runtime = self.runtime.entry(job).or_default();
                runtime.killed_for = Some(reason);
                runtime.stop.send_replace(Stop::Kill);
                return;
            }
            Some(Phase::Queued { .. }) => self.record_end(job, End::Failed, reason, None),
            Some(Phase::Ended { .. }) | None => {}
        }
        if let Err(error) = tokio::task::block_in_place(|| self.dirs.remove(job)) {
            warn!(job, "failed to remove the directory of job {job}: {error}");
        }
    }

    /// Loads the last status that the agent of an ended job has written to its directory.
    fn load_last_status(&mut self, job: u64) {
        let Some(Entry { submitted, .. }) = self.jobs.jobs.get(&job) else { return };
        let Some(status) = self.dirs.last_status(job, submitted.uid) else { return };
        self.on_status(job, status);
    }

    fn on_lost(&mut self, job: u64, reason: &str, usage: Option<Usage>) {
        let is_killed = self.runtime.get(&job).is_some_and(|runtime| *runtime.stop.borrow() == Stop::Kill);
        if let Some(record) = self.jobs.requeue(job, reason, self.now()).filter(|_| !is_killed) {
            warn!(job, "job {job} is lost and goes back to the queue: {reason}");
            return self.record_event(record);
        }
        let killed_for = self.runtime.get(&job).and_then(|runtime| runtime.killed_for.clone());
        let (end, reason) = match (is_killed, killed_for.or_else(|| self.limit_reached(job))) {
            (true, Some(reason)) => (End::Failed, reason),
            (true, None) => {
                let by = self.cancelled_by(job).map_or(String::new(), |user| format!(" of user {user}"));
                (End::Cancelled, format!("killed by `cancel --force`{by}"))
            }
            (false, Some(reason)) => (End::Failed, reason),
            (false, None) => (End::Lost, reason.to_owned()),
        };
        self.record_end(job, end, reason, usage);
    }

    fn on_not_started(&mut self, job: u64, reason: Option<String>) {
        let (end, reason) = match (self.cancelled_by(job), reason, self.limit_reached(job)) {
            (Some(user), ..) => (End::Cancelled, format!("cancelled by user {user} before it started")),
            (None, Some(reason), _) | (None, None, Some(reason)) => (End::Failed, reason),
            (None, None, None) => {
                let reason = "the daemon was stopped before it started the job".into();
                return self.record_event(Record::Requeued { job, reason, lost: false, at: 0 });
            }
        };
        self.record_end(job, end, reason, None);
    }

    /// Handles a failed prolog. The node is drained before the job returns to the queue: otherwise one job after the
    /// other would fail.
    fn on_prolog_failed(&mut self, job: u64, reason: &str) {
        if self.cancelled_by(job).is_some() || self.limit_reached(job).is_some() {
            return self.on_not_started(job, None);
        }
        let reason = bounded(format!("{reason} (before job {job})"));
        warn!(job, "the node is drained: {reason}");
        if self.jobs.drained.is_none() {
            let (gpus, undo, uid) = (Vec::new(), false, rustix::process::getuid().as_raw());
            self.record_event(Record::Drained { gpus, undo, reason: reason.clone(), uid, at: self.now() });
        }
        // The failure is the node's fault, so it does not count against the job.
        self.record_event(Record::Requeued { job, reason, lost: false, at: 0 });
    }

    /// Records the end of a job that has left no result.
    fn record_end(&mut self, job: u64, end: End, reason: String, usage: Option<Usage>) {
        let (exit, report, at, order) = (None, String::new(), self.now(), 0);
        self.record_event(Record::Ended { job, end, exit, reason, report, at, order, usage });
    }

    /// Runs after each event: enforces time limits, starts jobs that can start, then publishes the changes.
    fn settle(&mut self) {
        self.follow_system_clock();
        self.record_half_life();
        self.write_accounts();
        self.enforce_limits();
        self.cancel_unsatisfiable();
        self.start_jobs();
        self.next_limit = due(&self.jobs, self.now()).next;
        self.publish();
    }

    /// Records a changed half-life in the journal, so that replaying computes the same usage.
    fn record_half_life(&mut self) {
        let seconds = self.config.borrow().jobs.fair_share_half_life.0.as_secs();
        if seconds != self.jobs.usage.half_life_seconds {
            // If this fails, the next event tries again.
            let _ = self.write(Record::HalfLife { seconds });
        }
    }

    fn enforce_limits(&mut self) {
        let now = self.now();
        let Due { warnings, stops, .. } = due(&self.jobs, now);
        for (job, signal) in warnings {
            info!(job, signal, "job {job} approaches its time limit: its workers are sent signal {signal}");
            self.record_event(Record::Warned { job, at: now });
            if let Some(runtime) = self.runtime.get(&job) {
                runtime.warning.send_replace(Some(signal));
            }
        }
        for job in stops {
            info!(job, "job {job} has reached its time limit and is stopped");
            self.record_event(Record::TimeLimitReached { job, at: now });
            if let Some(runtime) = self.runtime.get(&job) {
                runtime.stop.send_modify(|stop| *stop = (*stop).max(Stop::Ask));
            }
        }
    }

    /// Cancels queued jobs whose dependencies can no longer be met, and in turn the jobs that depend on those.
    fn cancel_unsatisfiable(&mut self) {
        loop {
            let unsatisfiable = self.jobs.unsatisfiable();
            if unsatisfiable.is_empty() {
                return;
            }
            for (job, reason) in unsatisfiable {
                self.record_end(job, End::Cancelled, reason, None);
            }
        }
    }

    fn start_jobs(&mut self) {
        let Schedule { starts, waits, queue } = schedule(&self.jobs, &self.resources(), self.now());
        self.changed
            .extend(waits.iter().filter(|(job, why)| self.waits.get(job) != Some(why)).map(|it| *it.0));
        (self.waits, self.queue) = (waits, queue);
        for (job, gpus) in starts {
            let Some(Entry { phase: Phase::Queued { starts, .. }, .. }) = self.jobs.jobs.get(&job) else {
                continue;
            };
            let record = Record::Starting { job, start: starts + 1, gpus, boot: boot_id(), at: self.now() };
            if self.write(record).is_err() {
                // The next tick tries again.
                return;
            }
            self.follow(job, true);
        }
    }

    /// Spawns the task that follows an active job. If `fresh`, the task starts the agent; otherwise it adopts the
    /// agent.
    fn follow(&mut self, job: u64, fresh: bool) {
        let Some(entry) = self.jobs.jobs.get(&job) else { return };
        let Entry { submitted, phase: Phase::Active { start, gpus, at, cancelled, over_limit, .. } } = entry
        else {
            return;
        };
        let config = self.config.borrow();
        let max_grace = config.jobs.max_grace.0;
        let options = StartOptions {
            gpus: gpus.clone(),
            requeued: submitted.requeues > 0,
            element: submitted.array,
            only_training: !config.jobs.allow_commands(is_root()),
            max_output: Some(config.jobs.max_output.0),
            uid: submitted.uid,
            gid: submitted.gid,
        };
        let job_start = JobStart {
            job,
            start: *start,
            at: *at,
            name: submitted.name.clone(),
            uid: submitted.uid,
            user: submitted.user.clone(),
            options,
            gpu_nodes: gpu_nodes(&self.gpus.borrow(), gpus),
            shutdown_timeout: Duration::try_from_secs_f64(submitted.shutdown_timeout)
                .map_or(max_grace, |timeout| timeout.min(max_grace)),
            facts: Facts::of(entry),
            cpus: submitted.scheduling.cpus,
            memory: submitted.scheduling.memory_bytes,
            max_tasks: config.jobs.max_tasks.unwrap_or_else(resources::default_max_tasks),
        };
        drop(config);
        let runtime = JobRuntime::new(fresh);
        let is_stopping = cancelled.is_some() || *over_limit;
        runtime.stop.send_replace(if is_stopping { Stop::Ask } else { Stop::No });
        let (stop, warning) = (runtime.stop.subscribe(), runtime.warning.subscribe());
        let (dirs, starter) = (self.dirs.clone(), self.starter.clone());
        let (hooks, events) = (self.hooks.clone(), self.events.clone());
        let setup = FollowSetup { dirs, starter, hooks, events };
        tokio::spawn(follow(job_start, fresh, setup, stop, warning));
        self.runtime.insert(job, runtime);
    }
}

impl Manager {
    /// Runs the hook for the end of a job, in the background.
    fn run_end_hook(&self, job: u64) {
        let Some(entry) = self.jobs.jobs.get(&job) else { return };
        let (facts, hooks, starter) = (Facts::of(entry), self.hooks.clone(), self.starter.clone());
        tokio::spawn(async move {
            if let Err(problem) = hooks.run(Moment::OnEnd, &facts, &starter).await {
                warn!(job, "job {job}: {problem}");
            }
        });
    }
}

/// Returns whether the daemon runs as root, so that it serves other users than its own.
fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

/// Returns the device nodes of these GPUs; `None` on a node without GPUs.
fn gpu_nodes(inventory: &Inventory, granted: &[String]) -> Option<Vec<PathBuf>> {
    let is_granted = |gpu: &&GpuFacts| granted.contains(&gpu.uuid);
    let node = |gpu: &GpuFacts| Some(PathBuf::from(format!("/dev/nvidia{}", gpu.minor?)));
    (!inventory.gpus.is_empty()).then(|| inventory.gpus.iter().filter(is_granted).filter_map(node).collect())
}
