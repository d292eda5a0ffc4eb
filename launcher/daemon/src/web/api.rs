//! Returns the view as JSON, for the page and for scripts: the objects that `--json` prints too
//! ([`xlaunch_proto::json`]). Each job also has the figures of its status that a list shows.

use serde_json::{Value, json};
use xlaunch_proto::v1::{Job, JobKind, NodeJobState, StatusReply};

use crate::view::{JobView, NodeView};
use xlaunch_proto::json;

/// Maximum number of ended jobs in a node's JSON; the newest are included.
const MAX_ENDED_JOBS: usize = 100;
/// Maximum number of queued jobs in a node's JSON; the first in the queue are included.
const MAX_QUEUED_JOBS: usize = 200;

/// Keys of a job that are left out in a list.
const NOT_LISTED: [&str; 4] = ["history", "report", "status", "status_age_seconds"];

/// Returns the node, its GPUs and its jobs: first running jobs, then queued ones in queue order, then ended ones,
/// newest first.
pub(super) fn node(view: &NodeView, now: u64) -> Value {
    let (jobs, left_out) = listed(view);
    let jobs: Vec<_> = jobs.into_iter().map(line).collect();
    json!({
        "unix_ms": now,
        "node": view.node,
        "jobs": jobs,
        "jobs_left_out": left_out,
    })
}

/// Returns the jobs to show, and the number of jobs left out.
fn listed(view: &NodeView) -> (Vec<&JobView>, usize) {
    let newest_first = || view.jobs.values().rev().map(AsRef::as_ref);
    let is_queued = |job: &&JobView| job.job.state() == NodeJobState::Queued;
    let running = newest_first().filter(|job| !job.has_ended() && !is_queued(job));
    let mut queued: Vec<_> = newest_first().filter(is_queued).collect();
    queued.sort_by_key(|job| job.job.queue_position);
    let ended = newest_first().filter(|job| job.has_ended());
    let jobs: Vec<_> =
        running.chain(queued.into_iter().take(MAX_QUEUED_JOBS)).chain(ended.take(MAX_ENDED_JOBS)).collect();
    let left_out = view.jobs.len() - jobs.len();
    (jobs, left_out)
}

/// Returns a job with its ranks and its history.
pub(crate) fn job(view: &JobView, now: u64) -> Value {
    let mut value = with_figures(&view.to_message(true), view);
    value["unix_ms"] = json!(now);
    value
}

/// Returns a job as shown in a list.
fn line(view: &JobView) -> Value {
    let mut value = with_figures(&view.job, view);
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|key, _| !NOT_LISTED.contains(&key.as_str()));
    }
    value
}

fn with_figures(job: &Job, view: &JobView) -> Value {
    let mut value = json::job(job);
    let status = view.status.as_ref().map(|(reply, _)| reply.as_ref());
    let trained = status.filter(|status| has_trained(status));
    value["step"] = json!(trained.map(|status| status.step));
    value["total_steps"] = json!(trained.map(|status| status.total_steps));
    value["loss"] = json!(trained.map(|status| json::single(status.loss)));
    value["tokens_per_second"] = json!(trained.map(|status| json::number(status.tokens_per_second)));
    value["mfu"] = json!(trained.and_then(|status| status.mfu).map(json::number));
    value["restarts"] = json!(status.map(|status| status.restarts));
    value["max_restarts"] = json!(status.map(|status| status.max_restarts));
    value
}

/// Returns whether the job trains and has completed a step.
pub(super) fn has_trained(status: &StatusReply) -> bool {
    status.kind() != JobKind::Command && status.step > 0
}
