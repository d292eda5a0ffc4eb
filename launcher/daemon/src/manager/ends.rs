//! How jobs end: what their agents report becomes an end and its reason in the journal.

use tracing::warn;

use super::Manager;
use crate::agents::facts::Facts;
use crate::agents::hooks::Moment;
use crate::runtime::Stop;
use crate::state::clock::NodeClock;
use crate::state::{End, Entry, JobResult, Phase, Record, Usage, bounded};

impl Manager {
    /// Records the end of a job whose agent has left a result. `clock` is that of the boot in which the job ran.
    pub(super) fn on_ended(&mut self, job: u64, result: JobResult, usage: Option<Usage>, clock: &NodeClock) {
        self.load_last_status(job);
        if let JobResult { rank: Some(rank), attempt, .. } = result {
            warn!(job, attempt, rank, "rank {rank} of job {job} has failed in attempt {attempt}");
        }
        let at = self.jobs.end_time(job, clock, result.uptime_ms, self.now());
        let record = self.jobs.outcome(job, result, usage, at);
        if let Record::Requeued { reason, .. } = &record {
            warn!(job, "job {job} goes back to the queue: {reason}");
        }
        self.record_event(record);
    }

    /// Kills a job whose directory exceeds the limit, or removes the directory if the job does not run.
    pub(super) fn on_oversized(&mut self, job: u64, reason: String) {
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
        if let Err(error) = tokio::task::block_in_place(|| self.setup.dirs.remove(job)) {
            warn!(job, "failed to remove the directory of job {job}: {error}");
        }
    }

    /// Loads the last status that the agent of an ended job has written to its directory.
    pub(super) fn load_last_status(&mut self, job: u64) {
        let Some(Entry { submitted, .. }) = self.jobs.jobs.get(&job) else { return };
        let Some(status) = self.setup.dirs.last_status(job, submitted.uid) else { return };
        self.on_status(job, status);
    }

    pub(super) fn on_lost(&mut self, job: u64, reason: &str, usage: Option<Usage>) {
        let is_killed = self.runtime.get(&job).is_some_and(|runtime| *runtime.stop.borrow() == Stop::Kill);
        if let Some(record) = self.jobs.requeue(job, reason, self.now(), usage).filter(|_| !is_killed) {
            warn!(job, "job {job} is lost and goes back to the queue: {reason}");
            return self.record_event(record);
        }
        let killed_for = self.runtime.get(&job).and_then(|runtime| runtime.killed_for.clone());
        let (end, reason) = match (is_killed, killed_for.or_else(|| self.jobs.limit_reached(job, self.now())))
        {
            (true, Some(reason)) => (End::Failed, reason),
            (true, None) => {
                let by = self.jobs.cancelled_by(job).map_or(String::new(), |user| format!(" of user {user}"));
                (End::Cancelled, format!("killed by `cancel --force`{by}"))
            }
            (false, Some(reason)) => (End::Failed, reason),
            (false, None) => (End::Lost, reason.to_owned()),
        };
        self.record_end(job, end, reason, usage);
    }

    pub(super) fn on_not_started(&mut self, job: u64, reason: Option<String>) {
        let (end, reason) =
            match (self.jobs.cancelled_by(job), reason, self.jobs.limit_reached(job, self.now())) {
                (Some(user), ..) => (End::Cancelled, format!("cancelled by user {user} before it started")),
                (None, Some(reason), _) | (None, None, Some(reason)) => (End::Failed, reason),
                (None, None, None) => {
                    let reason = "the daemon was stopped before it started the job".into();
                    return self.record_event(Record::Requeued {
                        job,
                        reason,
                        lost: false,
                        at: 0,
                        usage: None,
                    });
                }
            };
        self.record_end(job, end, reason, None);
    }

    /// Handles a node that is not ready for jobs: its prolog failed, or its disk is full. The node is drained before
    /// the job returns to the queue: otherwise one job after the other would fail.
    pub(super) fn on_node_failed(&mut self, job: u64, reason: &str) {
        if self.jobs.cancelled_by(job).is_some() || self.jobs.limit_reached(job, self.now()).is_some() {
            return self.on_not_started(job, None);
        }
        let reason = bounded(format!("{reason} (before job {job})"));
        warn!(job, "the node is drained: {reason}");
        if self.jobs.drained.is_none() {
            let (gpus, undo, uid) = (Vec::new(), false, rustix::process::getuid().as_raw());
            self.record_event(Record::Drained { gpus, undo, reason: reason.clone(), uid, at: self.now() });
        }
        // The failure is the node's fault, so it does not count against the job.
        self.record_event(Record::Requeued { job, reason, lost: false, at: 0, usage: None });
    }

    /// Records the end of a job that has left no result.
    pub(super) fn record_end(&mut self, job: u64, end: End, reason: String, usage: Option<Usage>) {
        let (exit, report, at, order) = (None, String::new(), self.now(), 0);
        self.record_event(Record::Ended { job, end, exit, reason, report, at, order, usage });
    }

    /// Cancels queued jobs whose dependencies can no longer be met, and in turn the jobs that depend on those.
    pub(super) fn cancel_unsatisfiable(&mut self) {
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

    /// Runs the hook for the end of a job, in the background.
    pub(super) fn run_end_hook(&self, job: u64) {
        let Some(entry) = self.jobs.jobs.get(&job) else { return };
        let (facts, starter) = (Facts::of(entry), self.setup.starter.clone());
        let hooks = self.setup.config.borrow().hooks.clone();
        tokio::spawn(async move {
            if let Err(problem) = hooks.run(Moment::OnEnd, &facts, &starter).await {
                warn!(job, "job {job}: {problem}");
            }
        });
    }
}
