//! Queries and orders to the daemon of a node.
//!
//! ```text
//! options --connect--> Daemon --gRPC--> jobs, node --show, jobs--> tables for people, JSON for programs
//! submit: what is launched, understood here, run there;   top: the same state on a whole terminal
//! ```
//! `status`, `logs` and `stop` of a job's number come from [`super::query`], which knows when a number is one.

mod connect;
mod control;
mod foreign;
mod gpus;
mod jobs;
mod show;
mod submit;
#[cfg(test)]
mod tests;
mod top;

use std::io::IsTerminal;
use std::time::Duration;

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::{JobLogsRequest, LogsRequest};

use super::console::{End, finish, put, redrawn, width};
pub(super) use connect::{At, Daemon};
pub(super) use control::{Cancel, Drain, stop};
use foreign::Foreign;
pub(super) use gpus::Node;
pub(super) use jobs::Jobs;
pub(super) use submit::{Submit, split};
pub(super) use top::Top;
use xlaunch_agent::clock::unix_ms;
use xlaunch_daemon::view::has_ended;

pub(super) async fn submit(options: Submit) -> ExitCode {
    finish(submit::submit(options).await)
}

pub(super) async fn jobs(options: Jobs) -> ExitCode {
    finish(jobs::list(options).await.map(|()| ExitCode::Done))
}

pub(super) async fn cancel(options: Cancel) -> ExitCode {
    finish(control::cancel(options).await)
}

pub(super) async fn drain(options: Drain) -> ExitCode {
    finish(control::drain(options).await.map(|()| ExitCode::Done))
}

pub(super) async fn node(options: Node) -> ExitCode {
    finish(gpus::show(options).await.map(|()| ExitCode::Done))
}

pub(super) async fn top(options: Top) -> ExitCode {
    finish(top::top(options).await)
}

/// Shows a job once, or every `pause` until it has ended: one in place of the last on a terminal, blocks or lines of JSON
/// elsewhere.
pub(super) async fn status(
    mut daemon: Daemon,
    id: u64,
    pause: Option<Duration>,
    json: bool,
) -> Result<(), End> {
    let redraw = pause.is_some() && !json && std::io::stdout().is_terminal();
    for turn in 0.. {
        let job = if turn == 0 { daemon.get(id).await? } else { daemon.get_again(id).await? };
        let ended = has_ended(job.state());
        let text = match (json, pause) {
            (true, Some(_)) => format!("{}\n", show::json(&job)),
            (true, None) => format!("{:#}\n", show::json(&job)),
            (false, _) => show::job(&job, unix_ms(), width()),
        };
        put(if redraw { redrawn(&text, turn == 0) } else { text }.as_bytes())?;
        let Some(pause) = pause.filter(|_| !ended) else { break };
        if !redraw && !json {
            put(b"\n")?;
        }
        tokio::time::sleep(pause).await;
    }
    Ok(())
}

/// Hands out what a rank of a job has written: unchanged, but for another user's job on a terminal.
pub(super) async fn logs(
    mut daemon: Daemon,
    job: u64,
    logs: LogsRequest,
    mut put: impl FnMut(&[u8]) -> Result<(), End>,
) -> Result<(), End> {
    let own = rustix::process::getuid().as_raw();
    let shown = std::io::stdout().is_terminal() && daemon.get(job).await?.uid != own;
    let mut foreign = shown.then(Foreign::default);
    let reply = daemon.client.logs(JobLogsRequest { job, logs: Some(logs) }).await;
    let mut pieces = reply.map_err(|status| daemon.refusal(&status))?.into_inner();
    while let Some(piece) = pieces.message().await.map_err(|status| daemon.refusal(&status))? {
        match &mut foreign {
            Some(foreign) => put(foreign.text(&piece.bytes).as_bytes())?,
            None => put(&piece.bytes)?,
        }
    }
    Ok(())
}
