//! Builds the messages of the view from jobs, their runtime state and the GPU inventory. Pure.

use std::path::PathBuf;
use std::sync::Arc;

use xlaunch_proto::v1::{
    Gpu, GpuState, Job, JobKind, JobState, NodeJobState, NodeStatus, RankState, StatusReply,
};

use super::accounting::{seconds, shown};
use super::gpus::{GpuFacts, Inventory};
use super::runtime::JobRuntime;
use super::state::limits::reached_at;
use super::state::schedule::Wait;
use super::state::{End, Entry, Jobs, Phase};
use super::view::JobView;

/// Exit of a worker whose agent was gone before it could report one.
const UNKNOWN_EXIT: &str = "exit unknown";

/// Builds the message for a job. For a queued job, `position` counts from 1 and `wait` is the reason why it waits.
/// `skew` is the system clock minus the node's clock, in milliseconds.
pub(super) fn job(
    jobs: &Jobs,
    entry: &Entry,
    runtime: Option<&JobRuntime>,
    position: u32,
    wait: Option<&Wait>,
    skew: i64,
) -> Job {
    let submitted = &entry.submitted;
    let kind = if submitted.trainer { JobKind::Trainer } else { JobKind::Command };
    let mut job = Job {
        id: submitted.job,
        name: submitted.name.clone(),
        uid: submitted.uid,
        user: entry.submitted.user.clone(),
        kind: kind.into(),
        priority: submitted.priority,
        gpus_wanted: submitted.gpus,
        command_line: submitted.command_line.clone(),
        work_dir: submitted.work_dir.clone(),
        submitted_unix_ms: shown(submitted.at, skew),
        queue_position: position,
        held: submitted.held.is_some(),
        scheduling: Some(submitted.scheduling.clone()),
        requeues: submitted.requeues,
        array_job: submitted.array.map(|element| element.first),
        array_index: submitted.array.map(|element| element.index),
        ..Job::default()
    };
    match &entry.phase {
        Phase::Queued { reason, .. } => {
            job.set_state(NodeJobState::Queued);
            job.reason = wait.map_or_else(|| reason.clone(), |wait| wait.reason.clone());
            job.starts_by_unix_ms = shown(wait.and_then(|wait| wait.starts_by).unwrap_or(0), skew);
        }
        Phase::Active { gpus, at, cancelled, over_limit, .. } => {
            let runs = runtime.is_some_and(|runtime| runtime.runs);
            job.set_state(match (cancelled, runs) {
                (Some(_), _) => NodeJobState::Stopping,
                (None, _) if over_limit.is_some() => NodeJobState::Stopping,
                (None, true) => NodeJobState::Running,
                (None, false) => NodeJobState::Starting,
            });
            job.reason = match cancelled {
                _ if over_limit.is_some() => submitted.limit_reached(),
                Some(by) => format!("cancelled by user {}", jobs.user_label(by.uid, &by.user)),
                None => String::new(),
            };
            job.time_limit_unix_ms = shown(reached_at(submitted, *at).unwrap_or(0), skew);
            (job.gpus, job.started_unix_ms) = (gpus.clone(), shown(*at, skew));
        }
        Phase::Ended { end, exit, reason, report, gpus, started, at, .. } => {
            job.set_state((*end).into());
            (job.reason, job.report) = (reason.clone(), report.clone());
            (job.gpus, job.exit_code) = (gpus.clone(), exit.map(u32::from));
            (job.started_unix_ms, job.ended_unix_ms) = (shown(*started, skew), shown(*at, skew));
            let (_, usage) = entry.totals();
            job.cpu_seconds = usage.map(|usage| seconds(usage.cpu_ms));
            job.peak_memory_bytes = usage.and_then(|usage| usage.peak_memory_bytes);
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

/// Builds the view of a job from its message and its runtime state.
pub(super) fn view(
    job: Job,
    runtime: Option<&JobRuntime>,
    first: Option<u64>,
    socket: PathBuf,
    logs: PathBuf,
    waits_for_gpus: bool,
) -> Arc<JobView> {
    let status = runtime.and_then(|runtime| runtime.status.clone());
    Arc::new(JobView {
        status: status.map(|(status, at)| (last_status(job.state(), status), at)),
        job,
        first,
        history: runtime.map(|runtime| runtime.history.clone()).unwrap_or_default(),
        waits_for_gpus,
        socket,
        logs,
    })
}

/// Returns the last status of a job in this state. The status of a killed agent is from a time when its workers still
/// ran, but no worker outlives its agent.
fn last_status(job: NodeJobState, mut status: Arc<StatusReply>) -> Arc<StatusReply> {
    use NodeJobState::{Running, Starting, Stopping};
    if matches!(job, Starting | Running | Stopping) {
        return status;
    }
    let has_ended = matches!(status.state(), JobState::Done | JobState::Failed);
    let is_stale = !has_ended || status.ranks.iter().any(|rank| rank.state() != RankState::Exited);
    if is_stale {
        let status = Arc::make_mut(&mut status);
        if !has_ended {
            status.set_state(if job == NodeJobState::Done { JobState::Done } else { JobState::Failed });
        }
        for rank in status.ranks.iter_mut().filter(|rank| rank.state() != RankState::Exited) {
            rank.set_state(RankState::Exited);
            rank.exit = UNKNOWN_EXIT.into();
            rank.hint.clear();
        }
    }
    status
}

/// Returns the reason why no job may be placed on a GPU, apart from drains by administrators. Valid only for a GPU that
/// no job holds and that is not being examined, because those processes would count as foreign.
pub(super) fn unusable(gpu: &GpuFacts, reserved: &[String]) -> Option<(GpuState, String)> {
    if let Some(sick) = &gpu.sick {
        return Some((GpuState::Sick, sick.clone()));
    }
    if gpu.is_among(reserved) {
        return Some((GpuState::Drained, "reserved by jobs.leave_gpus".into()));
    }
    match gpu.processes {
        0 => None,
        1 => Some((GpuState::Foreign, "used by a process outside any job".into())),
        count => Some((GpuState::Foreign, format!("used by {count} processes outside any job"))),
    }
}

/// Builds the message for the node and its GPUs. `base` has the fields that never change; `reserved` is
/// `jobs.leave_gpus`.
pub(super) fn node(base: &NodeStatus, jobs: &Jobs, inventory: &Inventory, reserved: &[String]) -> NodeStatus {
    let gpu = |facts: &GpuFacts| {
        let mut gpu = facts.status.clone();
        gpu.job = jobs.holder(&gpu.uuid).unwrap_or(0);
        let (state, reason) = match (gpu.job, jobs.drained_gpus.get(&gpu.uuid), unusable(facts, reserved)) {
            (1.., _, _) => (GpuState::Held, facts.sick.clone().unwrap_or_default()),
            // The processes of the examination would count as foreign.
            (0, _, _) if jobs.is_examined(&gpu.uuid) => {
                (GpuState::Examined, "`xlaunch doctor` examines it".into())
            }
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
        jobs_queued: u32::try_from(jobs.queued().count()).unwrap_or(u32::MAX),
        jobs_running: running,
        jobs_ended: jobs.ended,
        gpu_problem: inventory.problem.clone(),
        ..base.clone()
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::RankStatus;

    use super::*;
    use crate::state::Record;
    use crate::state::tests::submitted;

    #[test]
    fn stopping_job_names_the_user_who_cancelled_it() {
        let mut jobs = Jobs::default();
        jobs.apply(submitted(9, 1, 0, 0));
        jobs.apply(Record::Starting { job: 9, start: 1, gpus: Vec::new(), boot: String::new(), at: 0 });
        let message = |jobs: &Jobs| job(jobs, &jobs.jobs[&9], None, 0, None, 0);
        assert_eq!(message(&jobs).reason, "");
        jobs.apply(Record::Cancelled { job: 9, uid: 0, user: String::new(), at: 0 });
        assert_eq!(
            (message(&jobs).state(), message(&jobs).reason),
            (NodeJobState::Stopping, "cancelled by user root".into())
        );
    }

    #[test]
    fn job_whose_agent_was_killed_shows_no_running_ranks() {
        let mut runtime = JobRuntime::new(true);
        let rank = |rank, state: RankState, exit: &str| RankStatus {
            rank,
            state: state.into(),
            exit: exit.into(),
            ..RankStatus::default()
        };
        let ranks = vec![rank(0, RankState::Running, ""), rank(1, RankState::Exited, "exit code 3")];
        runtime.update(StatusReply { state: JobState::Running.into(), ranks, ..StatusReply::default() });
        let shown = |state: NodeJobState| {
            let job = Job { state: state.into(), ..Job::default() };
            let view = view(job, Some(&runtime), None, PathBuf::new(), PathBuf::new(), false);
            view.status.as_ref().unwrap().0.clone()
        };
        assert_eq!(shown(NodeJobState::Stopping).ranks[0].state(), RankState::Running);
        let (exited, known) = (RankState::Exited, rank(1, RankState::Exited, "exit code 3"));
        // A lost job may be queued again.
        for state in [NodeJobState::Cancelled, NodeJobState::Queued] {
            let status = shown(state);
            assert_eq!(status.state(), JobState::Failed);
            assert_eq!(status.ranks, [rank(0, exited, UNKNOWN_EXIT), known.clone()]);
        }
    }

    #[test]
    fn gpu_state_names_what_keeps_jobs_off_it() {
        let gpu = |index: u32| GpuFacts {
            status: Gpu { index, uuid: format!("GPU-{index}"), ..Gpu::default() },
            ..GpuFacts::default()
        };
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
