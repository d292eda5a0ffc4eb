//! Jobs that have ended, as a table.

use std::time::{Duration, UNIX_EPOCH};

use xlaunch_proto::v1::JobAccount;
use xlaunch_spec::quantities::rough_time_text;

use super::jobs::truncated_name;
use super::text::{bytes, columns, fit, or_dash, seconds};

/// Returns one line per job. Lines are truncated to `width` characters.
pub(crate) fn table(jobs: &[JobAccount], width: usize) -> String {
    if jobs.is_empty() {
        return "no jobs\n".into();
    }
    let head =
        ["JOB", "NAME", "USER", "STATE", "EXIT", "GPUS", "TIME", "GPU TIME", "CPU TIME", "MEMORY", "ENDED"];
    let rows: Vec<_> = jobs.iter().map(row).collect();
    fit(&columns(&head, &rows), width)
}

fn row(job: &JobAccount) -> Vec<String> {
    // Daemons of version 0.3 send no run time.
    let last = || seconds(job.ended_unix_ms.saturating_sub(job.started_unix_ms) / 1000);
    let ran = (job.run_seconds > 0.0).then_some(job.run_seconds);
    let ran = ran.or_else(|| (job.started_unix_ms > 0).then(last));
    let ended = UNIX_EPOCH + Duration::from_secs(job.ended_unix_ms / 1000);
    vec![
        job.id.to_string(),
        truncated_name(&job.name),
        if job.user.is_empty() { job.uid.to_string() } else { job.user.clone() },
        job.state().label().into(),
        or_dash(job.exit_code, |code| code.to_string()),
        job.gpus.to_string(),
        or_dash(ran, rough_time_text),
        or_dash((job.gpus > 0).then_some(job.gpu_seconds), rough_time_text),
        or_dash(job.cpu_seconds, rough_time_text),
        or_dash(job.peak_memory_bytes, bytes),
        humantime::format_rfc3339_seconds(ended).to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use xlaunch_proto::v1::NodeJobState;

    use super::*;

    #[test]
    fn table_shows_what_a_job_has_used() {
        let done = JobAccount {
            id: 7,
            name: "train".into(),
            uid: 1000,
            user: "anna".into(),
            state: NodeJobState::Done.into(),
            exit_code: Some(0),
            gpus: 2,
            started_unix_ms: 1_000,
            ended_unix_ms: 61_000,
            gpu_seconds: 120.0,
            cpu_seconds: Some(90.0),
            peak_memory_bytes: Some(3_000_000),
            ..JobAccount::default()
        };
        let never = JobAccount {
            id: 8,
            name: "x\u{1b}".into(),
            uid: 7,
            state: NodeJobState::Cancelled.into(),
            ended_unix_ms: 62_000,
            ..JobAccount::default()
        };
        insta::assert_snapshot!("table", table(&[done.clone(), never], 120));
        assert_eq!(json!(done)["gpu_seconds"], 120.0);
        let requeued = JobAccount { run_seconds: 70.0, starts: 2, ..done.clone() };
        assert_eq!(row(&requeued)[6], "1m10s");
        assert_eq!(json!(done)["submitted_unix_ms"], Value::Null);
    }
}
