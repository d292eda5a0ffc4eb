//! The task that owns the jobs of a node.
//!
//! Whatever happens (an order, news of an agent, another GPU) becomes records: written to the journal, applied to [`Jobs`],
//! then acted upon. Jobs that can start are started behind each. What callers see is replaced when something has changed.
//!
//! An order that cannot be written down is refused, and no job is started then; that a job has ended is true all the same,
//! and is written down as soon as the disk takes it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tracing::{info, warn};
use xlaunch_proto::v1::{Job, NodeStatus};

use super::agents::Starter;
use super::agents::follow::{Followed, News, follow};
use super::config::JobsSection;
use super::files::{Description, JobDirs, JobResult};
use super::gpus::Inventory;
use super::journal::Journal;
use super::live::{Live, unix_ms};
use super::orders::{Order, Refused, Submission};
use super::state::orders::Rules;
use super::state::schedule::{Room, Schedule, Slot, schedule};
use super::state::{End, Entry, Jobs, Phase, Record};
use super::users::{self, Users};
use super::view::{Caller, NodeView, has_ended};
use super::{boot_id, show, submission};
use crate::registry::SOCKET;

/// News that may wait for this task.
const QUEUE: usize = 1024;
/// Between signs of life, and attempts to write what could not be written.
const TICK: Duration = Duration::from_secs(5);
/// Bytes of a journal that is worth shortening.
const LONG: u64 = 4 << 20;

/// What the task works with.
#[derive(Debug)]
#[expect(missing_docs, reason = "documented where they are defined")]
pub struct Setup {
    pub journal: Journal<Record>,
    /// As the journal's records say.
    pub jobs: Jobs,
    pub dirs: JobDirs,
    pub starter: Starter,
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
    loop {
        manager.start_jobs();
        manager.show();
        tokio::select! {
            order = orders.recv() => match order {
                Some(order) => manager.order(order),
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
    }
}

struct Manager {
    journal: Journal<Record>,
    jobs: Jobs,
    dirs: JobDirs,
    starter: Arc<Starter>,
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
}

impl Manager {
    fn new(setup: Setup, news: mpsc::Sender<(u64, News)>, view: watch::Sender<Arc<NodeView>>) -> Self {
        let Setup { journal, jobs, dirs, starter, gpus, config, cores, node } = setup;
        Self {
            changed: jobs.jobs.keys().copied().collect(),
            journal,
            jobs,
            dirs,
            starter: Arc::new(starter),
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

    fn order(&mut self, order: Order) {
        match order {
            // A caller that is gone needs no answer; here and below.
            Order::Submit { caller, submission, answer } => {
                let _ = answer.send(self.submit(caller, *submission));
            }
            Order::Cancel { caller, job, answer } => drop(answer.send(self.cancel(caller, job))),
            Order::Drain { caller, gpus, undo, reason, answer } => {
                let _ = answer.send(self.drain(caller, &gpus, undo, &reason));
            }
        }
    }

    fn submit(&mut self, caller: Caller, submission: Submission) -> Result<(Job, bool), Refused> {
        if let Some(job) = self.jobs.of_request(caller.uid, &submission.request_id) {
            return Ok((self.job(job)?, true));
        }
        let present = u32::try_from(self.gpus.borrow().gpus.len()).unwrap_or(u32::MAX);
        let (mut submitted, mut description) = submission::understand(submission, caller.uid, present)?;
        self.jobs.admit(caller, &submitted, &self.rules())?;
        let job = self.jobs.submitted + 1;
        (submitted.job, submitted.at, description.job) = (job, unix_ms(), job);
        self.create(&description, caller.uid)?;
        self.write(Record::Submitted(Box::new(submitted)))?;
        Ok((self.job(job)?, false))
    }

    fn create(&self, description: &Description, uid: u32) -> Result<(), Refused> {
        let created = tokio::task::block_in_place(|| self.dirs.create(description, uid, users::gid(uid)));
        created.map_err(|error| Refused::Broken(format!("the job's directory cannot be made: {error}")))
    }

    fn cancel(&mut self, caller: Caller, job: u64) -> Result<Job, Refused> {
        if let Some(record) = self.jobs.cancel(caller, job, unix_ms())? {
            self.write(record)?;
            info!(job, uid = caller.uid, "job {job} is cancelled by user {}", caller.uid);
            if let Some(live) = self.live.get(&job) {
                live.stop.send_replace(true);
            }
        }
        self.job(job)
    }

    fn drain(
        &mut self,
        caller: Caller,
        gpus: &[String],
        undo: bool,
        reason: &str,
    ) -> Result<NodeStatus, Refused> {
        let known: Vec<_> = self.gpus.borrow().gpus.iter().map(|gpu| (gpu.index, gpu.uuid.clone())).collect();
        self.write(Jobs::drained(caller, gpus, undo, reason, &known, unix_ms())?)?;
        info!(uid = caller.uid, undo, "drained: {reason}");
        Ok(self.node())
    }

    fn news(&mut self, job: u64, news: News) {
        self.changed.insert(job);
        match news {
            News::Runs => {
                info!(job, "job {job} runs");
                self.live.entry(job).or_insert_with(Live::new).runs = true;
            }
            News::Status(status) => self.live.entry(job).or_insert_with(Live::new).says(*status),
            News::Ended(result) => self.ended(job, result),
            News::Lost(reason) => self.lost(job, &reason),
            News::NotStarted(reason) => self.not_started(job, reason),
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
        let JobResult { exit, reason, report, .. } = result;
        self.end(Record::Ended { job, end, exit: Some(exit), reason, report, at: unix_ms() });
    }

    /// Takes what the agent of a job that has ended has said last.
    fn recall(&mut self, job: u64) {
        let Some(Entry { submitted, .. }) = self.jobs.jobs.get(&job) else { return };
        let Some(status) = self.dirs.last_status(job, submitted.uid) else { return };
        match self.live.get_mut(&job) {
            Some(live) => live.says(status),
            None => drop(self.live.insert(job, Live::ended(status))),
        }
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

    /// What has happened has happened, whether it can be written down or not.
    fn end(&mut self, record: Record) {
        if let Record::Ended { job, end, reason, .. } = &record {
            info!(job, ?end, "job {job} has ended: {reason}");
        }
        if self.write(record.clone()).is_err() {
            self.unsaved = true;
            self.apply(record);
        }
        self.forget();
    }

    fn forget(&mut self) {
        let keep = self.config.borrow().keep;
        for job in self.jobs.beyond(keep) {
            if self.write(Record::Forgotten { job }).is_err() {
                return;
            }
            self.live.remove(&job);
            if let Err(error) = tokio::task::block_in_place(|| self.dirs.remove(job)) {
                warn!(job, "failed to remove the directory of job {job}: {error}");
            }
        }
    }

    /// Writes down what is then true.
    fn write(&mut self, record: Record) -> Result<(), Refused> {
        self.save();
        let broken = |error: &dyn std::fmt::Display| {
            Refused::Broken(format!("the daemon cannot write to its journal: {error}"))
        };
        if self.unsaved {
            return Err(broken(&"it is behind what has happened; is the disk full?"));
        }
        if let Err(error) = tokio::task::block_in_place(|| self.journal.append(&record)) {
            warn!("failed to write to the journal: {error}");
            // What it holds now, nobody knows: it is written anew.
            self.unsaved = true;
            self.save();
            return Err(broken(&error));
        }
        self.apply(record);
        Ok(())
    }

    fn apply(&mut self, record: Record) {
        use Record::{Cancelled, Counted, Drained, Ended, Forgotten, Requeued, Starting, Submitted};
        let job = match &record {
            Submitted(submitted) => Some(submitted.job),
            Starting { job, .. }
            | Cancelled { job, .. }
            | Ended { job, .. }
            | Requeued { job, .. }
            | Forgotten { job } => Some(*job),
            Drained { .. } | Counted { .. } => None,
        };
        self.changed.extend(job);
        self.jobs.apply(record);
    }

    /// Brings the journal up to what is true, where it is not, and shortens a long one.
    fn save(&mut self) {
        let records = self.jobs.records();
        let long =
            self.journal.len_bytes() > LONG && self.journal.len_bytes() > 1024 * records.len() as u64 * 4;
        if !self.unsaved && !long {
            return;
        }
        match tokio::task::block_in_place(|| self.journal.rewrite(&records)) {
            Ok(()) => self.unsaved = false,
            Err(error) => {
                self.unsaved = true;
                warn!("failed to write the journal: {error}");
            }
        }
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
        let live = Live::new();
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
        let slot = |gpu: &super::gpus::GpuFacts| Slot {
            uuid: gpu.uuid.clone(),
            unusable: show::unusable(gpu, &config.leave_gpus).map(|(_, reason)| reason),
        };
        Room {
            gpus: self.gpus.borrow().gpus.iter().map(slot).collect(),
            cpu_workers: config.cpu_workers.unwrap_or(self.cores),
            gpus_per_user: config.max_gpus_per_user,
        }
    }

    fn rules(&self) -> Rules {
        let config = self.config.borrow();
        let own = rustix::process::getuid();
        let named = |gpu: &super::gpus::GpuFacts| {
            config.leave_gpus.iter().any(|named| *named == gpu.uuid || *named == gpu.index.to_string())
        };
        let gpus = self.gpus.borrow().gpus.iter().filter(|gpu| !named(gpu)).count();
        let gpus = u32::try_from(gpus).unwrap_or(u32::MAX);
        Rules {
            allow_commands: config.allow_commands.unwrap_or(!own.is_root()),
            allow_root: config.allow_root,
            max_per_user: config.max_per_user,
            only_user: (!own.is_root()).then(|| own.as_raw()),
            gpus: if config.max_gpus_per_user > 0 { gpus.min(config.max_gpus_per_user) } else { gpus },
            cpu_workers: config.cpu_workers.unwrap_or(self.cores),
        }
    }

    fn node(&self) -> NodeStatus {
        show::node(&self.base, &self.jobs, &self.gpus.borrow(), &self.config.borrow().leave_gpus)
    }

    /// A job as callers see it.
    fn job(&mut self, job: u64) -> Result<Job, Refused> {
        let entry = self.jobs.jobs.get(&job).ok_or(Refused::NoJob(job))?;
        let position = self.jobs.queue().iter().position(|queued| *queued == job).map_or(0, |at| at + 1);
        let position = u32::try_from(position).unwrap_or(u32::MAX);
        let waits = self.waits.get(&job).map_or("", String::as_str);
        Ok(show::job(entry, self.live.get(&job), &self.users.name(entry.submitted.uid), position, waits))
    }

    /// Replaces what callers see, where something has changed.
    fn show(&mut self) {
        let node = self.node();
        if self.changed.is_empty() && node == self.shown.node {
            return;
        }
        self.shown.node = node;
        // Whoever leaves the queue moves all others.
        self.changed.extend(self.jobs.queue());
        for job in std::mem::take(&mut self.changed) {
            match self.job(job) {
                Ok(shown) => {
                    if has_ended(shown.state())
                        && let Some(live) = self.live.get_mut(&job)
                    {
                        live.runs = false;
                    }
                    let (socket, logs) = (self.dirs.agent(job).join(SOCKET), self.dirs.logs(job));
                    let view = show::view(shown, self.live.get(&job), socket, logs);
                    self.shown.jobs.insert(job, view);
                }
                Err(_) => drop(self.shown.jobs.remove(&job)),
            }
        }
        self.view.send_replace(Arc::new(self.shown.clone()));
    }
}
