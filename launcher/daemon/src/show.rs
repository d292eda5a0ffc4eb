//! From the journal's jobs and what is known beside it to what callers are shown. Pure.

use std::path::PathBuf;
use std::sync::Arc;

use xlaunch_proto::v1::{Gpu, GpuState, Job, JobKind, NodeJobState, NodeStatus};

use super::gpus::{GpuFacts, Inventory};
use super::live::Live;
use super::state::{End, Entry, Jobs, Phase};
use super::view::JobView;

/// A job as it is shown. `position` and `waits` are of one in the queue.
pub(super) fn job(entry: &Entry, live: Option<&Live>, user: &str, position: u32, waits: &str) -> Job {
    let submitted = &entry.submitted;
    let kind = if submitted.trainer { JobKind::Trainer } else { JobKind::Command };
    let mut job = Job {
        id: submitted.job,
        name: submitted.name.clone(),
        uid: submitted.uid,
        user: user.into(),
        kind: kind.into(),
        priority: submitted.priority,
        gpus_wanted: submitted.gpus,
        command_line: submitted.command_line.clone(),
        work_dir: submitted.work_dir.clone(),
        submitted_unix_ms: submitted.at,
        queue_position: position,
        ..Job::default()
    };
    match &entry.phase {
        Phase::Queued { reason, .. } => {
            job.set_state(NodeJobState::Queued);
            job.reason = if waits.is_empty() { reason.clone() } else { waits.into() };
        }
        Phase::Active { gpus, at, cancelled, .. } => {
            let runs = live.is_some_and(|live| live.runs);
            job.set_state(match (cancelled, runs) {
                (Some(_), _) => NodeJobState::Stopping,
                (None, true) => NodeJobState::Running,
                (None, false) => NodeJobState::Starting,
            });
            job.reason = cancelled.map_or(String::new(), |uid| format!("cancelled by user {uid}"));
            (job.gpus, job.started_unix_ms) = (gpus.clone(), *at);
        }
        Phase::Ended { end, exit, reason, report, gpus, started, at } => {
            job.set_state((*end).into());
            (job.reason, job.report) = (reason.clone(), report.clone());
            (job.gpus, job.exit_code) = (gpus.clone(), exit.map(u32::from));
            (job.started_unix_ms, job.ended_unix_ms) = (*started, *at);
        }
    }
    job
}

impl From<End> for NodeJobState {
    fn from(end: End) -> Self {
        match end {
            End::Done => Self::Done,
            End::Failed => Self::Failed,
            End::Cancelled => Self::Cancelled,
            End::Lost => Self::Lost,
        }
    }
}

/// The same with what is known beside.
pub(super) fn view(job: Job, live: Option<&Live>, socket: PathBuf, logs: PathBuf) -> Arc<JobView> {
    Arc::new(JobView {
        job,
        status: live.and_then(|live| live.status.clone()),
        history: live.map(|live| live.history.clone()).unwrap_or_default(),
        socket,
        logs,
    })
}

/// Why no job is placed on a GPU that no job holds, whatever administrators say.
pub(super) fn unusable(gpu: &GpuFacts, left: &[String]) -> Option<(GpuState, String)> {
    if let Some(sick) = &gpu.sick {
        return Some((GpuState::Sick, sick.clone()));
    }
    if gpu.is_among(left) {
        return Some((GpuState::Drained, "left to others by jobs.leave_gpus".into()));
    }
    match gpu.processes {
        0 => None,
        1 => Some((GpuState::Foreign, "a process that is none of the jobs uses it".into())),
        count => Some((GpuState::Foreign, format!("{count} processes that are none of the jobs use it"))),
    }
}

/// The node with its GPUs; `base` says what does not change.
pub(super) fn node(base: &NodeStatus, jobs: &Jobs, inventory: &Inventory, left: &[String]) -> NodeStatus {
    let holder = |uuid: &str| {
        jobs.active().find_map(|(job, entry)| match &entry.phase {
            Phase::Active { gpus, .. } if gpus.iter().any(|gpu| gpu == uuid) => Some(job),
            _ => None,
        })
    };
    let gpu = |facts: &GpuFacts| {
        let mut gpu = Gpu {
            index: facts.index,
            uuid: facts.uuid.clone(),
            name: facts.name.clone(),
            job: holder(&facts.uuid).unwrap_or(0),
            busy_percent: facts.busy_percent,
            memory_used_bytes: facts.memory_used_bytes,
            memory_bytes: facts.memory_bytes,
            power_watts: facts.power_watts,
            temperature_celsius: facts.temperature_celsius,
            ..Gpu::default()
        };
        let (state, reason) = match (gpu.job, jobs.drained_gpus.get(&facts.uuid), unusable(facts, left)) {
            (1.., _, _) => (GpuState::Held, facts.sick.clone().unwrap_or_default()),
            (0, _, Some((GpuState::Sick, reason))) => (GpuState::Sick, reason),
            (0, Some(reason), _) => (GpuState::Drained, reason.clone()),
            (0, None, Some((state, reason))) => (state, reason),
            (0, None, None) => (GpuState::Free, String::new()),
        };
        gpu.set_state(state);
        Gpu { reason, ..gpu }
    };
    let running = u32::try_from(jobs.active().count()).unwrap_or(u32::MAX);
    NodeStatus {
        drained: jobs.drained.clone().unwrap_or_default(),
        gpus: inventory.gpus.iter().map(gpu).collect(),
        jobs_queued: u32::try_from(jobs.queue().len()).unwrap_or(u32::MAX),
        jobs_running: running,
        jobs_ended: jobs.ended,
        gpu_problem: inventory.problem.clone(),
        ..base.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Record;
    use crate::state::tests::submitted;

    #[test]
    fn a_gpu_is_shown_with_what_keeps_jobs_from_it() {
        let gpu = |index: u32| GpuFacts { index, uuid: format!("GPU-{index}"), ..GpuFacts::default() };
        let inventory = Inventory {
            gpus: vec![
                gpu(0),
                GpuFacts { processes: 3, ..gpu(1) },
                GpuFacts { processes: 3, ..gpu(2) },
                GpuFacts { sick: Some("lost".into()), ..gpu(3) },
                gpu(4),
                gpu(5),
            ],
            problem: String::new(),
        };
        let mut jobs = Jobs::default();
        jobs.apply(submitted(9, 1, 1, 0));
        let gpus = vec!["GPU-2".to_string()];
        jobs.apply(Record::Starting { job: 9, start: 1, gpus, boot: String::new(), at: 0 });
        for gpu in ["GPU-3", "GPU-4"] {
            let gpus = vec![gpu.to_string()];
            jobs.apply(Record::Drained { gpus, undo: false, reason: "fan".into(), uid: 0, at: 0 });
        }
        let node = node(&NodeStatus::default(), &jobs, &inventory, &["5".into()]);
        let shown: Vec<_> = node.gpus.iter().map(|gpu| (gpu.state(), gpu.job)).collect();
        use GpuState::{Drained, Foreign, Free, Held, Sick};
        assert_eq!(shown, [(Free, 0), (Foreign, 0), (Held, 9), (Sick, 0), (Drained, 0), (Drained, 0)]);
        assert_eq!((node.gpus[4].reason.as_str(), node.jobs_running), ("fan", 1));
    }
}
