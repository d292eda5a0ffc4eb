//! Jobs on the command line, given by numbers, by ranges or all of them, and the results of calls for each of them.

use clap::{Args, ValueHint};
use rustix::process::getuid;
use xlaunch_daemon::service::MAX_CALLS_PER_CONNECTION;
use xlaunch_proto::convert::node::MAX_ARRAY_JOBS;
use xlaunch_proto::json;
use xlaunch_proto::v1::Job;
use xlaunch_spec::exit::ExitCode;

use super::output::{QueryError, print, print_note};
use crate::client::daemon::{DaemonAddress, DaemonClient};
use crate::render::text;
use xlaunch_spec::quantities::parse_range;
use xlaunch_spec::refusal::Refusal;

/// Longest range: the maximum size of an array.
pub(super) const MAX_RANGE: u64 = MAX_ARRAY_JOBS as u64;

/// The jobs of a command that changes several jobs.
#[derive(Debug, Args)]
pub(super) struct JobSelection {
    /// Job numbers, as shown by `xlaunch jobs`, or ranges such as 12-21
    #[arg(value_name = "JOB", required_unless_present = "all", value_hint = ValueHint::Other)]
    jobs: Vec<String>,
    /// Every job of your own that this applies to; as root, too, no jobs of other users
    #[arg(long, conflicts_with = "jobs")]
    all: bool,
}

impl JobSelection {
    /// Connects to the daemon, and returns the numbers of the jobs. `applies` selects those that `--all` names among
    /// jobs that have not ended.
    ///
    /// # Errors
    /// A word is not a job or a range, or the daemon does not answer.
    pub(super) async fn find(
        &self,
        daemon: &DaemonAddress,
        applies: impl Fn(&Job) -> bool,
    ) -> Result<(DaemonClient, Vec<u64>), Refusal> {
        // Before the connection, so that mistakes are reported without a daemon.
        let given = job_numbers(&self.jobs)?;
        let mut daemon = DaemonClient::connect(daemon).await?;
        if !self.all {
            return Ok((daemon, given));
        }
        let own = own_jobs(&daemon.list(false, None).await?, getuid().as_raw(), applies);
        if own.is_empty() {
            print_note("nothing to do: this applies to none of your own jobs");
        }
        Ok((daemon, own))
    }
}

/// Returns the numbers of this user's jobs that are selected, in ascending order.
fn own_jobs(listed: &[Job], uid: u32, applies: impl Fn(&Job) -> bool) -> Vec<u64> {
    let mut jobs: Vec<u64> =
        listed.iter().filter(|job| job.uid == uid && applies(job)).map(|job| job.id).collect();
    jobs.sort_unstable();
    jobs
}

/// Calls the daemon for each of these jobs, as many at a time as it accepts, in this order, and returns the replies in
/// this order. The daemon carries out those that it gets at the same time together.
pub(super) async fn call_for_each<F>(
    daemon: &DaemonClient,
    jobs: &[u64],
    call: impl Fn(DaemonClient, u64) -> F,
) -> Vec<Result<Job, Refusal>>
where
    F: Future<Output = Result<Job, Refusal>> + Send + 'static,
{
    let mut replies = Vec::with_capacity(jobs.len());
    for jobs in jobs.chunks(MAX_CALLS_PER_CONNECTION as usize) {
        let calls: Vec<_> = jobs.iter().map(|job| tokio::spawn(call(daemon.clone(), *job))).collect();
        for call in calls {
            let failed = |error: tokio::task::JoinError| {
                Err(Refusal::new(ExitCode::Internal, format!("a call failed: {error}")))
            };
            replies.push(call.await.unwrap_or_else(failed));
        }
    }
    replies
}

/// The results of a call for several jobs.
#[derive(Debug)]
pub(super) struct JobResults {
    /// Jobs for which the call succeeded.
    pub(super) jobs: Vec<Job>,
    /// One line per job for which the call failed.
    pub(super) errors: String,
    /// Exit code of the first error.
    pub(super) exit: ExitCode,
}

impl JobResults {
    pub(super) fn new() -> Self {
        Self { jobs: Vec::new(), errors: String::new(), exit: ExitCode::Done }
    }

    pub(super) fn add(&mut self, result: Result<Job, Refusal>) {
        match result {
            Ok(job) => self.jobs.push(job),
            Err(refusal) => {
                self.errors += &format!("error: {}\n", refusal.message);
                if self.exit == ExitCode::Done {
                    self.exit = refusal.exit;
                }
            }
        }
    }

    /// One line per job.
    pub(super) fn text(&self, line: impl Fn(&Job) -> String) -> String {
        self.jobs.iter().map(line).collect()
    }

    /// Prints errors, then the jobs: as JSON, or one line per job.
    pub(super) fn print(&self, as_json: bool, line: impl Fn(&Job) -> String) -> Result<ExitCode, QueryError> {
        if !self.errors.is_empty() {
            print_note(&self.errors);
        }
        let answer = if as_json {
            text::json(&self.jobs.iter().map(json::job).collect::<Vec<_>>())
        } else {
            self.text(line)
        };
        print(answer.as_bytes())?;
        Ok(self.exit)
    }
}

/// Returns the jobs named by these words: `7`, or `12-21` for a range.
fn job_numbers(words: &[String]) -> Result<Vec<u64>, Refusal> {
    let mut jobs = Vec::new();
    for word in words {
        match parse_range::<u64>(word) {
            Some(range) if range.end() - range.start() < MAX_RANGE => jobs.extend(range),
            Some(_) => {
                let message = format!(
                    "`{word}` names too many jobs: a range has at most {MAX_RANGE}; several can be given"
                );
                return Err(Refusal::new(ExitCode::Usage, message));
            }
            None => {
                let message = format!(
                    "`{word}` is not a job number, nor a range such as 12-21; `xlaunch jobs` lists job numbers"
                );
                return Err(Refusal::new(ExitCode::Usage, message));
            }
        }
    }
    Ok(jobs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_numbers_and_ranges() {
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(job_numbers(&words("12 3-5 7-7")).unwrap(), [12, 3, 4, 5, 7]);
        for text in ["foo", "-1", "1.5", "", "5-3", "1-", "99999999999999999999"] {
            let refusal = job_numbers(&[text.to_owned()]).unwrap_err();
            assert!(
                refusal.message.starts_with(&format!("`{text}` is not a job number")),
                "{}",
                refusal.message
            );
            assert_eq!(refusal.exit, ExitCode::Usage);
        }
        let refusal = job_numbers(&["1-1001".to_owned()]).unwrap_err();
        let expected = "`1-1001` names too many jobs: a range has at most 1000; several can be given";
        assert_eq!(refusal.message, expected);
    }

    #[test]
    fn all_means_the_callers_own_jobs() {
        let job = |id, uid, priority| Job { id, uid, priority, ..Job::default() };
        let listed = [job(9, 7, 0), job(8, 0, 0), job(4, 7, 1), job(3, 7, 0)];
        assert_eq!(own_jobs(&listed, 7, |_| true), [3, 4, 9]);
        assert_eq!(own_jobs(&listed, 7, |job| job.priority == 0), [3, 9]);
        assert_eq!(
            own_jobs(&listed, 0, |_| true),
            [8],
            "root cancels no jobs of others unless it names them"
        );
    }
}
