//! The manager: the only task that changes jobs.
//!
//! Each event (a command, an agent's event, a GPU change, a reload) is turned into records, which are written to the
//! journal and applied to [`Jobs`] before the manager acts on them. After each event, the manager starts the jobs that
//! can start, and publishes the view if it has changed.
//!
//! Commands are refused and no jobs are started while the journal cannot be written. Events that have already happened,
//! such as the end of a job, are applied nevertheless, and the journal is rewritten as soon as the disk permits.
//!
//! `execute` runs commands; `starts` and `ends` are about the beginning and the end of a job, `recovery` about the jobs
//! of an earlier daemon, `examination` about checks of GPUs. `records` writes the journal, and `publish` the view.

mod ends;
mod examination;
mod execute;
mod publish;
mod records;
mod recovery;
mod resources;
mod starts;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tracing::{info, warn};
use xlaunch_proto::v1::{NodeStatus, Restart, StatusReply};

use super::accounting::Accounting;
use super::agents::AgentStarter;
use super::agents::follow::AgentEvent;
use super::commands::Command;
use super::config::LiveConfig;
use super::directory_limit;
use super::files::JobDirs;
use super::gpus::{GpuMonitor, Inventory};
use super::ids::Ids;
use super::journal::{Integrity, Journal};
use super::runtime::{JobRuntime, Stop};
use super::state::examination::ExaminationEnd;
use super::state::limits::{Due, due};
use super::state::schedule::Wait;
use super::state::{Jobs, Record};
use super::view::NodeView;
use examination::Running;
use records::AccountingState;
use xlaunch_host::clock;

/// Capacity of the channel of agents' events.
const AGENT_EVENT_CAPACITY: usize = 1024;
/// Interval of watchdog notifications, and of attempts to rewrite a journal that could not be written.
const MANAGER_TICK_INTERVAL: Duration = Duration::from_secs(5);

/// Resources and settings of the manager, acquired before it runs.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) journal: Journal<Record>,
    /// Completeness of the journal.
    pub(crate) integrity: Integrity,
    pub(crate) ids: Ids,
    /// Jobs whose units run, each with its user id.
    pub(crate) units: Vec<(u64, u32)>,
    pub(crate) dirs: JobDirs,
    pub(crate) accounting: Accounting,
    pub(crate) starter: Arc<AgentStarter>,
    /// Directory for the files of GPU examinations.
    pub(crate) doctor_dir: PathBuf,
    pub(crate) gpu_monitor: GpuMonitor,
    pub(crate) gpus: watch::Receiver<Inventory>,
    /// Configuration in effect; a reload replaces it.
    pub(crate) config: watch::Receiver<LiveConfig>,
    /// Tells in messages where `config` is set and how a change is applied: `in FILE, then ...`.
    pub(crate) how_to_configure: String,
    /// The reason why the page is not served, empty if it is; `None` if no page is configured.
    pub(crate) page_problem: Option<watch::Receiver<String>>,
    /// The node's status, with the fields that never change filled in.
    pub(crate) node: NodeStatus,
    /// True once the daemon shuts down.
    pub(crate) shutdown: watch::Receiver<bool>,
}

/// Manages `jobs`, the result of replaying the journal, until all senders of `commands` are dropped. Calls `on_tick`
/// periodically.
pub(crate) async fn run(
    setup: Setup,
    jobs: Jobs,
    mut commands: mpsc::Receiver<Command>,
    view: watch::Sender<Arc<NodeView>>,
    on_tick: impl Fn(&NodeStatus) + Send,
) {
    let (event_sender, mut events) = mpsc::channel(AGENT_EVENT_CAPACITY);
    // There is only one examination at a time.
    let (ending_sender, mut endings) = mpsc::channel(1);
    tokio::spawn(directory_limit::watch(setup.dirs.clone(), view.subscribe(), event_sender.clone()));
    let mut manager = Manager::new(setup, jobs, event_sender, ending_sender, view);
    manager.recover();
    let mut tick = tokio::time::interval(MANAGER_TICK_INTERVAL);
    manager.settle();
    let (mut received, capacity) = (Vec::new(), commands.max_capacity());
    loop {
        let until_next_limit = manager.until_next_limit();
        tokio::select! {
            count = commands.recv_many(&mut received, capacity) => {
                if count == 0 {
                    return;
                }
                manager.execute_all(received.drain(..));
                continue;
            }
            Some((job, event)) = events.recv() => manager.on_agent_event(job, event),
            Some(ending) = endings.recv() => manager.on_examined(ending),
            Ok(()) = manager.setup.gpus.changed() => {}
            Ok(()) = manager.setup.config.changed() => {}
            () = changed(&mut manager.setup.page_problem) => {}
            () = wait(until_next_limit) => {}
            _ = tick.tick() => {
                manager.rewrite_journal_if_needed();
                manager.retry_accounts();
                manager.forget_old_jobs();
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
    setup: Setup,
    jobs: Jobs,
    /// Jobs up to this id are not forgotten. Set if the journal was incomplete when this daemon was started.
    kept_up_to: u64,
    accounting_state: AccountingState,
    /// Jobs that have a line in the accounting file, but had not ended in the journal that this daemon has read.
    accounted: BTreeSet<u64>,
    /// The running examination of GPUs, if any.
    examination: Option<Running>,
    /// Number of GPUs examined since the start, as in [`NodeView::examined`].
    examined: [u64; 3],
    endings: mpsc::Sender<ExaminationEnd>,
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
        jobs: Jobs,
        events: mpsc::Sender<(u64, AgentEvent)>,
        endings: mpsc::Sender<ExaminationEnd>,
        view: watch::Sender<Arc<NodeView>>,
    ) -> Self {
        let accounting_state = AccountingState::of(&jobs);
        Self {
            setup,
            changed: jobs.jobs.keys().copied().collect(),
            jobs,
            kept_up_to: 0,
            accounting_state,
            accounted: BTreeSet::new(),
            examination: None,
            examined: [0; 3],
            endings,
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
                self.jobs.adopted.remove(&job);
                self.runtime.entry(job).or_default().runs = true;
            }
            AgentEvent::Status(status) => self.on_status(job, *status),
            AgentEvent::Oversized(reason) => self.on_oversized(job, reason),
            AgentEvent::Ended(result, usage) => {
                let clock = self.jobs.clock.clone();
                self.on_ended(job, result, usage, &clock);
            }
            AgentEvent::Lost(reason, usage) => self.on_lost(job, &reason, usage),
            AgentEvent::NotStarted(reason) => self.on_not_started(job, reason),
            AgentEvent::NodeFailed(reason) => self.on_node_failed(job, &reason),
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
        let seconds = self.setup.config.borrow().jobs.fair_share_half_life.0.as_secs();
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
}
