//! `xlaunch cancel`.

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use xlaunch_spec::exit::ExitCode;

use super::job_list::{JobResults, job_numbers};
use super::output::QueryError;
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::job;

/// Options of `xlaunch cancel`.
#[derive(Debug, Args)]
pub(super) struct Cancel {
    /// Job numbers, as shown by `xlaunch jobs`, or ranges such as 12-21
    #[arg(value_name = "JOB", required = true)]
    jobs: Vec<String>,
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
    let jobs = job_numbers(&options.jobs)?;
    let mut daemon = DaemonClient::connect(&options.daemon).await?;
    let results = cancel_all(&mut daemon, &jobs, options.force).await;
    results.print(options.json, job::cancelled)
}

/// Cancels every job that can be cancelled, the newest first: otherwise the end of one job would start the next, and
/// every job that leaves the queue would move all jobs after it.
pub(super) async fn cancel_all(daemon: &mut DaemonClient, jobs: &[u64], force: bool) -> JobResults {
    let mut replies = BTreeMap::new();
    for job in BTreeSet::from_iter(jobs).into_iter().rev() {
        replies.insert(job, daemon.cancel(*job, force).await);
    }
    let mut results = JobResults::new();
    jobs.iter().filter_map(|job| replies.remove(job)).for_each(|reply| results.add(reply));
    results
}
