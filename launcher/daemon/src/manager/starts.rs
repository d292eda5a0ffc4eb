//! Starts jobs, and the tasks that follow them.

use std::path::PathBuf;
use std::time::Duration;

use super::{Manager, resources};
use crate::agents::facts::Facts;
use crate::agents::follow::Follower;
use crate::agents::start::JobStart;
use crate::boot_id;
use crate::files::StartOptions;
use crate::gpus::{GpuFacts, Inventory};
use crate::runtime::{JobRuntime, Stop};
use crate::state::schedule::{Schedule, schedule};
use crate::state::{Entry, Phase, Record};

impl Manager {
    /// Starts the queued jobs that can start, unless the daemon shuts down.
    pub(super) fn start_jobs(&mut self) {
        if *self.setup.shutdown.borrow() {
            // The node may be shutting down too, or the service in which agents would run.
            return;
        }
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
    pub(super) fn follow(&mut self, job: u64, fresh: bool) {
        let Some(entry) = self.jobs.jobs.get(&job) else { return };
        let Entry { submitted, phase: Phase::Active { start, gpus, at, cancelled, over_limit, .. } } = entry
        else {
            return;
        };
        let config = self.setup.config.borrow();
        let max_grace = config.jobs.max_grace.0;
        let options = StartOptions {
            gpus: gpus.clone(),
            requeued: submitted.requeues > 0,
            element: submitted.array,
            only_training: !config.jobs.allow_commands(resources::is_root()),
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
            gpu_nodes: gpu_nodes(&self.setup.gpus.borrow(), gpus),
            shutdown_timeout: Duration::try_from_secs_f64(submitted.shutdown_timeout)
                .map_or(max_grace, |timeout| timeout.min(max_grace)),
            facts: Facts::of(entry),
            cpus: submitted.scheduling.cpus,
            memory: submitted.scheduling.memory_bytes,
            max_tasks: config.jobs.max_tasks.unwrap_or_else(resources::default_max_tasks),
        };
        drop(config);
        let mut runtime = JobRuntime::new(fresh);
        // Before the follower has found its agent, an adopted job must not look as if it had not started.
        runtime.runs = !fresh && self.setup.dirs.has_begun(job, *start);
        let is_stopping = cancelled.is_some() || over_limit.is_some();
        runtime.stop.send_replace(if is_stopping { Stop::Ask } else { Stop::No });
        let follower = Follower {
            job_start,
            dirs: self.setup.dirs.clone(),
            starter: self.setup.starter.clone(),
            config: self.setup.config.clone(),
            events: self.events.clone(),
            stop: runtime.stop.subscribe(),
            warning: runtime.warning.subscribe(),
        };
        tokio::spawn(follower.follow(fresh));
        self.runtime.insert(job, runtime);
    }
}

/// Returns the device nodes of these GPUs; `None` on a node without GPUs.
fn gpu_nodes(inventory: &Inventory, granted: &[String]) -> Option<Vec<PathBuf>> {
    let is_granted = |gpu: &&GpuFacts| granted.contains(&gpu.status.uuid);
    let node = |gpu: &GpuFacts| Some(PathBuf::from(format!("/dev/nvidia{}", gpu.minor?)));
    (!inventory.gpus.is_empty()).then(|| inventory.gpus.iter().filter(is_granted).filter_map(node).collect())
}
