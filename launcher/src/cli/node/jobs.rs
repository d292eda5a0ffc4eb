//! `xlaunch jobs`: a line per job. What runs comes first, then what waits, in the order in which it will be started, then
//! what has ended, the newest first.

use std::cmp::Reverse;

use clap::Args;
use xlaunch_proto::v1::{Job, JobKind, ListRequest, NodeJobState};

use super::connect::{At, Daemon};
use super::show;
use crate::cli::console::{End, fit, put, width};
use crate::cli::query::show::shown;
use xlaunch_agent::clock::unix_ms;
use xlaunch_daemon::view::has_ended;
use xlaunch_proto::labels::node_job_state;

/// Characters of a name that are shown.
const NAME: usize = 32;

/// Options of `xlaunch jobs`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Jobs {
    /// With those that have ended.
    #[arg(short, long)]
    all: bool,
    /// The newest N alone.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: At,
}

pub(super) async fn list(options: Jobs) -> Result<(), End> {
    let mut daemon = Daemon::connect(&options.at).await?;
    let request = ListRequest { ended: options.all, limit: options.limit.unwrap_or(0) };
    let reply = daemon.client.list(request).await;
    let mut jobs = reply.map_err(|status| daemon.refusal(&status))?.into_inner().jobs;
    sort(&mut jobs);
    let text = match options.json {
        true => format!("{:#}\n", jobs.iter().map(show::json).collect::<serde_json::Value>()),
        false => table(&jobs, unix_ms(), width()),
    };
    put(text.as_bytes())
}

/// The order that users expect.
pub(super) fn sort(jobs: &mut [Job]) {
    jobs.sort_by_key(|job| match job.state() {
        NodeJobState::Queued => (1, u64::from(job.queue_position), Reverse(0)),
        state if has_ended(state) => (2, 0, Reverse(job.ended_unix_ms)),
        _ => (0, job.id, Reverse(0)),
    });
}

fn table(jobs: &[Job], now: u64, width: usize) -> String {
    if jobs.is_empty() {
        return "no jobs\n".into();
    }
    let head = ["JOB", "NAME", "USER", "STATE", "GPUS", "WORKERS", "TIME", "STEP OR REASON"];
    let rows: Vec<_> = jobs.iter().map(|job| row(job, now)).collect();
    fit(&show::columns(&head, &rows), width)
}

fn row(job: &Job, now: u64) -> Vec<String> {
    let gpus = u32::try_from(job.gpus.len()).unwrap_or(u32::MAX).max(job.gpus_wanted);
    vec![
        job.id.to_string(),
        short(&job.name),
        show::user(job),
        node_job_state(job.state()).into(),
        gpus.to_string(),
        shown(job.status.as_ref(), |status| status.world_size.to_string()),
        show::run_time(job, now),
        step_or_reason(job),
    ]
}

/// What says most: how far training is, with the reason for the state if there is one.
pub(super) fn step_or_reason(job: &Job) -> String {
    let trains = job.status.as_ref().filter(|_| job.kind() == JobKind::Trainer);
    match trains.filter(|status| status.total_steps > 0) {
        Some(status) if job.reason.is_empty() => format!("{}/{}", status.step, status.total_steps),
        Some(status) => format!("{}/{} {}", status.step, status.total_steps, job.reason),
        None => job.reason.clone(),
    }
}

/// A name of bounded length.
pub(super) fn short(name: &str) -> String {
    match name.char_indices().nth(NAME) {
        Some(_) => name.chars().take(NAME - 3).chain("...".chars()).collect(),
        None => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::StatusReply;

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
    fn what_runs_comes_before_what_waits_and_what_has_ended() {
        let mut old = job(1, NodeJobState::Done);
        (old.started_unix_ms, old.ended_unix_ms) = (1_000, 8_000);
        let mut newer = job(2, NodeJobState::Failed);
        (newer.started_unix_ms, newer.ended_unix_ms, newer.reason) =
            (1_000, 9_000, "rank 1: exit code 1".into());
        let mut runs = job(3, NodeJobState::Running);
        (runs.kind, runs.started_unix_ms) = (JobKind::Trainer.into(), 10_000);
        runs.status = Some(StatusReply { world_size: 2, step: 120, total_steps: 500, ..Default::default() });
        let mut second = job(4, NodeJobState::Queued);
        (second.queue_position, second.reason) = (2, "needs 2 GPUs, 0 are free".into());
        let mut first = job(5, NodeJobState::Queued);
        (first.queue_position, first.gpus_wanted, first.user, first.uid) = (1, 0, String::new(), 1007);
        let stops = job(6, NodeJobState::Stopping);
        let mut jobs = vec![stops, first, second, runs, newer, old];
        sort(&mut jobs);
        let expected = "\
JOB  NAME     USER  STATE     GPUS  WORKERS  TIME   STEP OR REASON
3    train-3  anna  running   2     2        3m05s  120/500
6    train-6  anna  stopping  2     -        -
5    train-5  1007  queued    0     -        -
4    train-4  anna  queued    2     -        -      needs 2 GPUs, 0 are free
2    train-2  anna  failed    2     -        8s     rank 1: exit code 1
1    train-1  anna  done      2     -        7s
";
        assert_eq!(table(&jobs, 195_000, 100), expected);
        assert_eq!(table(&[], 0, 100), "no jobs\n");
    }

    #[test]
    fn long_and_hostile_names_keep_their_column() {
        let mut long = job(1, NodeJobState::Running);
        (long.name, long.reason) = ("x".repeat(200), "y\u{1b}[2J\nz".into());
        let text = table(&[long], 0, 120);
        assert!(text.contains(&format!("{}...  anna", "x".repeat(29))), "{text}");
        assert!(text.ends_with("y\\u{1b}[2J\\u{a}z\n") && text.lines().count() == 2, "{text}");
    }
}
