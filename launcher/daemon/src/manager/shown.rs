//! What callers see: made anew where something has changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use xlaunch_proto::v1::{Job, NodeStatus};

use super::Manager;
use crate::orders::Refused;
use crate::show;
use crate::view::has_ended;
use xlaunch_agent::registry::SOCKET;

impl Manager {
    pub(super) fn node(&self) -> NodeStatus {
        show::node(&self.base, &self.jobs, &self.gpus.borrow(), &self.config.borrow().leave_gpus)
    }

    /// A job as it is now.
    pub(super) fn now(&mut self, job: u64) -> Result<Job, Refused> {
        let position = self.jobs.queue().into_iter().zip(1..).find(|(queued, _)| *queued == job);
        self.job(job, position.map_or(0, |(_, position)| position))
    }

    /// The same, where its position in the queue is known; 0 for a job that is not in it.
    fn job(&mut self, job: u64, position: u32) -> Result<Job, Refused> {
        let entry = self.jobs.jobs.get(&job).ok_or(Refused::NoJob(job))?;
        let waits = self.waits.get(&job).map_or("", String::as_str);
        Ok(show::job(entry, self.live.get(&job), &self.users.name(entry.submitted.uid), position, waits))
    }

    /// Replaces what callers see, where something has changed.
    pub(super) fn show(&mut self) {
        let node = self.node();
        if self.changed.is_empty() && node == self.shown.node {
            return;
        }
        self.shown.node = node;
        let queue: BTreeMap<u64, u32> = self.jobs.queue().into_iter().zip(1..).collect();
        // Whoever leaves the queue moves those behind.
        let moved = queue.iter().filter(|(job, position)| self.positions.get(job) != Some(position));
        self.changed.extend(moved.map(|(job, _)| *job));
        self.positions = queue;
        for job in std::mem::take(&mut self.changed) {
            match self.job(job, self.positions.get(&job).copied().unwrap_or(0)) {
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
