//! Launches presented as a daemon's jobs, for a host without a daemon. The number of a launch is the process id of its
//! `xlaunch`.

use xlaunch_proto::v1::{Job, JobState, NodeJobState, NodeStatus, StatusReply, StopRequest};

use super::state::Snapshot;
use crate::client::launches;
use xlaunch_agent::registry::{self, Running};
use xlaunch_host::devices::host_name;

/// Text in place of the GPUs, which only a daemon knows.
const NO_DAEMON: &str = "no daemon is running; these are your launches on this host";

/// Returns the running launches, with the details of one of them.
pub(super) async fn snapshot(selected: Option<u64>) -> Snapshot {
    let replies = launches::status_with_history(&registry::running()).await;
    // A launch that does not answer has ended, or appears again at the next poll.
    let detailed: Vec<Job> =
        replies.into_iter().filter_map(|(name, reply)| Some(job(name, reply.ok()?))).collect();
    let detail = detailed.iter().find(|job| Some(job.id) == selected).cloned();
    let jobs: Vec<Job> = detailed.into_iter().map(|job| Job { history: Vec::new(), ..job }).collect();
    Snapshot { node: node(&jobs), jobs, detail }
}

fn node(jobs: &[Job]) -> NodeStatus {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    NodeStatus {
        host: host_name(),
        version: xlaunch_proto::VERSION.into(),
        cores: u32::try_from(cores).unwrap_or(u32::MAX),
        jobs_running: u32::try_from(jobs.len()).unwrap_or(u32::MAX),
        gpu_problem: NO_DAEMON.into(),
        ..NodeStatus::default()
    }
}

fn job(name: String, mut status: StatusReply) -> Job {
    let state = match status.state() {
        JobState::Running => NodeJobState::Running,
        JobState::Stopping => NodeJobState::Stopping,
        JobState::Done => NodeJobState::Done,
        JobState::Failed => NodeJobState::Failed,
        _ => NodeJobState::Starting,
    };
    Job {
        id: status.launcher_pid.into(),
        name,
        uid: rustix::process::getuid().as_raw(),
        user: std::env::var("USER").unwrap_or_default(),
        kind: status.kind,
        state: state.into(),
        reason: status.reason.clone(),
        command_line: status.command_line.clone(),
        started_unix_ms: status.started_unix_seconds.saturating_mul(1000),
        history: std::mem::take(&mut status.history),
        status: Some(status),
        ..Job::default()
    }
}

/// Stops a launch. Returns a message for the user.
pub(super) async fn stop(id: u64) -> String {
    for launch in registry::running() {
        let is_meant = |status: &StatusReply| u64::from(status.launcher_pid) == id;
        if launches::status(&launch).await.as_ref().is_ok_and(is_meant) {
            return stop_launch(&launch).await.unwrap_or_else(|problem| problem);
        }
    }
    format!("no running launch has process id {id}")
}

async fn stop_launch(launch: &Running) -> Result<String, String> {
    let mut agent = launches::connect(launch).await?;
    agent.stop(StopRequest {}).await.map_err(|status| launches::call_error(launch, &status))?;
    Ok(format!("{} is stopping", launch.name))
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::JobKind;

    use super::*;

    #[test]
    fn launch_is_shown_as_a_job_with_its_state_step_and_start() {
        let mut status =
            StatusReply { launcher_pid: 7, step: 12, started_unix_seconds: 3, ..Default::default() };
        (status.state, status.kind) = (JobState::Running.into(), JobKind::Command.into());
        let shown = job("train-1".into(), status);
        assert_eq!((shown.id, shown.name.as_str(), shown.state()), (7, "train-1", NodeJobState::Running));
        assert_eq!((shown.started_unix_ms, crate::render::jobs::step_or_reason(&shown)), (3000, "12".into()));
        assert_eq!(node(&[shown]).jobs_running, 1);
    }
}
