//! Job numbers on the command line, given singly or as ranges, and the results of calls for each of them.

use xlaunch_proto::convert::node::MAX_ARRAY_JOBS;
use xlaunch_proto::json;
use xlaunch_proto::v1::Job;
use xlaunch_spec::exit::ExitCode;

use super::output::{QueryError, print, print_note};
use crate::render::text;
use xlaunch_spec::quantities::parse_range;
use xlaunch_spec::refusal::Refusal;

/// Longest range: the maximum size of an array.
pub(super) const MAX_RANGE: u64 = MAX_ARRAY_JOBS as u64;

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
pub(super) fn job_numbers(words: &[String]) -> Result<Vec<u64>, Refusal> {
    let mut jobs = Vec::new();
    for word in words {
        match parse_range::<u64>(word) {
            Some(range) if range.end() - range.start() < MAX_RANGE => jobs.extend(range),
            Some(_) => {
                let message =
                    format!("`{word}` names too many jobs: at most {MAX_RANGE} can be given as a range");
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
        assert!(refusal.message.contains("too many jobs"), "{}", refusal.message);
    }
}
