//! Publishes the view. Only the messages of changed jobs are rebuilt.

use std::collections::BTreeMap;
use std::sync::Arc;

use xlaunch_proto::v1::{Job, NodeStatus};

use super::Manager;
use crate::commands::CommandError;
use crate::snapshot;
use crate::state::{Entry, Phase};
use crate::view::has_ended;
use xlaunch_agent::registry::SOCKET;
use xlaunch_host::clock;

/// Smaller changes of the difference to the system clock are ignored, because that clock may be adjusted constantly.
const MIN_CLOCK_STEP_MS: u64 = 1000;

impl Manager {
    pub(super) fn node_message(&self) -> NodeStatus {
        let page_problem = self.setup.page_problem.as_ref().map(|problem| problem.borrow().clone());
        NodeStatus {
            page_problem: page_problem.unwrap_or_default(),
            config_problems: self.config_problems(),
            ..snapshot::node(
                &self.setup.node,
                &self.jobs,
                &self.setup.gpus.borrow(),
                &self.setup.config.borrow().jobs.leave_gpus,
            )
        }
    }

    /// Marks all jobs as changed if the system clock was set, because users see times on that clock.
    pub(super) fn follow_system_clock(&mut self) {
        let skew = clock::unix_ms().cast_signed().saturating_sub(self.now().cast_signed());
        if skew.abs_diff(self.skew) >= MIN_CLOCK_STEP_MS {
            self.skew = skew;
            self.changed.extend(self.jobs.jobs.keys());
        }
    }

    pub(super) fn is_queued(&self, job: u64) -> bool {
        self.jobs.jobs.get(&job).is_some_and(|entry| matches!(entry.phase, Phase::Queued { .. }))
    }

    /// Returns the positions of all queued jobs, counted from 1. Sorts the queue, as a command may have just changed
    /// it.
    pub(super) fn queue_positions(&self) -> BTreeMap<u64, u32> {
        self.jobs.queue(self.now()).into_iter().zip(1..).collect()
    }

    pub(super) fn job_message_at(
        &self,
        job: u64,
        positions: &BTreeMap<u64, u32>,
    ) -> Result<Job, CommandError> {
        let entry = self.jobs.jobs.get(&job).ok_or(CommandError::JobNotFound(job))?;
        let (position, wait) = (positions.get(&job).copied().unwrap_or(0), self.waits.get(&job));
        Ok(snapshot::job(&self.jobs, entry, self.runtime.get(&job), position, wait, self.skew))
    }

    /// Replaces the view if it has changed. The queue has been scheduled in the same turn.
    pub(super) fn publish(&mut self) {
        let node = self.node_message();
        if self.changed.is_empty() && node == self.published.node && self.examined == self.published.examined
        {
            return;
        }
        self.published.node = node;
        self.published.examined = self.examined;
        let queued = self.queue.iter().copied().filter(|job| self.is_queued(*job));
        let queue: BTreeMap<_, _> = queued.zip(1..).collect();
        // A job that leaves the queue changes the positions of all jobs behind it.
        let moved = queue.iter().filter(|(job, position)| self.positions.get(job) != Some(position));
        self.changed.extend(moved.map(|(job, _)| *job));
        self.positions = queue;
        for job in std::mem::take(&mut self.changed) {
            match self.job_message_at(job, &self.positions) {
                Ok(message) => {
                    if has_ended(message.state())
                        && let Some(runtime) = self.runtime.get_mut(&job)
                    {
                        runtime.runs = false;
                    }
                    let (socket, logs) = (self.setup.dirs.agent(job).join(SOCKET), self.setup.dirs.logs(job));
                    let waits_for_gpus = self.jobs.jobs.get(&job).is_some_and(Entry::waits_for_gpus);
                    let first = self.waits.get(&job).and_then(|wait| wait.first);
                    let runtime = self.runtime.get(&job);
                    let view = snapshot::view(message, runtime, first, socket, logs, waits_for_gpus);
                    self.published.jobs.insert(job, view);
                }
                Err(_) => drop(self.published.jobs.remove(&job)),
            }
        }
        self.view.send_replace(Arc::new(self.published.clone()));
    }
}
