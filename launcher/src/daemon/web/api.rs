//! The view as JSON: what the page shows, and what scripts may read.
//!
//! Keys are those of `xlaunch/v1/node.proto` and `agent.proto`, states in lower case; times are milliseconds since 1970 (UTC).
//! What is not known is null. Numbers that JSON does not have are `"NaN"`, `"Infinity"` and `"-Infinity"`, as protobuf has
//! them in JSON.

use serde_json::{Value, json};
use xlaunch_proto::v1::{Gpu, JobKind, NodeJobState, Progress, RankStatus, StatusReply};

use crate::daemon::view::{JobView, NodeView};
use crate::status::words::{gpu_state, job_state, kind, node_job_state, rank_state};

/// Ended jobs in an answer about the node, the newest.
const ENDED: usize = 100;
/// Waiting jobs in it, those that go next.
const QUEUED: usize = 200;

/// The node, its GPUs, and its jobs: those that run, those that wait in the order of their turn, those that have ended last.
pub(super) fn node(view: &NodeView, now: u64) -> Value {
    let node = &view.node;
    let gpus: Vec<_> = node.gpus.iter().map(gpu).collect();
    let (jobs, left_out) = listed(view);
    let jobs: Vec<_> = jobs.into_iter().map(summary).collect();
    json!({
        "unix_ms": now,
        "node": {
            "host": node.host, "version": node.version, "daemon_pid": node.daemon_pid,
            "started_unix_seconds": node.started_unix_seconds, "drained": node.drained, "cores": node.cores,
            "jobs_queued": node.jobs_queued, "jobs_running": node.jobs_running, "jobs_ended": node.jobs_ended,
            "gpu_problem": node.gpu_problem,
        },
        "gpus": gpus,
        "jobs": jobs,
        "jobs_left_out": left_out,
    })
}

/// The jobs of an answer about the node, and how many are not in it.
fn listed(view: &NodeView) -> (Vec<&JobView>, usize) {
    let newest_first = || view.jobs.values().rev().map(AsRef::as_ref);
    let is_queued = |job: &&JobView| job.job.state() == NodeJobState::Queued;
    let running = newest_first().filter(|job| !job.has_ended() && !is_queued(job));
    let mut queued: Vec<_> = newest_first().filter(is_queued).collect();
    queued.sort_by_key(|job| job.job.queue_position);
    let ended = newest_first().filter(|job| job.has_ended());
    let jobs: Vec<_> = running.chain(queued.into_iter().take(QUEUED)).chain(ended.take(ENDED)).collect();
    let left_out = view.jobs.len() - jobs.len();
    (jobs, left_out)
}

/// One job, with its ranks and its history.
pub(super) fn job(view: &JobView, now: u64) -> Value {
    let mut value = summary(view);
    let job = &view.job;
    let history: Vec<_> = view.history.iter().map(point).collect();
    value["unix_ms"] = json!(now);
    value["command_line"] = json!(job.command_line);
    value["work_dir"] = json!(job.work_dir);
    value["report"] = json!(job.report);
    value["status"] = view.status.as_ref().map_or(Value::Null, |(reply, _)| status(reply));
    value["status_age_seconds"] = json!(view.status.as_ref().map(|(_, at)| at.elapsed().as_secs_f64()));
    value["history"] = json!(history);
    value
}

/// A job as a line of a list.
fn summary(view: &JobView) -> Value {
    let job = &view.job;
    let status = view.status.as_ref().map(|(reply, _)| reply.as_ref());
    let trained = status.filter(|status| has_trained(status));
    json!({
        "id": job.id, "name": job.name, "uid": job.uid, "user": job.user, "kind": kind(job.kind()),
        "state": node_job_state(job.state()), "reason": job.reason, "priority": job.priority,
        "gpus_wanted": job.gpus_wanted, "gpus": job.gpus, "queue_position": job.queue_position,
        "submitted_unix_ms": time(job.submitted_unix_ms), "started_unix_ms": time(job.started_unix_ms),
        "ended_unix_ms": time(job.ended_unix_ms), "exit_code": job.exit_code,
        "step": trained.map(|status| status.step), "total_steps": trained.map(|status| status.total_steps),
        "loss": trained.map(|status| single(status.loss)),
        "tokens_per_second": trained.map(|status| number(status.tokens_per_second)),
        "restarts": status.map(|status| status.restarts), "max_restarts": status.map(|status| status.max_restarts),
    })
}

/// Whether there is a step whose loss is known.
pub(super) fn has_trained(status: &StatusReply) -> bool {
    status.kind() != JobKind::Command && status.step > 0
}

fn gpu(gpu: &Gpu) -> Value {
    json!({
        "index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "state": gpu_state(gpu.state()),
        "reason": gpu.reason, "job": (gpu.job != 0).then_some(gpu.job),
        "busy_percent": gpu.busy_percent.map(number), "memory_used_bytes": gpu.memory_used_bytes,
        "memory_bytes": gpu.memory_bytes, "power_watts": gpu.power_watts.map(number),
        "temperature_celsius": gpu.temperature_celsius.map(number),
    })
}

fn status(reply: &StatusReply) -> Value {
    let ranks: Vec<_> = reply.ranks.iter().map(rank).collect();
    json!({
        "job_id": reply.job_id, "attempt": reply.attempt, "state": job_state(reply.state()),
        "reason": reply.reason, "world_size": reply.world_size, "launcher_pid": reply.launcher_pid,
        "log_dir": reply.log_dir, "ranks": ranks,
    })
}

fn rank(rank: &RankStatus) -> Value {
    json!({
        "rank": rank.rank, "local_rank": rank.local_rank, "pid": rank.pid,
        "state": rank_state(rank.state()), "device_uuid": rank.device_uuid, "step": rank.step,
        "seconds_since_heartbeat": number(rank.seconds_since_heartbeat), "exit": rank.exit,
        "seconds_since_output": rank.seconds_since_output.map(number),
        "cpu_percent": rank.cpu_percent.map(number), "memory_bytes": rank.memory_bytes,
        "gpu_percent": rank.gpu_percent.map(number), "gpu_memory_bytes": rank.gpu_memory_bytes,
        "pool_live_bytes": rank.pool_live_bytes, "pool_mapped_bytes": rank.pool_mapped_bytes,
        "pool_peak_bytes": rank.pool_peak_bytes, "pool_fragmentation": single(rank.pool_fragmentation),
        "hint": rank.hint,
    })
}

fn point(point: &Progress) -> Value {
    json!({
        "unix_ms": point.unix_ms, "step": point.step, "loss": single(point.loss),
        "tokens_per_second": number(point.tokens_per_second),
    })
}

/// Null where it has not happened.
fn time(unix_ms: u64) -> Value {
    if unix_ms == 0 { Value::Null } else { json!(unix_ms) }
}

fn number(value: f64) -> Value {
    match value {
        _ if value.is_nan() => json!("NaN"),
        f64::INFINITY => json!("Infinity"),
        f64::NEG_INFINITY => json!("-Infinity"),
        _ => json!(value),
    }
}

/// The shortest decimal that is this f32.
fn single(value: f32) -> Value {
    number(value.to_string().parse().unwrap_or(f64::from(value)))
}
