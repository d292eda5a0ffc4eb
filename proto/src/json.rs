//! Messages as JSON: the same for `--json` of clients and for the daemon's page. The messages implement
//! [`Serialize`]; this module has the parts that do not follow from their fields.
//!
//! Keys are field names of `xlaunch/v1/node.proto` and `agent.proto`, states are in lower case, times are milliseconds
//! since 1970 (UTC). Unknown values, and times of events that have not happened, are null. Numbers that JSON cannot
//! represent are `"NaN"`, `"Infinity"` and `"-Infinity"`, as in protobuf's JSON mapping.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::v1::{Accounting, Finding, Job};

/// Returns a job of a node, with the time that remains until its time limit.
pub fn job(job: &Job) -> Value {
    let mut value = json!(job);
    value["time_remaining_seconds"] = json!(time_remaining(job, SystemTime::now()));
    value
}

/// Returns the seconds until a running job reaches its time limit, if it has one.
fn time_remaining(job: &Job, now: SystemTime) -> Option<u64> {
    let runs = job.time_limit_unix_ms > 0 && job.ended_unix_ms == 0;
    let limit = UNIX_EPOCH + Duration::from_millis(job.time_limit_unix_ms);
    runs.then(|| limit.duration_since(now).unwrap_or_default().as_secs())
}

/// The break-down of a job's wall time, and its numbers of failures.
impl Serialize for Accounting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let seconds = self.kinds().into_iter().map(|(kind, seconds)| (kind.to_owned(), number(seconds)));
        let restarts = self.restarts.iter().map(|count| (count.cause.clone(), json!(count.restarts)));
        let value = json!({
            "seconds": seconds.collect::<Map<_, _>>(), "useful_percent": number(self.useful_percent()),
            "hangs": self.hangs, "replica_mismatches": self.replica_mismatches,
            "skipped_saves": self.skipped_saves, "failed_saves": self.failed_saves,
            "restarts": restarts.collect::<Map<_, _>>(),
        });
        value.serialize(serializer)
    }
}

/// A finding as in `xlaunch doctor --json`.
impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let gpu = self.gpu_index.map(|index| json!({ "index": index, "uuid": self.gpu_uuid }));
        let value = json!({
            "level": self.level().label(), "check": self.check, "gpu": gpu, "message": self.message,
            "help": (!self.help.is_empty()).then_some(&self.help),
        });
        value.serialize(serializer)
    }
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

pub(crate) fn double<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    number(*value).serialize(serializer)
}

pub(crate) fn optional_double<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    value.map(number).serialize(serializer)
}

pub(crate) fn float<S: Serializer>(value: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    single(*value).serialize(serializer)
}

/// Writes a value; null for 0, which stands for an unknown one.
pub(crate) fn unless_zero<T, S>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    T: Default + PartialEq + Serialize,
    S: Serializer,
{
    (*value != T::default()).then_some(value).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{
        Dependency, DependencyCondition, Gpu, GpuState, JobKind, JobState, LogLoss, MemberState,
        MemberStatus, NodeJobState, Phase, ProcessStacks, Progress, RankStacks, RankState, RankStatus,
        RecordedActivity, Restart, RestartCount, Scheduling, StackDump, StatusReply, StepTimes, ThreadState,
        Totals, WarningSignal,
    };

    #[test]
    fn job_has_its_scheduling_and_null_for_what_is_unknown() {
        let condition = DependencyCondition::Fail.into();
        let scheduling = Scheduling {
            time_limit_seconds: Some(60),
            warning: Some(WarningSignal { signal: 10, seconds_before: 5 }),
            memory_bytes: Some(1 << 30),
            after: vec![Dependency { job: 3, condition, met: Some(true) }],
            requeue: true,
            ..Scheduling::default()
        };
        let shown = Job {
            id: 7,
            name: "n".into(),
            uid: 1000,
            kind: JobKind::Trainer.into(),
            state: NodeJobState::Queued.into(),
            submitted_unix_ms: 5,
            priority: -1,
            exit_code: Some(3),
            gpus: vec!["GPU-a".into()],
            history: vec![Progress { unix_ms: 9, step: 2, loss: 0.1, tokens_per_second: f64::INFINITY }],
            scheduling: Some(scheduling),
            array_job: Some(6),
            ..Job::default()
        };
        let expected = json!({
            "id": 7, "name": "n", "uid": 1000, "user": "", "kind": "trainer", "state": "queued", "reason": "",
            "priority": -1, "gpus_wanted": 0, "gpus": ["GPU-a"], "command_line": "", "work_dir": "",
            "submitted_unix_ms": 5, "started_unix_ms": null, "ended_unix_ms": null, "exit_code": 3,
            "report": "", "queue_position": null, "status": null, "status_age_seconds": null,
            "history": [{ "unix_ms": 9, "step": 2, "loss": 0.1, "tokens_per_second": "Infinity" }],
            "held": false, "time_limit_seconds": 60, "time_limit_unix_ms": null,
            "time_remaining_seconds": null, "starts_by_unix_ms": null, "memory_bytes": 1 << 30, "cpus": null,
            "warning": { "signal": 10, "seconds_before": 5 },
            "after": [{ "job": 3, "condition": "fail", "met": true }], "requeue": true, "requeues": 0,
            "array_job": 6, "array_index": null, "cpu_seconds": null, "peak_memory_bytes": null,
        });
        assert_eq!(job(&shown), expected);
    }

    #[test]
    fn status_has_nodes_ranks_totals_and_accounting() {
        let restarts = vec![RestartCount { cause: "gpu".into(), restarts: 2 }];
        let accounting =
            Accounting { step_seconds: 3.0, down_seconds: 1.0, restarts, ..Accounting::default() };
        let steps = vec![StepTimes { seconds: f64::INFINITY, steps: 4 }];
        let log_losses = vec![LogLoss { file: "stdout.log".into(), lost_bytes: 3, ..LogLoss::default() }];
        let (state, pool_fragmentation) = (RankState::Joined.into(), 0.25);
        let rank = RankStatus { rank: 1, state, pool_fragmentation, log_losses, ..RankStatus::default() };
        let node = MemberStatus { host: "a".into(), state: MemberState::Silent.into(), ..Default::default() };
        let shown = StatusReply {
            state: JobState::Rendezvous.into(),
            loss: f32::NAN,
            mfu: Some(0.5),
            spare: true,
            history: vec![Progress::default()],
            past_restarts: vec![Restart { unix_ms: 8, attempt: 1, rank: Some(0), cause: "c".into() }],
            totals: Some(Totals { tokens: 5, steps, ..Totals::default() }),
            accounting: Some(accounting),
            nodes: vec![node],
            ranks: vec![rank],
            ..StatusReply::default()
        };
        let expected: Value = serde_json::from_str(
            r#"{
            "job_id": "", "job_name": "", "kind": "unknown", "state": "rendezvous", "reason": "",
            "command_line": "", "host": "", "launcher_pid": 0, "started_unix_seconds": 0, "attempt": 0,
            "restarts": 0, "max_restarts": 0,
            "past_restarts": [{ "unix_ms": 8, "attempt": 1, "rank": 0, "cause": "c" }], "log_dir": "",
            "world_size": 0, "step": 0, "total_steps": 0, "loss": "NaN", "tokens_per_second": 0.0, "mfu": 0.5,
            "totals": {
                "tokens": 5, "all_reduce_bytes": 0, "step_seconds": 0.0,
                "steps": [{ "seconds": "Infinity", "steps": 4 }]
            },
            "accounting": {
                "seconds": {
                    "step": 3.0, "repeated": 0.0, "checkpoint": 0.0, "evaluation": 0.0, "start": 0.0, "hang": 0.0,
                    "down": 1.0
                },
                "useful_percent": 75.0, "hangs": 0, "replica_mismatches": 0, "skipped_saves": 0,
                "failed_saves": 0, "restarts": { "gpu": 2 }
            },
            "spare": true,
            "nodes": [{
                "node_rank": null, "host": "a", "address": "", "state": "silent", "first_rank": 0, "workers": 0,
                "seconds_since_heartbeat": 0.0
            }],
            "ranks": [{
                "rank": 1, "local_rank": 0, "node_rank": 0, "pid": 0, "state": "joined", "device_uuid": "",
                "step": 0, "seconds_since_heartbeat": null, "exit": "", "seconds_since_output": null,
                "cpu_percent": null, "memory_bytes": null, "gpu_percent": null, "gpu_memory_bytes": null,
                "pool_live_bytes": 0, "pool_mapped_bytes": 0, "pool_peak_bytes": 0,
                "pool_fragmentation": 0.25, "hint": "",
                "log_losses": [
                    { "file": "stdout.log", "lost_bytes": 3, "reason": "", "rotated_bytes": 0 }
                ]
            }]
        }"#,
        )
        .unwrap();
        assert_eq!(json!(shown), expected);
    }

    #[test]
    fn gpus_stacks_and_findings_keep_their_keys() {
        let gpu = Gpu { state: GpuState::Foreign.into(), busy_percent: Some(f64::NAN), ..Gpu::default() };
        let expected = json!({
            "index": 0, "uuid": "", "name": "", "state": "foreign", "reason": "", "job": null,
            "busy_percent": "NaN", "memory_used_bytes": null, "memory_bytes": null, "power_watts": null,
            "temperature_celsius": null,
        });
        assert_eq!(json!(gpu), expected);
        let activity = RecordedActivity { phase: Phase::AllReduce.into(), unix_ms: 3, ..Default::default() };
        let process = ProcessStacks {
            threads: vec![ThreadState::default()],
            dumps: vec![StackDump::default()],
            ..ProcessStacks::default()
        };
        let rank = RankStacks { activity: Some(activity), processes: vec![process], ..RankStacks::default() };
        let expected = json!({
            "rank": 0, "unix_ms": null,
            "activity": {
                "phase": "all-reduce", "step": 0, "collectives": 0, "bucket": 0, "starting": false,
                "unix_ms": 3,
            },
            "processes": [{
                "pid": 0, "parent": 0, "name": "", "state": "", "tracer_pid": null,
                "threads": [{ "tid": 0, "name": "", "state": "", "wait_channel": "", "syscall": "" }],
                "stacks": [{ "tool": "", "text": "", "problem": "" }],
            }],
        });
        assert_eq!(json!(rank), expected);
        let finding = Finding { gpu_index: Some(1), gpu_uuid: "u".into(), ..Finding::default() };
        let expected = json!({
            "level": "unknown", "check": "", "gpu": { "index": 1, "uuid": "u" }, "message": "", "help": null,
        });
        assert_eq!(json!(finding), expected);
    }
}
