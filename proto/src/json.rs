//! Messages as JSON: the same for `--json` of clients and for the daemon's page.
//!
//! Keys are field names of `xlaunch/v1/node.proto` and `agent.proto`, states are in lower case, times are milliseconds
//! since 1970 (UTC). Unknown values, and times of events that have not happened, are null. Numbers that JSON cannot
//! represent are `"NaN"`, `"Infinity"` and `"-Infinity"`, as in protobuf's JSON mapping.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::v1::{
    Accounting, CheckpointReply, ExamineReply, ExaminedGpu, Finding, Gpu, Job, LogLoss, MemberStatus,
    NodeStatus, ProcessStacks, Progress, RankStacks, RankStatus, RecordedActivity, Restart, StackDump,
    StatusReply, StepTimes, ThreadState, Totals,
};
use serde_json::{Value, json};

use crate::labels::{
    examination_state, finding_level, gpu_state, job_state, kind, member_state, node_job_state, rank_state,
};

/// Returns a node with its GPUs.
pub fn node(node: &NodeStatus) -> Value {
    json!({
        "host": node.host, "version": node.version, "daemon_pid": node.daemon_pid,
        "started_unix_seconds": node.started_unix_seconds, "drained": node.drained, "cores": node.cores,
        "memory_bytes": node.memory_bytes,
        "jobs_queued": node.jobs_queued, "jobs_running": node.jobs_running, "jobs_ended": node.jobs_ended,
        "gpu_problem": node.gpu_problem, "page_problem": node.page_problem,
        "config_problems": node.config_problems,
        "gpus": node.gpus.iter().map(gpu).collect::<Vec<_>>(),
    })
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

/// Returns the result of an examination of GPUs, with findings as in `xlaunch doctor --json`.
pub fn examination(reply: &ExamineReply, healthy: bool) -> Value {
    let gpu = |gpu: &ExaminedGpu| {
        json!({
            "index": gpu.index, "uuid": gpu.uuid, "state": examination_state(gpu.state()),
            "reason": gpu.reason,
        })
    };
    let finding = |finding: &Finding| {
        let gpu = finding.gpu_index.map(|index| json!({ "index": index, "uuid": finding.gpu_uuid }));
        json!({
            "level": finding_level(finding.level()), "check": finding.check, "gpu": gpu,
            "message": finding.message, "help": (!finding.help.is_empty()).then_some(&finding.help),
        })
    };
    json!({
        "healthy": healthy,
        "gpus": reply.gpus.iter().map(gpu).collect::<Vec<_>>(),
        "findings": reply.findings.iter().map(finding).collect::<Vec<_>>(),
    })
}

/// Returns a checkpoint that was saved on request.
pub fn checkpoint(saved: &CheckpointReply) -> Value {
    json!({ "step": saved.step, "path": saved.path, "seconds": number(saved.seconds) })
}

/// Returns what the processes of each rank are doing.
pub fn stacks(ranks: &[RankStacks]) -> Value {
    let activity = |activity: &RecordedActivity| {
        json!({
            "phase": activity.phase().name(), "step": activity.step, "collectives": activity.collectives,
            "bucket": activity.bucket, "starting": activity.starting, "unix_ms": activity.unix_ms,
        })
    };
    let thread = |thread: &ThreadState| {
        json!({
            "tid": thread.tid, "name": thread.name, "state": thread.state,
            "wait_channel": thread.wait_channel, "syscall": thread.syscall,
        })
    };
    let dump = |dump: &StackDump| json!({ "tool": dump.tool, "text": dump.text, "problem": dump.problem });
    let process = |process: &ProcessStacks| {
        json!({
            "pid": process.pid, "parent": process.parent, "name": process.name, "state": process.state,
            "tracer_pid": (process.tracer_pid != 0).then_some(process.tracer_pid),
            "threads": process.threads.iter().map(thread).collect::<Vec<_>>(),
            "stacks": process.dumps.iter().map(dump).collect::<Vec<_>>(),
        })
    };
    let rank = |rank: &RankStacks| {
        json!({
            "rank": rank.rank, "unix_ms": at(rank.unix_ms), "activity": rank.activity.as_ref().map(activity),
            "processes": rank.processes.iter().map(process).collect::<Vec<_>>(),
        })
    };
    json!({ "ranks": ranks.iter().map(rank).collect::<Vec<_>>() })
}

/// Returns a job of a node as a list entry, without its report (which may be long), its status and its history.
pub fn job(job: &Job) -> Value {
    json!({
        "id": job.id, "name": job.name, "uid": job.uid, "user": job.user, "kind": kind(job.kind()),
        "state": node_job_state(job.state()), "reason": job.reason, "priority": job.priority,
        "gpus_wanted": job.gpus_wanted, "gpus": job.gpus, "command_line": job.command_line,
        "work_dir": job.work_dir, "submitted_unix_ms": at(job.submitted_unix_ms),
        "started_unix_ms": at(job.started_unix_ms), "ended_unix_ms": at(job.ended_unix_ms),
        "exit_code": job.exit_code, "cpu_seconds": job.cpu_seconds,
        "peak_memory_bytes": job.peak_memory_bytes,
        "queue_position": (job.queue_position != 0).then_some(job.queue_position),
        "starts_by_unix_ms": at(job.starts_by_unix_ms), "held": job.held,
        "time_limit_seconds": job.time_limit_seconds, "time_limit_unix_ms": at(job.time_limit_unix_ms),
        "time_remaining_seconds": time_remaining(job, SystemTime::now()),
        "memory_bytes": job.memory_bytes, "cpus": job.cpus, "requeues": job.requeues,
        "array_job": job.array_job, "array_index": job.array_index,
    })
}

/// Returns the seconds until a running job reaches its time limit, if it has one.
fn time_remaining(job: &Job, now: SystemTime) -> Option<u64> {
    let runs = job.time_limit_unix_ms > 0 && job.ended_unix_ms == 0;
    let limit = UNIX_EPOCH + Duration::from_millis(job.time_limit_unix_ms);
    runs.then(|| limit.duration_since(now).unwrap_or_default().as_secs())
}

/// Returns the status of a job and its ranks, without its history.
pub fn status(reply: &StatusReply) -> Value {
    json!({
        "job_id": reply.job_id, "job_name": reply.job_name, "kind": kind(reply.kind()),
        "state": job_state(reply.state()), "reason": reply.reason, "command_line": reply.command_line,
        "host": reply.host, "launcher_pid": reply.launcher_pid,
        "started_unix_seconds": reply.started_unix_seconds, "attempt": reply.attempt,
        "restarts": reply.restarts, "max_restarts": reply.max_restarts,
        "past_restarts": reply.past_restarts.iter().map(restart).collect::<Vec<_>>(),
        "log_dir": reply.log_dir, "world_size": reply.world_size, "step": reply.step,
        "total_steps": reply.total_steps, "loss": single(reply.loss),
        "tokens_per_second": number(reply.tokens_per_second), "mfu": reply.mfu.map(number),
        "totals": reply.totals.as_ref().map(totals), "accounting": reply.accounting.as_ref().map(accounting),
        "spare": reply.spare, "nodes": reply.nodes.iter().map(member).collect::<Vec<_>>(),
        "ranks": reply.ranks.iter().map(rank).collect::<Vec<_>>(),
    })
}

fn totals(totals: &Totals) -> Value {
    let steps = |times: &StepTimes| json!({ "seconds": number(times.seconds), "steps": times.steps });
    json!({
        "tokens": totals.tokens, "all_reduce_bytes": totals.all_reduce_bytes,
        "step_seconds": number(totals.step_seconds),
        "steps": totals.steps.iter().map(steps).collect::<Vec<_>>(),
    })
}

fn member(node: &MemberStatus) -> Value {
    json!({
        "node_rank": node.node_rank, "host": node.host, "address": node.address,
        "state": member_state(node.state()), "first_rank": node.first_rank, "workers": node.workers,
        "seconds_since_heartbeat": number(node.seconds_since_heartbeat),
    })
}

/// Returns the break-down of a job's wall time, and its numbers of failures.
pub fn accounting(account: &Accounting) -> Value {
    let seconds: serde_json::Map<_, _> =
        account.kinds().into_iter().map(|(kind, seconds)| (kind.to_owned(), number(seconds))).collect();
    let restarts: serde_json::Map<_, _> =
        account.restarts.iter().map(|count| (count.cause.clone(), json!(count.restarts))).collect();
    json!({
        "seconds": seconds, "useful_percent": number(account.useful_percent()), "hangs": account.hangs,
        "replica_mismatches": account.replica_mismatches, "skipped_saves": account.skipped_saves,
        "failed_saves": account.failed_saves, "restarts": restarts,
    })
}

fn restart(restart: &Restart) -> Value {
    json!({
        "unix_ms": restart.unix_ms, "attempt": restart.attempt, "rank": restart.rank, "cause": restart.cause,
    })
}

fn rank(rank: &RankStatus) -> Value {
    json!({
        "rank": rank.rank, "local_rank": rank.local_rank, "node_rank": rank.node_rank, "pid": rank.pid,
        "state": rank_state(rank.state()), "device_uuid": rank.device_uuid, "step": rank.step,
        "seconds_since_heartbeat": rank.seconds_since_heartbeat.map(number), "exit": rank.exit,
        "seconds_since_output": rank.seconds_since_output.map(number),
        "cpu_percent": rank.cpu_percent.map(number), "memory_bytes": rank.memory_bytes,
        "gpu_percent": rank.gpu_percent.map(number), "gpu_memory_bytes": rank.gpu_memory_bytes,
        "pool_live_bytes": rank.pool_live_bytes, "pool_mapped_bytes": rank.pool_mapped_bytes,
        "pool_peak_bytes": rank.pool_peak_bytes, "pool_fragmentation": single(rank.pool_fragmentation),
        "hint": rank.hint, "log_losses": rank.log_losses.iter().map(log_loss).collect::<Vec<_>>(),
    })
}

fn log_loss(loss: &LogLoss) -> Value {
    json!({
        "file": loss.file, "lost_bytes": loss.lost_bytes, "reason": loss.reason,
        "rotated_bytes": loss.rotated_bytes,
    })
}

/// Returns the history of a training job.
pub fn history(points: &[Progress]) -> Value {
    let point = |point: &Progress| {
        json!({
            "unix_ms": point.unix_ms, "step": point.step, "loss": single(point.loss),
            "tokens_per_second": number(point.tokens_per_second),
        })
    };
    points.iter().map(point).collect()
}

/// Returns a time; null for 0, which stands for an event that has not happened.
fn at(unix_ms: u64) -> Value {
    if unix_ms == 0 { Value::Null } else { json!(unix_ms) }
}

/// Returns a number; a string if JSON cannot represent it.
pub fn number(value: f64) -> Value {
    match value {
        _ if value.is_nan() => json!("NaN"),
        f64::INFINITY => json!("Infinity"),
        f64::NEG_INFINITY => json!("-Infinity"),
        _ => json!(value),
    }
}

/// Returns the shortest decimal number that rounds to this f32.
pub fn single(value: f32) -> Value {
    number(value.to_string().parse().unwrap_or(f64::from(value)))
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    /// Fields that callers add on request, metrics that have keys of their own, and the seconds of an accounting, which
    /// are one object.
    const LEFT_OUT: [&str; 14] = [
        "Job.report",
        "Job.status",
        "Job.status_age_seconds",
        "Job.history",
        "StatusReply.history",
        "StatusReply.last_step",
        "RankStatus.last_step",
        "Accounting.step_seconds",
        "Accounting.repeated_seconds",
        "Accounting.checkpoint_seconds",
        "Accounting.evaluation_seconds",
        "Accounting.start_seconds",
        "Accounting.hang_seconds",
        "Accounting.down_seconds",
    ];

    #[test]
    fn every_field_of_a_message_is_in_its_json() {
        let files = FileDescriptorSet::decode(crate::FILE_DESCRIPTOR_SET).unwrap().file;
        let messages: Vec<_> = files.iter().flat_map(|file| &file.message_type).collect();
        let rendered = [
            ("NodeStatus", node(&NodeStatus::default())),
            ("Gpu", gpu(&Gpu::default())),
            ("CheckpointReply", checkpoint(&CheckpointReply::default())),
            ("Job", job(&Job::default())),
            ("StatusReply", status(&StatusReply::default())),
            ("MemberStatus", member(&MemberStatus::default())),
            ("Totals", totals(&Totals::default())),
            ("Accounting", accounting(&Accounting::default())),
            ("Restart", restart(&Restart::default())),
            ("RankStatus", rank(&RankStatus::default())),
            ("LogLoss", log_loss(&LogLoss::default())),
        ];
        let mut missing = Vec::new();
        for (name, value) in rendered {
            let message = messages.iter().find(|message| message.name() == name).unwrap();
            let keys = message.field.iter().map(|field| format!("{name}.{}", field.name()));
            let is_left_out = |key: &String| LEFT_OUT.contains(&key.as_str());
            let has = |key: &String| value.get(&key[name.len() + 1..]).is_some();
            missing.extend(keys.filter(|key| !has(key) && !is_left_out(key)));
        }
        assert_eq!(missing, Vec::<String>::new());
    }
}
