//! `xlaunch logs`.

use std::io::IsTerminal;
use std::path::Path;

use clap::Args;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::{JobKind, LogStream, LogsRequest};

use super::output::{QueryError, print, print_note};
use super::target::{Launches, Server, Target};
use crate::client::daemon::DaemonClient;
use crate::client::launches;
use crate::render::sanitize::LogSanitizer;

/// Options of `xlaunch logs`.
#[derive(Debug, Args)]
pub(super) struct Logs {
    #[command(flatten)]
    target: Target,
    /// Rank whose output to print
    #[arg(long, value_name = "R", default_value_t = 0)]
    rank: u32,
    /// Print stderr instead of stdout
    #[arg(long)]
    stderr: bool,
    /// Keep printing until the launch or job ends, across restarts
    #[arg(short, long)]
    follow: bool,
    /// Start with the last N lines
    #[arg(long, value_name = "N")]
    tail: Option<u64>,
}

pub(super) async fn run(options: Logs) -> Result<ExitCode, QueryError> {
    let stream = if options.stderr { LogStream::Stderr } else { LogStream::Stdout };
    let request = LogsRequest {
        rank: options.rank,
        stream: stream.into(),
        follow: options.follow,
        tail_lines: options.tail,
        after: None,
    };
    match options.target.server("logs").await? {
        Server::Daemon(daemon, job) => job_logs(daemon, job, request).await?,
        Server::Agents(launches) => launch_logs(&launches, request).await?,
    }
    Ok(ExitCode::Done)
}

/// Prints the log of a job unchanged, except another user's on a terminal: that is sanitized.
async fn job_logs(mut daemon: DaemonClient, job: u64, request: LogsRequest) -> Result<(), QueryError> {
    if request.follow {
        daemon.wait_until_started(job).await?;
    }
    let own = rustix::process::getuid().as_raw();
    let sanitized = std::io::stdout().is_terminal() && daemon.get(job).await?.uid != own;
    let mut sanitizer = sanitized.then(LogSanitizer::default);
    let mut empty = true;
    let print = |chunk: &[u8]| {
        empty &= chunk.is_empty();
        match &mut sanitizer {
            Some(sanitizer) => print(sanitizer.text(chunk).as_bytes()),
            None => print(chunk),
        }
    };
    daemon.logs(job, request, print).await?;
    if empty
        && let Ok(described) = daemon.get(job).await
        && let Some(note) = empty_note(&request, described.kind(), &format!("xlaunch status {job}"), None)
    {
        print_note(&note);
    }
    Ok(())
}

async fn launch_logs(target: &Launches, request: LogsRequest) -> Result<(), QueryError> {
    let launch = target.one().await?;
    let mut agent = launches::connect(&launch).await?;
    let failed = |status: tonic::Status| QueryError::from(launches::call_error(&launch, &status));
    let mut chunks = agent.logs(request).await.map_err(failed)?.into_inner();
    let mut empty = true;
    loop {
        match chunks.message().await {
            Ok(Some(chunk)) => {
                empty &= chunk.bytes.is_empty();
                print(&chunk.bytes)?;
            }
            Ok(None) => break,
            // The agent ended before everything was read. The rest is in the log files, if they are kept.
            Err(status) if request.follow && !launches::is_running(&launch) => {
                return Err(format!("{} has ended: {}", launch.name, status.message()).into());
            }
            Err(status) => return Err(failed(status)),
        }
    }
    // A launch that has ended in the meantime needs no note.
    if empty && let Ok(status) = launches::status(&launch).await {
        let metrics = Path::new(&status.log_dir).with_file_name("metrics.jsonl");
        let metrics = metrics.exists().then_some(&*metrics);
        if let Some(note) = empty_note(&request, status.kind(), "xlaunch status", metrics) {
            print_note(&note);
        }
    }
    Ok(())
}

/// Explains why nothing was printed: workers of the built-in trainer write only when something is wrong.
fn empty_note(request: &LogsRequest, kind: JobKind, status: &str, metrics: Option<&Path>) -> Option<String> {
    if kind != JobKind::Trainer || request.tail_lines == Some(0) {
        return None;
    }
    let stream = if request.stream() == LogStream::Stderr { "stderr" } else { "stdout" };
    let metrics = metrics.map(|path| format!(" and in {}", path.display())).unwrap_or_default();
    Some(format!(
        "rank {} has written nothing to {stream}; a training job reports its progress in `{status}`{metrics}",
        request.rank
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_log_of_a_training_job_is_explained() {
        let note = |kind, stream: LogStream, tail_lines, metrics| {
            let request =
                LogsRequest { rank: 1, stream: stream.into(), follow: false, tail_lines, after: None };
            empty_note(&request, kind, "xlaunch status", metrics)
        };
        let metrics = Some(Path::new("/runs/train/1/metrics.jsonl"));
        let expected = "rank 1 has written nothing to stdout; a training job reports its progress in \
                        `xlaunch status` and in /runs/train/1/metrics.jsonl";
        assert_eq!(note(JobKind::Trainer, LogStream::Stdout, None, metrics).as_deref(), Some(expected));
        let stderr = note(JobKind::Trainer, LogStream::Stderr, Some(9), None).unwrap();
        assert!(stderr.contains("to stderr;") && stderr.ends_with("in `xlaunch status`"), "{stderr}");
        assert_eq!(note(JobKind::Command, LogStream::Stdout, None, None), None);
        assert_eq!(note(JobKind::Trainer, LogStream::Stdout, Some(0), None), None);
    }
}
