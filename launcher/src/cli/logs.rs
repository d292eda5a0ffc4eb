//! `xlaunch logs`.

use std::io::IsTerminal;
use std::path::Path;

use clap::Args;
use xlaunch_proto::v1::{JobKind, LogLoss, LogStream, LogsRequest, RankStatus, StatusReply};
use xlaunch_spec::exit::ExitCode;

use super::choice::whole;
use super::output::{QueryError, print, print_note};
use super::target::{Launches, Server, Target};
use crate::client::daemon::DaemonClient;
use crate::client::launches;
use crate::render::sanitize::LogSanitizer;
use crate::render::text::escape;

/// Options of `xlaunch logs`.
#[derive(Debug, Args)]
pub(super) struct Logs {
    #[command(flatten)]
    target: Target,
    /// Rank whose output to print
    #[arg(long, value_name = "R", default_value_t = 0, value_parser = whole(0..=u32::MAX))]
    rank: u32,
    /// Print stderr instead of stdout
    #[arg(long)]
    stderr: bool,
    /// Keep printing until the launch or job ends, across restarts
    #[arg(short, long)]
    follow: bool,
    /// Start with the last N lines
    #[arg(long, value_name = "N", value_parser = whole(0..=u64::MAX))]
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

/// Prints the log of a job unchanged, except that another user's log is sanitized on a terminal.
async fn job_logs(mut daemon: DaemonClient, job: u64, request: LogsRequest) -> Result<(), QueryError> {
    if request.follow {
        daemon.wait_until_started(job).await?;
    }
    let note = |kind| trainer_note(&request, kind, &format!("xlaunch status {job}"), None);
    if request.follow
        && let Some(note) = note(daemon.get(job).await?.kind())
    {
        print_note(&note);
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
        && !request.follow
        && let Ok(described) = daemon.get(job).await
        && let Some(note) = note(described.kind())
    {
        print_note(&note);
    }
    Ok(())
}

async fn launch_logs(target: &Launches, request: LogsRequest) -> Result<(), QueryError> {
    let launch = target.one().await?;
    let note = |status: &StatusReply| {
        let metrics = Path::new(&status.log_dir).with_file_name("metrics.jsonl");
        let metrics = metrics.exists().then_some(&*metrics);
        trainer_note(&request, status.kind(), "xlaunch status", metrics)
    };
    if request.follow
        && let Some(note) = launches::status(&launch).await.ok().as_ref().and_then(note)
    {
        print_note(&note);
    }
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
    // A launch that has ended in the meantime needs no note: its log ends with the number of lost bytes.
    let Ok(status) = launches::status(&launch).await else { return Ok(()) };
    for note in loss_notes(&request, &status.ranks) {
        print_note(&note);
    }
    if empty
        && !request.follow
        && let Some(note) = note(&status)
    {
        print_note(&note);
    }
    Ok(())
}

/// Returns notes about bytes that are missing from the log of the current attempt.
fn loss_notes(request: &LogsRequest, ranks: &[RankStatus]) -> Vec<String> {
    let name = if request.stream() == LogStream::Stderr { "stderr.log" } else { "stdout.log" };
    let rank = ranks.iter().find(|it| it.rank == request.rank);
    let Some(loss) = rank.and_then(|it| it.log_losses.iter().find(|loss| loss.file == name)) else {
        return Vec::new();
    };
    let LogLoss { lost_bytes: lost, rotated_bytes: rotated, reason, .. } = loss;
    let lost = (*lost > 0).then(|| format!("{lost} bytes of this log were lost: {}", escape(reason)));
    // Rotated bytes do not matter to a user who has asked for the last lines only.
    let is_whole = request.tail_lines.is_none() && *rotated > 0;
    let rotated = is_whole.then(|| format!("the first {rotated} bytes of this log were removed by rotation"));
    lost.into_iter().chain(rotated).collect()
}

/// Returns a note that explains an empty log, or one that is followed and may stay empty: workers of the built-in
/// trainer write only when something is wrong.
fn trainer_note(
    request: &LogsRequest,
    kind: JobKind,
    status: &str,
    metrics: Option<&Path>,
) -> Option<String> {
    if kind != JobKind::Trainer || request.tail_lines == Some(0) {
        return None;
    }
    let stream = if request.stream() == LogStream::Stderr { "stderr" } else { "stdout" };
    let metrics = metrics.map(|path| format!(" and in {}", path.display())).unwrap_or_default();
    let writes = if request.follow { "writes to" } else { "has written nothing to" };
    let when = if request.follow { " only if something is wrong" } else { "" };
    Some(format!(
        "rank {} {writes} {stream}{when}; a training job reports its progress in `{status}`{metrics}",
        request.rank
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_rotated_bytes_of_a_log_are_noted() {
        let loss = |file: &str, lost_bytes| LogLoss {
            file: file.into(),
            lost_bytes,
            reason: "disk\x1b full".into(),
            rotated_bytes: 9,
        };
        let log_losses = vec![loss("stdout.log", 5), loss("stderr.log", 0)];
        let ranks = [RankStatus::default(), RankStatus { rank: 1, log_losses, ..RankStatus::default() }];
        let notes = |rank, stream: LogStream, tail_lines| {
            let request = LogsRequest { rank, stream: stream.into(), follow: false, tail_lines, after: None };
            loss_notes(&request, &ranks)
        };
        let rotated = "the first 9 bytes of this log were removed by rotation".to_owned();
        let lost = "5 bytes of this log were lost: disk\\u{1b} full".to_owned();
        assert_eq!(notes(1, LogStream::Stdout, None), [lost.clone(), rotated.clone()]);
        assert_eq!(notes(1, LogStream::Stdout, Some(3)), [lost]);
        assert_eq!(notes(1, LogStream::Stderr, None), [rotated]);
        assert!(notes(0, LogStream::Stdout, None).is_empty());
    }

    #[test]
    fn empty_log_of_a_training_job_is_explained() {
        let request = |follow, stream: LogStream, tail_lines| LogsRequest {
            rank: 1,
            stream: stream.into(),
            follow,
            tail_lines,
            after: None,
        };
        let note = |kind, stream: LogStream, tail_lines, metrics| {
            trainer_note(&request(false, stream, tail_lines), kind, "xlaunch status", metrics)
        };
        let metrics = Some(Path::new("/runs/train/1/metrics.jsonl"));
        let expected = "rank 1 has written nothing to stdout; a training job reports its progress in \
                        `xlaunch status` and in /runs/train/1/metrics.jsonl";
        assert_eq!(note(JobKind::Trainer, LogStream::Stdout, None, metrics).as_deref(), Some(expected));
        let stderr = note(JobKind::Trainer, LogStream::Stderr, Some(9), None).unwrap();
        assert!(stderr.contains("to stderr;") && stderr.ends_with("in `xlaunch status`"), "{stderr}");
        assert_eq!(note(JobKind::Command, LogStream::Stdout, None, None), None);
        assert_eq!(note(JobKind::Trainer, LogStream::Stdout, Some(0), None), None);
        let followed = request(true, LogStream::Stdout, None);
        let note = trainer_note(&followed, JobKind::Trainer, "xlaunch status", None).unwrap();
        assert!(note.starts_with("rank 1 writes to stdout only if something is wrong; "), "{note}");
    }
}
