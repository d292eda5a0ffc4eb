//! `xlaunch status`, `logs` and `stop`: gRPC to a running agent, or to the daemon where a job of its is meant.
//!
//! - [`find`]: which launch is meant, and how it is reached;
//! - [`show`]: how its state looks.
//!
//! A plain number is a job of the daemon, if one answers; otherwise it names a launch as any other word does.

mod find;
pub(super) mod show;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::{LogStream, LogsRequest, StatusReply, StopRequest};

use super::console::{End, finish, now, put, redrawn, width};
use super::node::{self, At, Daemon};
use xlaunch_agent::registry::Running;
use xlaunch_proto::json;

/// Options of `xlaunch status`.
#[derive(Debug, Args)]
pub(super) struct Status {
    /// Number of a daemon's job; name of a launch, the beginning of it, or a directory with one below. Default: the one
    /// that runs, or a list of all.
    #[arg(value_name = "JOB")]
    run: Option<PathBuf>,
    /// Show it again every SECONDS, until the launch ends.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = seconds)]
    watch: Option<Duration>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: At,
}

/// Options of `xlaunch logs`.
#[derive(Debug, Args)]
pub(super) struct Logs {
    /// As for `status`; the one that runs by default.
    #[arg(value_name = "JOB")]
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
    #[command(flatten)]
    at: At,
}

/// Options of `xlaunch stop`.
#[derive(Debug, Args)]
pub(super) struct Stop {
    /// As for `status`; the one that runs by default.
    #[arg(value_name = "JOB")]
    run: Option<PathBuf>,
    #[command(flatten)]
    at: At,
}

/// Who is asked.
enum Asked {
    /// The daemon, of this job.
    Daemon(Daemon, u64),
    /// The agent of a launch. Should there be none of this name: why no daemon was asked.
    Agent(Option<String>),
}

async fn asked(run: Option<&Path>, at: &At) -> Result<Asked, End> {
    let Some(job) = run.and_then(Path::to_str).and_then(|run| run.parse().ok()) else {
        return Ok(Asked::Agent(None));
    };
    match Daemon::connect(at).await {
        Ok(daemon) => Ok(Asked::Daemon(daemon, job)),
        Err(refusal) if at.is_given() => Err(refusal.into()),
        Err(refusal) => Ok(Asked::Agent(Some(refusal.message))),
    }
}

/// The problem with a launch that might have been meant as a job.
fn explained(end: End, no_daemon: Option<String>) -> End {
    match (end, no_daemon) {
        (End::Problem(mut problem), Some(no_daemon)) => {
            problem.message += &format!("\nfor a job of the daemon: {no_daemon}");
            End::Problem(problem)
        }
        (end, _) => end,
    }
}

pub(super) async fn status(options: Status) -> ExitCode {
    finish(show_status(&options).await.map(|()| ExitCode::Done))
}

async fn show_status(options: &Status) -> Result<(), End> {
    let run = options.run.as_deref();
    let shown = match (asked(run, &options.at).await?, options.watch) {
        (Asked::Daemon(daemon, job), pause) => return node::status(daemon, job, pause, options.json).await,
        (Asked::Agent(why), Some(pause)) => (watch(run, pause, options.json).await, why),
        (Asked::Agent(why), None) => (look(run, options.json).await, why),
    };
    shown.0.map_err(|end| explained(end, shown.1))
}

/// Shows launches once.
async fn look(run: Option<&Path>, as_json: bool) -> Result<(), End> {
    let launches = find::launches(run).await?;
    let text = match &launches[..] {
        [launch] => {
            let reply = find::ask(launch).await?;
            if as_json {
                format!("{:#}\n", json::status(&reply))
            } else {
                show::table(&reply, now(), width())
            }
        }
        _ => {
            let replies = ask_all(&launches).await;
            if as_json {
                format!("{:#}\n", all_as_json(&replies))
            } else {
                show::list(&replies, now(), width())
            }
        }
    };
    put(text.as_bytes())
}

/// Shows launches until they have ended: one in place of the last on a terminal, blocks or lines of JSON elsewhere.
async fn watch(run: Option<&Path>, pause: Duration, as_json: bool) -> Result<(), End> {
    let mut launches = find::launches(run).await?;
    let redraw = !as_json && std::io::stdout().is_terminal();
    for turn in 0.. {
        let text = match &launches[..] {
            [launch] => match find::ask(launch).await {
                Ok(reply) if as_json => format!("{}\n", json::status(&reply)),
                Ok(reply) => show::table(&reply, now(), width()),
                Err(problem) if turn == 0 => return Err(problem.into()),
                // It was there: it has ended, unless it is found again.
                Err(problem) if is_running(launch) => return Err(problem.into()),
                Err(_) if as_json => return Ok(()),
                Err(_) => return put(format!("{} has ended\n", launch.name).as_bytes()),
            },
            _ => {
                let replies = ask_all(&launches).await;
                if as_json {
                    format!("{}\n", all_as_json(&replies))
                } else {
                    show::list(&replies, now(), width())
                }
            }
        };
        let text = match (redraw, as_json) {
            (true, _) => redrawn(&text, turn == 0),
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
    xlaunch_agent::registry::running().iter().any(|other| other.socket == launch.socket)
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
    replies.iter().filter_map(|(_, reply)| reply.as_ref().ok()).map(json::status).collect()
}

pub(super) async fn logs(options: Logs) -> ExitCode {
    finish(print_logs(options).await.map(|()| ExitCode::Done))
}

async fn print_logs(options: Logs) -> Result<(), End> {
    let asked = asked(options.run.as_deref(), &options.at).await?;
    let stream = if options.stderr { LogStream::Stderr } else { LogStream::Stdout };
    let request = LogsRequest {
        rank: options.rank,
        stream: stream.into(),
        follow: options.follow,
        tail_lines: options.tail,
    };
    let why = match asked {
        Asked::Daemon(daemon, job) => return node::logs(daemon, job, request, put).await,
        Asked::Agent(why) => why,
    };
    let launch = find::launch(options.run.as_deref()).await.map_err(|none| explained(none.into(), why))?;
    let mut agent = find::connect(&launch).await?;
    let failed = |status: tonic::Status| End::from(find::problem(&launch, &status));
    let mut pieces = agent.logs(request).await.map_err(failed)?.into_inner();
    loop {
        match pieces.message().await {
            Ok(Some(piece)) => put(&piece.bytes)?,
            Ok(None) => return Ok(()),
            // The agent has ended before we had read all: what is missing is in the files, where they are kept.
            Err(status) if options.follow && !is_running(&launch) => {
                return Err(format!("{} has ended: {}", launch.name, status.message()).into());
            }
            Err(status) => return Err(failed(status)),
        }
    }
}

pub(super) async fn stop(options: Stop) -> ExitCode {
    finish(ask_to_stop(options).await.map(|()| ExitCode::Done))
}

async fn ask_to_stop(options: Stop) -> Result<(), End> {
    let why = match asked(options.run.as_deref(), &options.at).await? {
        Asked::Daemon(daemon, job) => return node::stop(daemon, job).await,
        Asked::Agent(why) => why,
    };
    let launch = find::launch(options.run.as_deref()).await.map_err(|none| explained(none.into(), why))?;
    let mut agent = find::connect(&launch).await?;
    agent.stop(StopRequest {}).await.map_err(|status| find::problem(&launch, &status))?;
    put(format!("asked {} to stop\n", launch.name).as_bytes())
}

/// A pause between two looks.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected seconds, from 0.1 to 86400; a launch goes before --watch".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_number_is_a_job_of_the_daemon_that_listens_and_a_word_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| At { socket: Some(dir.path().join(name)) };
        let _daemon = tokio::net::UnixListener::bind(dir.path().join("s")).unwrap();
        let asks = async |run: &str, name: &str| match asked(Some(Path::new(run)), &at(name)).await {
            Ok(Asked::Daemon(_, job)) => format!("job {job}"),
            Ok(Asked::Agent(_)) => "a launch".into(),
            Err(End::Problem(problem)) => problem.message,
            Err(End::Unread) => String::new(),
        };
        assert_eq!(asks("7", "s").await, "job 7");
        for launch in ["train", "7-train", "./7", "-7", "7.toml"] {
            assert_eq!(asks(launch, "s").await, "a launch", "{launch}");
        }
        // The command line names a daemon: nothing else will do.
        assert!(asks("7", "other").await.contains("no daemon answers"));
    }
}
