//! The table of jobs: one line per job.

use std::cmp::Reverse;
use std::time::Duration;

use xlaunch_proto::v1::{Job, NodeJobState};

use super::job::{run_time, time_limit, user};
use super::launch;
use super::text::{columns, fit, or_dash};
use xlaunch_daemon::view::has_ended;
use xlaunch_spec::quantities::time_text;

/// Maximum length of a name in tables; longer names are truncated.
const MAX_NAME_CHARS: usize = 32;

/// Sorts jobs for `xlaunch jobs`: by number, so the newest is last, whatever their state.
pub(crate) fn sort_by_number(jobs: &mut [Job]) {
    jobs.sort_by_key(|job| job.id);
}

/// Sorts jobs for `xlaunch top`: running jobs first, then queued ones in the order in which they will start, then ended
/// ones, the newest first.
pub(crate) fn sort_by_state(jobs: &mut [Job]) {
    jobs.sort_by_key(|job| match job.state() {
        NodeJobState::Queued => (1, u64::from(job.queue_position), Reverse(0)),
        state if has_ended(state) => (2, 0, Reverse(job.ended_unix_ms)),
        _ => (0, job.id, Reverse(0)),
    });
}

pub(crate) fn table(jobs: &[Job], now: u64, width: usize) -> String {
    if jobs.is_empty() {
        return "no jobs\n".into();
    }
    let head = ["JOB", "NAME", "USER", "STATE", "GPUS", "WORKERS", "TIME", "LIMIT", "STEP OR REASON"];
    let rows: Vec<_> = jobs.iter().map(|job| row(job, now)).collect();
    fit(&columns(&head, &rows), width)
}

fn row(job: &Job, now: u64) -> Vec<String> {
    let gpus = u32::try_from(job.gpus.len()).unwrap_or(u32::MAX).max(job.gpus_wanted);
    vec![
        job.id.to_string(),
        truncated_name(&job.name),
        user(job),
        job.state().label().into(),
        gpus.to_string(),
        or_dash(job.status.as_ref(), |status| status.world_size.to_string()),
        run_time(job, now),
        or_dash(time_limit(job), |limit| time_text(Duration::from_secs(limit))),
        step_or_reason(job),
    ]
}

/// Returns the progress of a training job, or of a command that sends heartbeats with its step, and the reason for the
/// job's state if there is one.
pub(crate) fn step_or_reason(job: &Job) -> String {
    let step = job.status.as_ref().and_then(|status| match (status.step, status.total_steps) {
        (_, 1..) => Some(launch::progress(status)),
        (0, 0) => None,
        (step, 0) => Some(step.to_string()),
    });
    let reason = Some(&job.reason).filter(|reason| !reason.is_empty()).cloned();
    step.into_iter().chain(reason).collect::<Vec<_>>().join(" ")
}

pub(crate) fn truncated_name(name: &str) -> String {
    match name.char_indices().nth(MAX_NAME_CHARS) {
        Some(_) => name.chars().take(MAX_NAME_CHARS - 3).chain("...".chars()).collect(),
        None => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::{JobKind, StatusReply};

    use super::*;

    fn job(id: u64, state: NodeJobState) -> Job {
        Job {
            id,
            name: format!("train-{id}"),
            user: "anna".into(),
            state: state.into(),
            gpus_wanted: 2,
            ..Default::default()
        }
    }

    #[test]
    fn running_jobs_come_before_queued_and_ended_ones() {
        let mut old = job(1, NodeJobState::Done);
        (old.started_unix_ms, old.ended_unix_ms) = (1_000, 8_000);
        let mut newer = job(2, NodeJobState::Failed);
        (newer.started_unix_ms, newer.ended_unix_ms, newer.reason) =
            (1_000, 9_000, "rank 1: exit code 1".into());
        let mut runs = job(3, NodeJobState::Running);
        (runs.kind, runs.started_unix_ms) = (JobKind::Trainer.into(), 10_000);
        runs.scheduling.get_or_insert_default().time_limit_seconds = Some(14_400);
        runs.status = Some(StatusReply { world_size: 2, step: 120, total_steps: 500, ..Default::default() });
        let mut second = job(4, NodeJobState::Queued);
        (second.queue_position, second.reason) = (2, "needs 2 GPUs, 0 are free".into());
        let mut first = job(5, NodeJobState::Queued);
        (first.queue_position, first.gpus_wanted, first.user, first.uid) = (1, 0, String::new(), 1007);
        let mut stops = job(6, NodeJobState::Stopping);
        // A command with heartbeats.
        stops.status = Some(StatusReply { world_size: 1, step: 12, ..Default::default() });
        let mut jobs = vec![stops, first, second, runs, newer, old];
        sort_by_state(&mut jobs);
        insta::assert_snapshot!("table", table(&jobs, 195_000, 100));
        assert_eq!(table(&[], 0, 100), "no jobs\n");
        sort_by_number(&mut jobs);
        assert_eq!(jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn long_and_hostile_names_stay_in_their_column() {
        let mut long = job(1, NodeJobState::Running);
        (long.name, long.reason) = ("x".repeat(200), "y\u{1b}[2J\nz".into());
        let text = table(&[long], 0, 120);
        assert!(text.contains(&format!("{}...  anna", "x".repeat(29))), "{text}");
        assert!(text.ends_with("y\\u{1b}[2J\\u{a}z\n") && text.lines().count() == 2, "{text}");
    }
}
