//! `xlaunch status`, `logs` and `stop`: gRPC to a running agent.
//!
//! - [`find`]: which launch is meant, and how it is reached;
//! - [`show`]: how its state looks.

mod find;
mod show;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::{LogStream, LogsRequest, StatusReply, StopRequest};

use crate::registry::Running;

/// Options of `xlaunch status`.
#[derive(Debug, Args)]
pub(super) struct Status {
    /// Name of a launch, the beginning of it, or a directory with one below. Default: the one that runs, or a list of all.
    run: Option<PathBuf>,
    /// Show it again every SECONDS, until the launch ends.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = seconds)]
    watch: Option<Duration>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Options of `xlaunch logs`.
#[derive(Debug, Args)]
pub(super) struct Logs {
    /// As for `status`; the one that runs by default.
    run: Option<PathBuf>,
    /// Whose.
    #[arg(long, value_name = "R", default_value_t = 0)]
    rank: u32,
    /// What it writes to stderr, instead of stdout.
    #[arg(long)]
    stderr: bool,
    /// Go on until the launch ends, through restarts.
    #[arg(short, long)]
    follow: bool,
    /// Begin with the last N lines.
    #[arg(long, value_name = "N")]
    tail: Option<u64>,
}

/// Options of `xlaunch stop`.
#[derive(Debug, Args)]
pub(super) struct Stop {
    /// As for `status`; the one that runs by default.
    run: Option<PathBuf>,
}

/// Why a query ends before it is answered.
enum End {
    /// Something the user should know.
    Problem(String),
    /// Nobody reads stdout any more.
    Unread,
}

impl From<String> for End {
    fn from(problem: String) -> Self {
        Self::Problem(problem)
    }
}

pub(super) async fn status(options: Status) -> ExitCode {
    let result = match options.watch {
        Some(pause) => watch(options.run.as_deref(), pause, options.json).await,
        None => look(options.run.as_deref(), options.json).await,
    };
    finish(result)
}

/// Shows launches once.
async fn look(run: Option<&Path>, json: bool) -> Result<(), End> {
    let launches = find::launches(run).await?;
    let text = match &launches[..] {
        [launch] => {
            let reply = find::ask(launch).await?;
            if json { format!("{:#}\n", show::json(&reply)) } else { show::table(&reply, now(), width()) }
        }
        _ => {
            let replies = ask_all(&launches).await;
            if json { format!("{:#}\n", all_as_json(&replies)) } else { show::list(&replies, now(), width()) }
        }
    };
    put(text.as_bytes())
}

/// Shows launches until they have ended: one in place of the last on a terminal, blocks or lines of JSON elsewhere.
async fn watch(run: Option<&Path>, pause: Duration, json: bool) -> Result<(), End> {
    let mut launches = find::launches(run).await?;
    let redraw = !json && std::io::stdout().is_terminal();
    for turn in 0.. {
        let text = match &launches[..] {
            [launch] => match find::ask(launch).await {
                Ok(reply) if json => format!("{}\n", show::json(&reply)),
                Ok(reply) => show::table(&reply, now(), width()),
                Err(problem) if turn == 0 => return Err(problem.into()),
                // It was there: it has ended, unless it is found again.
                Err(problem) if is_running(launch) => return Err(problem.into()),
                Err(_) if json => return Ok(()),
                Err(_) => return put(format!("{} has ended\n", launch.name).as_bytes()),
            },
            _ => {
                let replies = ask_all(&launches).await;
                if json {
                    format!("{}\n", all_as_json(&replies))
                } else {
                    show::list(&replies, now(), width())
                }
            }
        };
        let text = match (redraw, json) {
            // To the upper left corner, and clear what is below; the first time, everything.
            (true, _) if turn == 0 => format!("\x1b[2J\x1b[H{text}"),
            (true, _) => format!("\x1b[H\x1b[J{text}"),
            (false, false) => format!("{text}\n"),
            (false, true) => text,
        };
        put(text.as_bytes())?;
        tokio::time::sleep(pause).await;
        if launches.len() > 1 {
            match find::launches(run).await {
                Ok(found) => launches = found,
                Err(_) => return Ok(()),
            }
        }
    }
    Ok(())
}

/// Whether a launch that gave no answer is there all the same.
fn is_running(launch: &Running) -> bool {
    crate::registry::running().iter().any(|other| other.socket == launch.socket)
}

/// All at once: one that hangs delays no other.
async fn ask_all(launches: &[Running]) -> Vec<(String, Result<StatusReply, String>)> {
    let asked: Vec<_> = launches
        .iter()
        .map(|launch| {
            let owned = launch.clone();
            (launch.name.clone(), tokio::spawn(async move { find::ask(&owned).await }))
        })
        .collect();
    let mut replies = Vec::new();
    for (name, reply) in asked {
        replies.push((name, reply.await.unwrap_or_else(|error| Err(error.to_string()))));
    }
    replies
}

/// Of those that answer.
fn all_as_json(replies: &[(String, Result<StatusReply, String>)]) -> serde_json::Value {
    replies.iter().filter_map(|(_, reply)| reply.as_ref().ok()).map(show::json).collect()
}

pub(super) async fn logs(options: Logs) -> ExitCode {
    finish(print_logs(options).await)
}

async fn print_logs(options: Logs) -> Result<(), End> {
    let launch = find::launch(options.run.as_deref()).await?;
    let mut agent = find::connect(&launch).await?;
    let stream = if options.stderr { LogStream::Stderr } else { LogStream::Stdout };
    let request = LogsRequest {
        rank: options.rank,
        stream: stream.into(),
        follow: options.follow,
        tail_lines: options.tail,
    };
    let failed = |status: tonic::Status| End::Problem(find::problem(&launch, &status));
    let mut pieces = agent.logs(request).await.map_err(failed)?.into_inner();
    loop {
        match pieces.message().await {
            Ok(Some(piece)) => put(&piece.bytes)?,
            Ok(None) => return Ok(()),
            // The agent has ended before we had read all: what is missing is in the files, where they are kept.
            Err(status) if options.follow && !is_running(&launch) => {
                return Err(End::Problem(format!("{} has ended: {}", launch.name, status.message())));
            }
            Err(status) => return Err(failed(status)),
        }
    }
}

pub(super) async fn stop(options: Stop) -> ExitCode {
    finish(ask_to_stop(options).await)
}

async fn ask_to_stop(options: Stop) -> Result<(), End> {
    let launch = find::launch(options.run.as_deref()).await?;
    let mut agent = find::connect(&launch).await?;
    agent.stop(StopRequest {}).await.map_err(|status| find::problem(&launch, &status))?;
    put(format!("asked {} to stop\n", launch.name).as_bytes())
}

#[expect(clippy::print_stderr, reason = "errors go to stderr")]
fn finish(result: Result<(), End>) -> ExitCode {
    match result {
        Ok(()) | Err(End::Unread) => ExitCode::Done,
        Err(End::Problem(problem)) => {
            let lines = problem.lines().map(show::escape).collect::<Vec<_>>();
            eprintln!("error: {}", lines.join("\n"));
            ExitCode::WorkerFailed
        }
    }
}

fn put(bytes: &[u8]) -> Result<(), End> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|_| End::Unread)
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Characters in a line of the terminal; elsewhere lines are as long as they are.
fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok().filter(|size| size.ws_col > 0);
    size.map_or(usize::MAX, |size| size.ws_col.into())
}

/// A pause between two looks.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected seconds, from 0.1 to 86400; a launch goes before --watch".into())
}
