//! `xlaunch cancel`.

use clap::Args;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::Job;

use super::output::{QueryError, print, print_note};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::job;
use xlaunch_agent::Refusal;

/// Options of `xlaunch cancel`.
#[derive(Debug, Args)]
pub(super) struct Cancel {
    /// Job numbers, as shown by `xlaunch jobs`
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

/// The outcome of cancelling several jobs.
#[derive(Debug)]
pub(super) struct CancelResults {
    /// Jobs that are stopping or have ended.
    pub(super) jobs: Vec<Job>,
    /// One line per job that could not be cancelled.
    pub(super) errors: String,
    /// That of the first error.
    pub(super) exit: ExitCode,
}

impl CancelResults {
    /// One line per job.
    pub(super) fn text(&self) -> String {
        self.jobs.iter().map(job::cancelled).collect()
    }
}

pub(super) async fn run(options: Cancel) -> Result<ExitCode, QueryError> {
    let jobs = options.jobs.iter().map(|text| job_number(text)).collect::<Result<Vec<_>, _>>()?;
    let mut daemon = DaemonClient::connect(&options.daemon).await?;
    let results = cancel_all(&mut daemon, &jobs, options.force).await;
    if !results.errors.is_empty() {
        print_note(&results.errors);
    }
    let answer = match options.json {
        true => format!("{:#}\n", results.jobs.iter().map(job::json).collect::<serde_json::Value>()),
        false => results.text(),
    };
    print(answer.as_bytes())?;
    Ok(results.exit)
}

fn job_number(text: &str) -> Result<u64, Refusal> {
    let message = || format!("`{text}` is not a job number; `xlaunch jobs` lists them");
    text.parse().map_err(|_| Refusal::new(ExitCode::Usage, message()))
}

/// Cancels every job that can be cancelled.
pub(super) async fn cancel_all(daemon: &mut DaemonClient, jobs: &[u64], force: bool) -> CancelResults {
    let mut results = CancelResults { jobs: Vec::new(), errors: String::new(), exit: ExitCode::Done };
    for &job in jobs {
        match daemon.cancel(job, force).await {
            Ok(job) => results.jobs.push(job),
            Err(refusal) => {
                results.errors += &format!("error: {}\n", refusal.message);
                if results.exit == ExitCode::Done {
                    results.exit = refusal.exit;
                }
            }
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_that_is_no_number_is_named() {
        assert_eq!(job_number("12").ok(), Some(12));
        for text in ["foo", "-1", "1.5", "", "99999999999999999999"] {
            let refusal = job_number(text).unwrap_err();
            assert!(
                refusal.message.starts_with(&format!("`{text}` is not a job number")),
                "{}",
                refusal.message
            );
            assert_eq!(refusal.exit, ExitCode::Usage);
        }
    }
}
