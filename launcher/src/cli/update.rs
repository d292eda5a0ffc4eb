//! `xlaunch hold`, `release` and `reprioritise`: changes to queued jobs.

use clap::Args;
use xlaunch_proto::v1::{Job, NodeJobState, UpdateRequest};
use xlaunch_spec::exit::ExitCode;

use super::job_list::{JobResults, JobSelection, call_for_each};
use super::output::QueryError;
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::text::escape;

/// Options of `xlaunch hold` and `xlaunch release`.
#[derive(Debug, Args)]
pub(super) struct Update {
    #[command(flatten)]
    jobs: JobSelection,
    /// Print the jobs as a JSON list
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonAddress,
}

/// Options of `xlaunch reprioritise`.
#[derive(Debug, Args)]
pub(super) struct Reprioritise {
    /// New priority; only administrators may set more than 0
    #[arg(long, value_name = "P", required = true, allow_negative_numbers = true)]
    priority: i32,
    #[command(flatten)]
    update: Update,
}

pub(super) async fn hold(options: Update) -> Result<ExitCode, QueryError> {
    run(options, |job| UpdateRequest { job, held: Some(true), priority: None }).await
}

pub(super) async fn release(options: Update) -> Result<ExitCode, QueryError> {
    run(options, |job| UpdateRequest { job, held: Some(false), priority: None }).await
}

pub(super) async fn reprioritise(options: Reprioritise) -> Result<ExitCode, QueryError> {
    let priority = Some(options.priority);
    run(options.update, |job| UpdateRequest { job, held: None, priority }).await
}

async fn run(options: Update, request: impl Fn(u64) -> UpdateRequest) -> Result<ExitCode, QueryError> {
    let is_held = request(0).held;
    let applies = |job: &Job| job.state() == NodeJobState::Queued && is_held != Some(job.held);
    let (daemon, jobs) = options.jobs.find(&options.daemon, applies).await?;
    let update = |mut daemon: DaemonClient, job| {
        let request = request(job);
        async move { daemon.update(request).await }
    };
    let mut results = JobResults::new();
    call_for_each(&daemon, &jobs, update).await.into_iter().for_each(|reply| results.add(reply));
    results.print(options.json, |job| updated(job, is_held))
}

/// Returns the message about an updated job. `held` is the requested state; `None` if the priority was changed.
fn updated(job: &Job, held: Option<bool>) -> String {
    let id = job.id;
    match held {
        Some(true) => format!("job {id} is held: `xlaunch release {id}` lets it start\n"),
        Some(false) => format!("job {id} is released\n"),
        None => format!("job {id} ({}) has priority {}\n", escape(&job.name), job.priority),
    }
}
