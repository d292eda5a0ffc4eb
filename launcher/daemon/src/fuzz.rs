//! Entry points for the fuzz targets in `fuzz/`: the daemon's functions that process external input, without their
//! effects. They exist only with the feature `fuzzing` and are not part of the crate's interface.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use xlaunch_proto::convert::node::Submit;
use xlaunch_proto::v1::{Job, NodeStatus, Restart, StatusReply};

use crate::allowed_variables;
use crate::commands::CommandError;
use crate::files::Description;
use crate::gpus::Inventory;
use crate::journal::lines::{self, State};
use crate::runtime::JobRuntime;
use crate::snapshot;
use crate::state::evaluate::AdmissionRules;
use crate::state::schedule::{GpuSlot, Resources, schedule};
use crate::state::{End, JobResult, Jobs, Record, Submitted, bounded};
use crate::submission::{self, NodeLimits};
use crate::view::{Caller, JobView, NodeView};
use crate::web::{api, metrics};

const NODE_MEMORY_BYTES: u64 = 64 << 30;

/// The node for which jobs are admitted and scheduled.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    pub gpus: u32,
    pub cpu_workers: u32,
    pub allow_commands: bool,
    pub max_grace: Duration,
}

impl Node {
    fn limits(self) -> NodeLimits {
        NodeLimits {
            gpus: self.gpus,
            cores: self.cpu_workers,
            memory: NODE_MEMORY_BYTES,
            memory_per_gpu: NODE_MEMORY_BYTES / u64::from(self.gpus.max(1)),
            max_grace: self.max_grace,
            default_time: None,
            max_time: None,
        }
    }
}

/// Resolves and admits a submission as the manager does. Returns the job for the journal and for its directory.
pub fn submit(
    history: &History,
    caller: &Caller,
    mut submission: Submit,
    node: Node,
) -> Result<(Submitted, Description), CommandError> {
    let request = &mut submission.request;
    let after = &mut request.scheduling.get_or_insert_default().after;
    history.jobs.look_up_dependencies(caller, after)?;
    let count = request.array_indices.len().max(1);
    let (mut submitted, mut description) = submission::resolve(submission, caller.uid, &node.limits())?;
    let rules = AdmissionRules {
        allow_commands: node.allow_commands,
        allow_root: false,
        how_to_change: "in daemon.toml",
        max_per_user: 100,
        only_user: None,
        gpus: node.gpus,
        cpu_workers: node.cpu_workers,
        cores: node.cpu_workers,
        memory: NODE_MEMORY_BYTES,
        memory_per_user: None,
        memory_per_gpu: 0,
    };
    history.jobs.admit(caller, &submitted, count, &rules)?;
    if !rules.allow_commands {
        allowed_variables::restrict(&mut description.environment);
    }
    let job = history.jobs.submitted.saturating_add(1);
    (submitted.job, description.job) = (job, job);
    Ok((submitted, description))
}

/// Records of a journal, and the jobs that they describe.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    records: Vec<Record>,
    jobs: Jobs,
}

impl History {
    /// Parses and applies a journal. `None` if this version refuses to read it.
    pub fn parse(journal: &[u8]) -> Option<Self> {
        Some(Self::of(lines::parse(journal).ok()?.records))
    }

    fn of(records: Vec<Record>) -> Self {
        let mut jobs = Jobs::default();
        records.iter().cloned().for_each(|record| jobs.apply(record));
        Self { records, jobs }
    }

    /// Adds a submitted job.
    pub fn add(&mut self, submitted: Submitted) {
        let record = Record::Submitted(Box::new(submitted));
        self.records.push(record.clone());
        self.jobs.apply(record);
    }

    /// Returns a journal with these records.
    pub fn encode(&self) -> Vec<u8> {
        let lines = lines::encode(&self.records).unwrap_or_default();
        lines::with_header(&lines).unwrap_or_default()
    }

    /// Returns the history after a compaction of the journal.
    pub fn compacted(&self) -> Self {
        Self::of(self.jobs.records())
    }

    pub fn has_same_jobs(&self, other: &Self) -> bool {
        self.jobs == other.jobs
    }

    /// Returns the ids of jobs that start on a node, and of jobs that wait.
    pub fn schedule(&self, node: Node) -> (Vec<u64>, Vec<u64>) {
        let slot = |index: u32| GpuSlot { uuid: format!("GPU-{index}"), unusable: None };
        let resources = Resources {
            gpus: (0..node.gpus).map(slot).collect(),
            cores: node.cpu_workers,
            memory: NODE_MEMORY_BYTES,
            cpu_workers: node.cpu_workers,
            ..Resources::default()
        };
        let schedule = schedule(&self.jobs, &resources, 0);
        (schedule.starts.into_iter().map(|(job, _)| job).collect(), schedule.waits.into_keys().collect())
    }

    /// Returns the ids of queued jobs in starting order, and of jobs that are forgotten if `keep` ended jobs are kept.
    pub fn queued_and_forgotten(&self, keep: usize) -> (Vec<u64>, Vec<u64>) {
        (self.jobs.queue(0), self.jobs.ended_beyond(keep, |_| false))
    }

    /// Returns the messages about all jobs and about the node.
    pub fn messages(&self) -> (Vec<Job>, NodeStatus) {
        let message = |entry| snapshot::job(&self.jobs, entry, None, 0, None, 0);
        let node = snapshot::node(&NodeStatus::default(), &self.jobs, &Inventory::default(), &[]);
        (self.jobs.jobs.values().map(message).collect(), node)
    }

    /// Returns the view of a started job after these reports of its agent, and the restarts that are logged.
    pub fn view(
        &mut self,
        submitted: Submitted,
        statuses: Vec<StatusReply>,
        result: Option<JobResult>,
    ) -> (JobView, Vec<Restart>) {
        let job = submitted.job;
        self.add(submitted);
        let mut records =
            vec![Record::Starting { job, start: 1, gpus: Vec::new(), boot: String::new(), at: 1 }];
        if let Some(JobResult { exit, reason, report, .. }) = result {
            let (reason, report) = (bounded(reason), bounded(report));
            records.push(Record::Ended {
                job,
                end: End::Failed,
                exit: Some(exit),
                reason,
                report,
                at: 2,
                order: 0,
                usage: None,
            });
        }
        for record in records {
            self.records.push(record.clone());
            self.jobs.apply(record);
        }
        let mut runtime = JobRuntime::new(true);
        let restarts = statuses.into_iter().flat_map(|status| runtime.update(status)).collect();
        let message = snapshot::job(&self.jobs, &self.jobs.jobs[&job], Some(&runtime), 0, None, 0);
        let view = snapshot::view(message, Some(&runtime), None, PathBuf::new(), PathBuf::new(), false);
        (JobView::clone(&view), restarts)
    }
}

/// Returns the journal after the repair that it needs; `None` if this version refuses to read it.
pub fn repaired(journal: &[u8]) -> Option<Vec<u8>> {
    Some(match lines::parse::<Record>(journal).ok()?.state {
        State::New => lines::with_header(&[]).ok()?,
        State::Damaged { .. } => lines::with_header(&lines::valid_records(journal)).ok()?,
        State::Torn { end } => journal[..end].to_vec(),
        State::Intact => journal.to_vec(),
    })
}

/// Returns whether a journal needs no repair.
pub fn is_intact(journal: &[u8]) -> bool {
    lines::parse::<Record>(journal).is_ok_and(|parsed| parsed.state == State::Intact)
}

/// Returns a journal line with this JSON.
pub fn seal(json: &[u8]) -> Vec<u8> {
    [lines::checksum(json).as_bytes(), json, b"\n"].concat()
}

/// Returns a job as the page shows it, and the response to a scrape of the metrics.
pub fn page_and_metrics(view: &JobView) -> (Value, String) {
    let now = 3;
    let jobs = BTreeMap::from([(view.job.id, Arc::new(view.clone()))]);
    let node = NodeView { jobs, ..NodeView::default() };
    (
        api::job(view, now),
        metrics::text(Arc::new(node), now, metrics::Format::OpenMetrics).unwrap_or_default(),
    )
}
