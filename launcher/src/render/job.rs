//! A job of the daemon, as text for people.

use std::time::Duration;

use xlaunch_proto::v1::{Job, JobKind, NodeJobState};
use xlaunch_spec::exit::ExitCode;

use super::launch;
use super::text::{bytes, escape, fit, seconds};
use xlaunch_daemon::view::has_ended;
use xlaunch_spec::quantities::{bytes_text, rough_time_text, time_text};

/// Age above which a status is shown with its age.
const STALE_STATUS_SECONDS: f64 = 5.0;

/// Returns a job with its ranks. Lines are truncated to `width` characters.
pub(crate) fn text(job: &Job, now: u64, width: usize) -> String {
    let mut out = format!("job {}  {}  {}\n", job.id, escape(&job.name), escape(&state_and_reason(job)));
    out += &format!("user {}  {}", escape(&user(job)), times(job, now));
    if job.priority != 0 {
        out += &format!("  priority {}", job.priority);
    }
    out += &format!("\n{}{}\n", gpus(job), reserved(job));
    out += &scheduling(job, now);
    if !job.command_line.is_empty() {
        out += &format!("{}\n", escape(&job.command_line));
    }
    // Nothing but its unit may be known of a job that was listed again.
    if !job.work_dir.is_empty() {
        out += &format!("in {}\n", escape(&job.work_dir));
    }
    if let Some(code) = job.exit_code {
        // A command's exit codes are its own.
        let known = i32::try_from(code).ok().and_then(ExitCode::from_code);
        let known = known.filter(|_| job.kind() == JobKind::Trainer);
        let meaning = known.map_or_else(String::new, |exit| format!(" ({})", exit.meaning()));
        out += &format!("exit code {code}{meaning}\n");
    }
    if let Some(cpu) = job.cpu_seconds {
        let memory = job.peak_memory_bytes.map(|peak| format!(", {} of memory at most", bytes(peak)));
        out += &format!("used {} of CPU time{}\n", rough_time_text(cpu), memory.unwrap_or_default());
    }
    if !job.report.is_empty() {
        out += &format!("\n{}\n", job.report.trim_end());
    }
    if let Some(status) = &job.status {
        out += &format!("logs {}\n", escape(&status.log_dir));
        if status.kind() != JobKind::Command {
            out += &launch::training(status);
        }
        if job.status_age_seconds >= STALE_STATUS_SECONDS && !has_ended(job.state()) {
            out += &format!("status from {} ago\n", rough_time_text(job.status_age_seconds));
        }
        out += &launch::time(status);
        out += &launch::restarts(status, now / 1000);
        out.push('\n');
        out += &launch::ranks(status, width);
    }
    fit(&out, width)
}

fn times(job: &Job, now: u64) -> String {
    let since = |at: u64| rough_time_text(seconds(now.saturating_sub(at) / 1000));
    match (job.started_unix_ms, job.ended_unix_ms) {
        (0, 0) => format!("waiting for {}", since(job.submitted_unix_ms)),
        (0, ended) => format!("ended {} ago without starting", since(ended)),
        (_, 0) => {
            format!("submitted {} ago  running for {}", since(job.submitted_unix_ms), run_time(job, now))
        }
        (_, ended) => format!("ran for {}  ended {} ago", run_time(job, now), since(ended)),
    }
}

/// Returns how long the job has run, or `-` if it has not started.
pub(crate) fn run_time(job: &Job, now: u64) -> String {
    match (job.started_unix_ms, job.ended_unix_ms) {
        (0, _) => "-".into(),
        (started, ended) => {
            let until = if ended == 0 { now } else { ended };
            rough_time_text(seconds(until.saturating_sub(started) / 1000))
        }
    }
}

fn gpus(job: &Job) -> String {
    match (job.gpus.len(), job.gpus_wanted) {
        (0, 0) => "no GPUs".into(),
        (0, wanted) => format!("{wanted} GPUs requested"),
        (held, _) => format!("{held} GPUs: {}", escape(&job.gpus.join(" "))),
    }
}

/// Returns the cores and memory that the job reserves.
fn reserved(job: &Job) -> String {
    let Some(scheduling) = &job.scheduling else { return String::new() };
    let cpus = scheduling.cpus.map_or_else(String::new, |cpus| format!("  {cpus} CPUs"));
    let memory = scheduling
        .memory_bytes
        .map_or_else(String::new, |memory| format!("  {} of memory", bytes_text(memory)));
    cpus + &memory
}

/// Returns the time limit in seconds.
pub(crate) fn time_limit(job: &Job) -> Option<u64> {
    job.scheduling.as_ref()?.time_limit_seconds
}

/// Returns a line with time limit, reservation, array and requeues; empty if there are none.
fn scheduling(job: &Job, now: u64) -> String {
    let mut parts = Vec::new();
    if let Some(limit) = time_limit(job) {
        parts.push(format!("time limit {}", time_text(Duration::from_secs(limit))));
    }
    if job.time_limit_unix_ms > 0 && job.ended_unix_ms == 0 {
        parts.push(format!(
            "{} remaining",
            rough_time_text(seconds(job.time_limit_unix_ms.saturating_sub(now) / 1000))
        ));
    }
    if let (Some(first), Some(index)) = (job.array_job, job.array_index) {
        parts.push(format!("index {index} of array {first}"));
    }
    if job.requeues > 0 {
        let times = if job.requeues == 1 { "once".into() } else { format!("{} times", job.requeues) };
        parts.push(format!("requeued {times}"));
    }
    if job.starts_by_unix_ms > 0 {
        let within = rough_time_text(seconds(job.starts_by_unix_ms.saturating_sub(now) / 1000));
        parts.push(format!("starts within {within} at the latest"));
    }
    if parts.is_empty() { String::new() } else { parts.join("  ") + "\n" }
}

/// Returns the user's name, or the uid if it has no name.
pub(crate) fn user(job: &Job) -> String {
    if job.user.is_empty() { job.uid.to_string() } else { job.user.clone() }
}

/// Returns state and reason, such as `queued, position 2 (no free GPU)`.
pub(crate) fn state_and_reason(job: &Job) -> String {
    let mut out = job.state().label().to_owned();
    if job.state() == NodeJobState::Queued && job.queue_position > 0 {
        out += &format!(", position {}", job.queue_position);
    }
    if !job.reason.is_empty() {
        out += &format!(" ({})", job.reason);
    }
    out
}

/// Returns one line about a job that was cancelled.
pub(crate) fn cancelled(job: &Job) -> String {
    let id = job.id;
    match job.state() {
        NodeJobState::Cancelled => format!("job {id} was cancelled\n"),
        NodeJobState::Done | NodeJobState::Failed | NodeJobState::Lost => {
            format!("job {id} had already ended: {}\n", job.state().label())
        }
        _ => format!("job {id} is stopping\n"),
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::{JobState, RankState, RankStatus, Scheduling, StatusReply};

    use super::*;

    fn running() -> Job {
        let rank = RankStatus { pid: 812, state: RankState::Running.into(), step: 120, ..Default::default() };
        let status = StatusReply {
            kind: JobKind::Trainer.into(),
            state: JobState::Running.into(),
            log_dir: "/runs/a/logs".into(),
            world_size: 1,
            step: 120,
            total_steps: 500,
            loss: 2.5,
            tokens_per_second: 46_123.0,
            ranks: vec![rank],
            ..Default::default()
        };
        Job {
            id: 7,
            name: "train".into(),
            uid: 1000,
            user: "anna".into(),
            kind: JobKind::Trainer.into(),
            state: NodeJobState::Running.into(),
            gpus_wanted: 2,
            gpus: vec!["GPU-a".into(), "GPU-b".into()],
            command_line: "train.toml".into(),
            work_dir: "/home/anna".into(),
            submitted_unix_ms: 1_000_000,
            started_unix_ms: 1_060_000,
            status: Some(status),
            status_age_seconds: 12.0,
            ..Default::default()
        }
    }

    #[test]
    fn running_job_is_shown_with_its_ranks() {
        insta::assert_snapshot!("running", text(&running(), 1_245_000, 100));
    }

    #[test]
    fn queued_and_failed_jobs_show_their_reason() {
        let mut waits = Job { status: None, gpus: Vec::new(), started_unix_ms: 0, ..running() };
        waits.state = NodeJobState::Queued.into();
        (waits.queue_position, waits.reason, waits.priority) = (2, "needs 2 GPUs, 1 is free".into(), -5);
        insta::assert_snapshot!("queued", text(&waits, 1_060_000, 100));
        let mut failed = Job { status: None, ended_unix_ms: 1_070_000, exit_code: Some(76), ..running() };
        failed.state = NodeJobState::Failed.into();
        failed.report = "rank 1 failed\n  \u{1b}[2Jlast line\n".into();
        insta::assert_snapshot!("failed", text(&failed, 1_075_000, 100));
    }

    #[test]
    fn limits_and_reservations_have_a_line() {
        let mut limited = Job { status: None, ..running() };
        let (cpus, memory_bytes, time_limit_seconds) = (Some(16), Some(64 << 30), Some(14_400));
        limited.scheduling =
            Some(Scheduling { cpus, memory_bytes, time_limit_seconds, ..Scheduling::default() });
        (limited.time_limit_unix_ms, limited.requeues) = (15_460_000, 2);
        (limited.array_job, limited.array_index) = (Some(5), Some(9));
        insta::assert_snapshot!("limited", text(&limited, 1_245_000, 120));
        let mut waits = Job { time_limit_unix_ms: 0, started_unix_ms: 0, gpus: Vec::new(), ..limited };
        waits.state = NodeJobState::Queued.into();
        (waits.starts_by_unix_ms, waits.requeues, waits.array_job) = (1_365_000, 0, None);
        insta::assert_snapshot!("starts-by", text(&waits, 1_245_000, 120));
    }

    #[test]
    fn ended_command_shows_what_it_has_used_and_its_exit_code_without_a_meaning() {
        let mut done = Job { kind: JobKind::Command.into(), exit_code: Some(76), ..running() };
        done.state = NodeJobState::Failed.into();
        (done.ended_unix_ms, done.command_line) = (1_070_000, "python train.py".into());
        (done.cpu_seconds, done.peak_memory_bytes) = (Some(90.0), Some(3_000_000));
        let status = done.status.as_mut().unwrap();
        (status.kind, status.state) = (JobKind::Command.into(), JobState::Failed.into());
        (status.ranks[0].state, status.ranks[0].exit) = (RankState::Exited.into(), "exit code 76".into());
        insta::assert_snapshot!("ended-command", text(&done, 1_245_000, 100));
        done.peak_memory_bytes = None;
        assert!(text(&done, 1_245_000, 100).contains("\nused 1m30s of CPU time\n"));
    }

    #[test]
    fn job_that_only_its_unit_names_has_no_line_for_an_unknown_directory() {
        let mut found = Job { status: None, gpus: Vec::new(), gpus_wanted: 0, ..running() };
        (found.command_line, found.work_dir) = (String::new(), String::new());
        let text = text(&found, 1_245_000, 100);
        assert!(text.ends_with("\nno GPUs\n"), "{text}");
    }

    #[test]
    fn hostile_names_stay_on_their_line() {
        let mut hostile = running();
        hostile.name = "a\nuser root".into();
        hostile.user = "\u{1b}[31m".into();
        let text = text(&hostile, 1_245_000, 40);
        assert!(text.starts_with("job 7  a\\u{a}user root  running\nuser \\u{1b}[31m"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
    }
}
