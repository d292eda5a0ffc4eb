//! `xlaunch logs`.

use std::io::IsTerminal;

use clap::Args;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::{LogStream, LogsRequest};

use super::output::{QueryError, print};
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
    };
    match options.target.server("logs").await? {
        Server::Daemon(daemon, job) => job_logs(daemon, job, request).await?,
        Server::Agents(launches) => launch_logs(&launches, request).await?,
    }
    Ok(ExitCode::Done)
}

/// Prints the log of a job unchanged, except another user's on a terminal: that is sanitized.
async fn job_logs(mut daemon: DaemonClient, job: u64, request: LogsRequest) -> Result<(), QueryError> {
    let own = rustix::process::getuid().as_raw();
    if std::io::stdout().is_terminal() && daemon.get(job).await?.uid != own {
        let mut log = LogSanitizer::default();
        return daemon.logs(job, request, |chunk| print(log.text(chunk).as_bytes())).await;
    }
    daemon.logs(job, request, print).await
}

async fn launch_logs(target: &Launches, request: LogsRequest) -> Result<(), QueryError> {
    let launch = target.one().await?;
    let mut agent = launches::connect(&launch).await?;
    let failed = |status: tonic::Status| QueryError::from(launches::call_error(&launch, &status));
    let mut chunks = agent.logs(request).await.map_err(failed)?.into_inner();
    loop {
        match chunks.message().await {
            Ok(Some(chunk)) => print(&chunk.bytes)?,
            Ok(None) => return Ok(()),
            // The agent ended before everything was read. The rest is in the log files, if they are kept.
            Err(status) if request.follow && !launches::is_running(&launch) => {
                return Err(format!("{} has ended: {}", launch.name, status.message()).into());
            }
            Err(status) => return Err(failed(status)),
        }
    }
}
