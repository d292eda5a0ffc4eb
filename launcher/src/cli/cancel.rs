//! `xlaunch cancel`.

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use xlaunch_spec::exit::ExitCode;

use super::job_list::{JobResults, JobSelection, call_for_each};
use super::output::QueryError;
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::job;

/// Options of `xlaunch cancel`.
#[derive(Debug, Args)]
pub(super) struct Cancel {
    #[command(flatten)]
    jobs: JobSelection,
    /// Kill running jobs at once, without a checkpoint
    #[arg(long)]
    force: bool,
    /// Print the cancelled jobs as a JSON list
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonAddress,
}

pub(super) async fn run(options: Cancel) -> Result<ExitCode, QueryError> {
    let (daemon, jobs) = options.jobs.find(&options.daemon, |_| true).await?;
    let results = cancel_all(&daemon, &jobs, options.force).await;
    results.print(options.json, job::cancelled)
}

/// Cancels every job that can be cancelled, the newest first: otherwise the end of one job would start the next, and
/// every job that leaves the queue would move all jobs after it.
pub(super) async fn cancel_all(daemon: &DaemonClient, jobs: &[u64], force: bool) -> JobResults {
    let newest_first: Vec<u64> = BTreeSet::from_iter(jobs).into_iter().rev().copied().collect();
    let cancel = |mut daemon: DaemonClient, job| async move { daemon.cancel(job, force).await };
    let replies = call_for_each(daemon, &newest_first, cancel).await;
    let mut replies = BTreeMap::from_iter(newest_first.iter().zip(replies));
    let mut results = JobResults::new();
    jobs.iter().filter_map(|job| replies.remove(job)).for_each(|reply| results.add(reply));
    results
}
