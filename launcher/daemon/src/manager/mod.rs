//! The task that owns the jobs of a node.
//!
//! Whatever happens (an order, news of an agent, another GPU) becomes records: written to the journal, applied to [`Jobs`],
//! then acted upon. Jobs that can start are started behind each. What callers see is replaced when something has changed.
//!
//! An order that cannot be written down is refused, and no job is started then; that a job has ended is true all the same,
//! and is written down as soon as the disk takes it.

mod orders;
mod records;
mod shown;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tracing::{info, warn};
use xlaunch_proto::v1::{NodeStatus, Restart, StatusReply};

use super::agents::Starter;
use super::agents::follow::{Followed, News, follow};
use super::config::JobsSection;
use super::files::{JobDirs, JobResult};
use super::gpus::{GpuFacts, Inventory, Look};
use super::journal::Journal;
use super::live::Live;
use super::orders::Order;
use super::state::schedule::{Room, Schedule, Slot, schedule};
use super::state::{End, Entry, Jobs, Phase, Record};
use super::users::Users;
use super::view::NodeView;
use super::{boot_id, show};
use xlaunch_agent::clock::unix_ms;

/// News that may wait for this task.
const QUEUE: usize = 1024;
/// Between signs of life, and attempts to write what could not be written.
const TICK: Duration = Duration::from_secs(5);

/// What the task works with.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct Setup {
    pub journal: Journal<Record>,
    /// As the journal's records say.
    pub jobs: Jobs,
    pub dirs: JobDirs,
    pub starter: Starter,
    pub look: Look,
    pub gpus: watch::Receiver<Inventory>,
    /// Changed by a reload.
    pub config: watch::Receiver<JobsSection>,
    pub cores: u32,
    /// What does not change of the node.
    pub node: NodeStatus,
}

/// Looks after the jobs until `orders` end. `alive` is called every few seconds as long as that is so.
pub async fn run(
    setup: Setup,
    mut orders: mpsc::Receiver<Order>,
    view: watch::Sender<Arc<NodeView>>,
    alive: impl Fn(&NodeStatus) + Send,
) {
    let (news, mut heard) = mpsc::channel(QUEUE);
    let mut manager = Manager::new(setup, news, view);
    manager.recover();
    let mut tick = tokio::time::interval(TICK);
    manager.settle();
    loop {
        tokio::select! {
            order = orders.recv() => match order {
                Some(order) => {
                    manager.order(order);
                    continue;
                }
                None => return,
            },
            Some((job, news)) = heard.recv() => manager.news(job, news),
            Ok(()) = manager.gpus.changed() => {}
            Ok(()) = manager.config.changed() => {}
            _ = tick.tick() => {
                manager.save();
                alive(&manager.shown.node);
            }
        }
        manager.settle();
    }
}

struct Manager {
    journal: Journal<Record>,
    jobs: Jobs,
    dirs: JobDirs,
    starter: Arc<Starter>,
    look: Look,
    gpus: watch::Receiver<Inventory>,
    config: watch::Receiver<JobsSection>,
    cores: u32,
    base: NodeStatus,
    news: mpsc::Sender<(u64, News)>,
    /// Jobs that are followed, and jobs that have ended while this daemon ran.
    live: BTreeMap<u64, Live>,
    users: Users,
    /// Something is true that the journal does not say.
    unsaved: bool,
    shown: NodeView,
    view: watch::Sender<Arc<NodeView>>,
    /// Jobs to be shown anew.
    changed: BTreeSet<u64>,
    waits: BTreeMap<u64, String>,
    /// Of jobs in the queue, from 1, as they were shown.
    positions: BTreeMap<u64, u32>,
}

impl Manager {
    fn new(setup: Setup, news: mpsc::Sender<(u64, News)>, view: watch::Sender<Arc<NodeView>>) -> Self {
        let Setup { journal, jobs, dirs, starter, look, gpus, config, cores, node } = setup;
        Self {
            changed: jobs.jobs.keys().copied().collect(),
            journal,
            jobs,
            dirs,
            starter: Arc::new(starter),
            look,
            gpus,
            config,
            cores,
            base: node,
            news,
            live: BTreeMap::new(),
            users: Users::default(),
            unsaved: false,
            shown: NodeView::default(),
            view,
            waits: BTreeMap::new(),
            positions: BTreeMap::new(),
        }
    }

    /// Takes up what an earlier daemon has left.
    fn recover(&mut self) {
        for job in self.dirs.all().into_iter().filter(|job| !self.jobs.jobs.contains_key(job)) {
            // Its submission was never answered, or it was forgotten.
            if let Err(error) = self.dirs.remove(job) {
                warn!(job, "failed to remove the directory of job {job}: {error}");
            }
        }
        let over = |entry: &Entry| matches!(entry.phase, Phase::Ended { .. });
        let over: Vec<_> = self.jobs.jobs.iter().filter(|it| over(it.1)).map(|it| *it.0).collect();
        over.into_iter().for_each(|job| self.recall(job));
        let now = boot_id();
        let active: Vec<_> = self.jobs.active().map(|(job, entry)| (job, entry.clone())).collect();
        for (job, entry) in active {
            let Phase::Active { start, boot, .. } = &entry.phase else { continue };
            if *boot == now {
                info!(job, "job {job} is taken up again");
                self.follow(job, false);
                continue;
            }
            let result = self.dirs.result(job, entry.submitted.uid).filter(|result| result.start == *start);
            match result {
                Some(result) => self.ended(job, result),
                None => self.lost(job, "the system was restarted while it ran"),
            }
        }
    }

    fn news(&mut self, job: u64, news: News) {
        self.changed.insert(job);
        match news {
            News::Runs => {
                info!(job, "job {job} runs");
                self.live.entry(job).or_default().runs = true;
            }
            News::Status(status) => self.says(job, *status),
            News::Ended(result) => self.ended(job, result),
            News::Lost(reason) => self.lost(job, &reason),
            News::NotStarted(reason) => self.not_started(job, reason),
        }
    }

    fn says(&mut self, job: u64, status: StatusReply) {
        for Restart { attempt, rank, cause, .. } in self.live.entry(job).or_default().says(status) {
            warn!(job, attempt, rank, cause, "attempt {attempt} of job {job} has failed; it starts again");
        }
    }

    fn is_cancelled(&self, job: u64) -> bool {
        let phase = self.jobs.jobs.get(&job).map(|entry| &entry.phase);
        matches!(phase, Some(Phase::Active { cancelled: Some(_), .. }))
    }

    fn ended(&mut self, job: u64, result: JobResult) {
        let end = match result.exit {
            0 => End::Done,
            _ if result.stopped => End::Cancelled,
            _ => End::Failed,
        };
        self.recall(job);
        let JobResult { exit, reason, report, rank, attempt, .. } = result;
        if let Some(rank) = rank {
            warn!(job, attempt, rank, "rank {rank} of job {job} has failed in attempt {attempt}");
        }
        self.end(Record::Ended { job, end, exit: Some(exit), reason, report, at: unix_ms() });
    }

    /// Takes what the agent of a job that has ended has said last.
    fn recall(&mut self, job: u64) {
        let Some(Entry { submitted, .. }) = self.jobs.jobs.get(&job) else { return };
        let Some(status) = self.dirs.last_status(job, submitted.uid) else { return };
        self.says(job, status);
    }

    fn lost(&mut self, job: u64, reason: &str) {
        let (reason, report) = (reason.to_owned(), String::new());
        self.end(Record::Ended { job, end: End::Lost, exit: None, reason, report, at: unix_ms() });
    }

    fn not_started(&mut self, job: u64, reason: Option<String>) {
        let at = unix_ms();
        match reason {
            _ if self.is_cancelled(job) => {
                let (reason, report) = ("cancelled before it started".into(), String::new());
                self.end(Record::Ended { job, end: End::Cancelled, exit: None, reason, report, at });
            }
            Some(reason) => {
                let (exit, report) = (None, String::new());
                self.end(Record::Ended { job, end: End::Failed, exit, reason, report, at });
            }
            None => self.end(Record::Requeued { job, reason: "the daemon ended before it started".into() }),
        }
    }

    /// Behind whatever has happened: starts what can start now, and shows what is.
    fn settle(&mut self) {
        self.start_jobs();
        self.show();
    }

    /// Starts what can start now.
    fn start_jobs(&mut self) {
        let Schedule { starts, waits } = schedule(&self.jobs, &self.room());
        self.changed
            .extend(waits.iter().filter(|(job, why)| self.waits.get(job) != Some(why)).map(|it| *it.0));
        self.waits = waits;
        for (job, gpus) in starts {
            let Some(Entry { phase: Phase::Queued { starts, .. }, .. }) = self.jobs.jobs.get(&job) else {
                continue;
            };
            let record = Record::Starting { job, start: starts + 1, gpus, boot: boot_id(), at: unix_ms() };
            if self.write(record).is_err() {
                // The next tick tries again.
                return;
            }
            self.follow(job, true);
        }
    }

    fn follow(&mut self, job: u64, fresh: bool) {
        let Some(Entry { submitted, phase: Phase::Active { start, gpus, cancelled, .. } }) =
            self.jobs.jobs.get(&job)
        else {
            return;
        };
        let followed = Followed {
            job,
            start: *start,
            name: submitted.name.clone(),
            uid: submitted.uid,
            gpus: gpus.clone(),
            patience: submitted.patience,
        };
        let live = Live::new(fresh);
        live.stop.send_replace(cancelled.is_some());
        let stop = live.stop.subscribe();
        tokio::spawn(follow(
            followed,
            fresh,
            self.dirs.clone(),
            self.starter.clone(),
            self.news.clone(),
            stop,
        ));
        self.live.insert(job, live);
    }

    fn room(&self) -> Room {
        let config = self.config.borrow();
        let slot = |gpu: &GpuFacts| Slot {
            uuid: gpu.uuid.clone(),
            unusable: show::unusable(gpu, &config.leave_gpus).map(|(_, reason)| reason),
        };
        Room {
            gpus: self.gpus.borrow().gpus.iter().map(slot).collect(),
            cpu_workers: config.cpu_workers.unwrap_or(self.cores),
            gpus_per_user: config.max_gpus_per_user,
        }
    }
}
