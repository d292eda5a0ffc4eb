//! Resources and rules of the node, from the inventory of GPUs and the configuration in effect.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::GpuState;

use super::Manager;
use crate::config::{MemoryLimit, check};
use crate::gpus::GpuFacts;
use crate::snapshot;
use crate::state::evaluate::AdmissionRules;
use crate::state::schedule::{GpuSlot, Resources, SETTLING_MS};
use crate::state::{Entry, Phase};
use crate::submission::NodeLimits;

/// Default of `jobs.max_memory_per_user` if the daemon runs as root.
const DEFAULT_MEMORY_PER_USER: MemoryLimit = MemoryLimit::Percent(25);

/// Files with the limits of the kernel and, in a container, of its cgroup.
const TASK_LIMIT_FILES: [&str; 3] =
    ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/sys/fs/cgroup/pids.max"];
/// A job gets one part in this many of the node's limit. So it takes four jobs that fork without end to exhaust it, and
/// `xlaunch.slice` keeps even those from the last part.
const JOBS_TO_EXHAUST_NODE: u64 = 4;

impl Manager {
    /// Returns the resources that the scheduler can give to jobs.
    pub(super) fn resources(&self) -> Resources {
        let config = &self.setup.config.borrow().jobs;
        let (memory_per_user, memory_per_gpu) = self.memory_limits();
        let held: BTreeSet<&str> = self.jobs.active().flat_map(|(_, entry)| entry.gpus()).collect();
        let slot = |gpu: &GpuFacts| {
            let unusable = snapshot::unusable(gpu, &config.leave_gpus);
            // The poll counts processes of jobs and examinations as foreign too.
            let is_ours = held.contains(gpu.status.uuid.as_str()) || self.jobs.is_examined(&gpu.status.uuid);
            let unusable = unusable.filter(|(state, _)| *state != GpuState::Foreign || !is_ours);
            GpuSlot { uuid: gpu.status.uuid.clone(), unusable: unusable.map(|(_, reason)| reason) }
        };
        Resources {
            gpus: self.setup.gpus.borrow().gpus.iter().map(slot).collect(),
            settling: self.settling_gpus(),
            cores: self.setup.node.cores,
            memory: self.setup.node.memory_bytes,
            cpu_workers: config.cpu_workers.unwrap_or(self.setup.node.cores),
            gpus_per_user: config.max_gpus_per_user,
            memory_per_user,
            memory_per_gpu,
            only_training: !config.allow_commands(is_root()),
            no_root: !config.allow_root,
        }
    }

    /// Returns the GPUs on which the last poll may still have seen the processes of a job that has just ended.
    fn settling_gpus(&self) -> BTreeSet<String> {
        let (inventory, config) = (self.setup.gpus.borrow(), self.setup.config.borrow());
        let is_foreign = |gpu: &&GpuFacts| {
            let unusable = snapshot::unusable(gpu, &config.jobs.leave_gpus);
            unusable.is_some_and(|(state, _)| state == GpuState::Foreign)
        };
        let is_settling = |at: Instant| at.elapsed() < Duration::from_millis(SETTLING_MS);
        let recent = self.runtime.iter().filter(|(_, runtime)| runtime.ended.is_some_and(is_settling));
        let recent: Vec<_> = recent.filter_map(|(job, _)| self.jobs.jobs.get(job)).collect();
        let is_recent = |uuid: &String| {
            let held =
                |entry: &&Entry| matches!(&entry.phase, Phase::Ended { gpus, .. } if gpus.contains(uuid));
            recent.iter().any(held)
        };
        let foreign = inventory.gpus.iter().filter(is_foreign).map(|gpu| gpu.status.uuid.clone());
        foreign.filter(is_recent).collect()
    }

    /// Returns, in bytes, the limit on a user's memory in addition to the shares of GPUs, and the share of a GPU. The
    /// shares leave room for one user's limit, so that no user can make GPUs unusable by taking memory.
    fn memory_limits(&self) -> (Option<u64>, u64) {
        let default = is_root().then_some(DEFAULT_MEMORY_PER_USER);
        let memory = self.setup.node.memory_bytes;
        let limit =
            self.setup.config.borrow().jobs.max_memory_per_user.or(default).map(|limit| limit.of(memory));
        let shares = memory.saturating_sub(limit.unwrap_or(0)).max(memory / 2);
        (limit, shares / (self.setup.gpus.borrow().gpus.len() as u64).max(1))
    }

    /// Returns the problems of the configuration, for the operator.
    pub(super) fn config_problems(&self) -> Vec<String> {
        let config = self.setup.config.borrow();
        let reload = config.reload_problem.iter().map(|problem| {
            format!(
                "the last reload has failed, and the previous configuration is still in effect: {problem}"
            )
        });
        reload.chain(check::unknown_gpus(&config.jobs, &self.setup.gpus.borrow())).collect()
    }

    /// Returns the rules by which jobs are accepted.
    pub(super) fn admission_rules(&self) -> AdmissionRules<'_> {
        let config = &self.setup.config.borrow().jobs;
        let (memory_per_user, memory_per_gpu) = self.memory_limits();
        let own = rustix::process::getuid();
        let gpus =
            self.setup.gpus.borrow().gpus.iter().filter(|gpu| !gpu.is_among(&config.leave_gpus)).count();
        let gpus = u32::try_from(gpus).unwrap_or(u32::MAX);
        AdmissionRules {
            allow_commands: config.allow_commands(own.is_root()),
            allow_root: config.allow_root,
            how_to_change: &self.setup.how_to_configure,
            max_per_user: config.max_per_user,
            only_user: (!own.is_root()).then(|| own.as_raw()),
            gpus: if config.max_gpus_per_user > 0 { gpus.min(config.max_gpus_per_user) } else { gpus },
            cpu_workers: config.cpu_workers.unwrap_or(self.setup.node.cores),
            cores: self.setup.node.cores,
            memory: self.setup.node.memory_bytes,
            memory_per_user,
            memory_per_gpu,
        }
    }

    /// Returns the limits by which a submission is resolved.
    pub(super) fn node_limits(&self) -> NodeLimits {
        let config = &self.setup.config.borrow().jobs;
        NodeLimits {
            gpus: u32::try_from(self.setup.gpus.borrow().gpus.len()).unwrap_or(u32::MAX),
            cores: self.setup.node.cores,
            memory: self.setup.node.memory_bytes,
            memory_per_gpu: self.memory_limits().1,
            max_grace: config.max_grace.0,
            default_time: config.default_time.map(|span| span.0),
            max_time: config.max_time.map(|span| span.0),
        }
    }
}

/// Returns the default of `jobs.max_tasks`; no limit if the node's limit is unknown.
pub(super) fn default_max_tasks() -> u64 {
    task_limit(TASK_LIMIT_FILES.iter().filter_map(|path| fs_err::read_to_string(path).ok()))
}

fn task_limit(texts: impl Iterator<Item = String>) -> u64 {
    // `max` in a cgroup means no limit.
    let node = texts.filter_map(|text| text.trim().parse::<u64>().ok()).min();
    node.map_or(u64::MAX, |node| node / JOBS_TO_EXHAUST_NODE)
}

/// Returns whether the daemon runs as root, so that it serves other users than its own.
pub(super) fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_gets_a_part_of_the_smallest_limit() {
        let limit = |texts: &[&str]| task_limit(texts.iter().map(|text| (*text).to_owned()));
        assert_eq!(limit(&["32768\n", "188000\n", "max\n"]), 8192);
        assert_eq!(limit(&["4194304", "188000", "2000"]), 500);
        assert_eq!(limit(&["max"]), u64::MAX);
        assert!(default_max_tasks() < u64::MAX);
    }
}
