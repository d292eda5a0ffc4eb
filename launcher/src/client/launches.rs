//! Finds the running launch that the user names, and calls its agent.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::transport::Channel;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{StatusReply, StatusRequest};

use xlaunch_agent::registry::{self, Running, SOCKET};

/// Levels of directories searched below a given path: output, job, run.
const MAX_SEARCH_DEPTH: usize = 3;
/// Timeout of a call. An agent answers at once unless its process is suspended or the machine is overloaded.
const AGENT_CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the launches that `run` names (by name, a prefix of it, or a path), or all running ones. The result is never
/// empty.
///
/// # Errors
/// A message for the user of `xlaunch COMMAND`: nothing was found, or the prefix is ambiguous.
pub(crate) async fn find_all(run: Option<&Path>, command: &str) -> Result<Vec<Running>, String> {
    let running = registry::running();
    let Some(run) = run else {
        return if running.is_empty() {
            Err(none_running(command, &registry::running_elsewhere()))
        } else {
            Ok(running)
        };
    };
    let text = run.to_string_lossy();
    if let Some(exact) = running.iter().find(|launch| launch.name == text) {
        return Ok(vec![exact.clone()]);
    }
    if run.exists() {
        return newest_below(run, command).await.map(|launch| vec![launch]);
    }
    let matches: Vec<_> = running.iter().filter(|launch| launch.name.starts_with(&*text)).cloned().collect();
    match matches.len() {
        1 => Ok(matches),
        0 if running.is_empty() => {
            let none = none_running(command, &registry::running_elsewhere());
            Err(format!("no launch or path `{text}`; {none}"))
        }
        0 => {
            let ended = ended_logs(command);
            Err(format!("no launch is named `{text}`{ended}; running launches:{}", names(&running)))
        }
        _ => Err(format!("several launches start with `{text}`; which one?{}", names(&matches))),
    }
}

/// Returns the single launch that `run` names.
///
/// # Errors
/// Those of [`find_all`]; several launches are running and none was named.
pub(crate) async fn find_one(run: Option<&Path>, command: &str) -> Result<Running, String> {
    let mut launches = find_all(run, command).await?;
    match launches.len() {
        1 => Ok(launches.remove(0)),
        count => Err(format!("{count} launches are running; which one?{}", names(&launches))),
    }
}

fn none_running(command: &str, elsewhere: &BTreeSet<PathBuf>) -> String {
    if !elsewhere.is_empty() {
        let commands = elsewhere.iter().map(|dir| format!("`xlaunch {command} {}`", dir.display()));
        return format!(
            "no launch of yours is running on this host with this XDG_RUNTIME_DIR and TMPDIR; with others: {}",
            commands.collect::<Vec<_>>().join(", ")
        );
    }
    format!(
        "no launch of yours is running on this host; `xlaunch {command} PATH` searches a directory{}",
        ended_logs(command)
    )
}

/// Returns the end of a message that says where the logs of ended runs are.
fn ended_logs(command: &str) -> &'static str {
    if command == "logs" {
        "; logs of an ended run are in RUN/logs/attempt_N/RANK, those of a command below its --log-dir"
    } else {
        ""
    }
}

fn names(launches: &[Running]) -> String {
    launches.iter().map(|launch| format!("\n  {}", launch.name)).collect()
}

/// Returns the newest run in or below `dir` whose agent accepts connections.
async fn newest_below(dir: &Path, command: &str) -> Result<Running, String> {
    let mut sockets = Vec::new();
    collect_sockets(dir, MAX_SEARCH_DEPTH, &mut sockets);
    // Run directories are named by start time, so the newest sorts last.
    sockets.sort();
    for socket in sockets.into_iter().rev() {
        let name = socket.parent().map(|run| run.display().to_string()).unwrap_or_default();
        // The path of a run can be too long for a socket address. Then the entry is a symlink to a shorter path.
        let launch = Running { name, socket: socket.canonicalize().unwrap_or(socket) };
        if UnixStream::connect(&launch.socket).await.is_ok() {
            return Ok(launch);
        }
    }
    let ended = ended_logs(command);
    Err(format!(
        "no launch is running in or below {}; `xlaunch status` lists all of yours{ended}",
        dir.display()
    ))
}

/// Collects the agents' sockets in and below `dir`. Symlinks such as `latest` are skipped, as their targets are found
/// anyway.
fn collect_sockets(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    let socket = dir.join(SOCKET);
    if socket.symlink_metadata().is_ok() {
        found.push(socket);
    } else if depth > 0 {
        let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            collect_sockets(&entry.path(), depth - 1, found);
        }
    }
}

/// Returns whether the launch is still registered. An agent that does not answer may just be busy.
pub(crate) fn is_running(launch: &Running) -> bool {
    registry::running().iter().any(|other| other.socket == launch.socket)
}

pub(crate) async fn connect(launch: &Running) -> Result<AgentClient<Channel>, String> {
    not_suspended(launch).await?;
    let channel =
        super::connect(&launch.socket, AGENT_CALL_TIMEOUT).await.map_err(|_| not_connected(launch))?;
    Ok(AgentClient::new(channel))
}

/// Connects for calls that wait for an event of the job.
pub(crate) async fn connect_without_call_timeout(launch: &Running) -> Result<AgentClient<Channel>, String> {
    not_suspended(launch).await?;
    let channel = super::connect_without_call_timeout(&launch.socket, AGENT_CALL_TIMEOUT).await;
    Ok(AgentClient::new(channel.map_err(|_| not_connected(launch))?))
}

pub(crate) async fn status(launch: &Running) -> Result<StatusReply, String> {
    ask_status(launch, StatusRequest::default()).await
}

async fn ask_status(launch: &Running, request: StatusRequest) -> Result<StatusReply, String> {
    let mut agent = connect(launch).await?;
    let reply = agent.status(request).await;
    reply.map(tonic::Response::into_inner).map_err(|status| call_error(launch, &status))
}

/// Returns the status of each launch, with its name. The calls are concurrent, so that one suspended agent does not
/// delay the others.
pub(crate) async fn status_of_all(launches: &[Running]) -> Vec<(String, Result<StatusReply, String>)> {
    ask_all(launches, StatusRequest::default()).await
}

/// Returns the status of each launch like [`status_of_all`], with the history of training jobs.
pub(crate) async fn status_with_history(launches: &[Running]) -> Vec<(String, Result<StatusReply, String>)> {
    ask_all(launches, StatusRequest { history: true, ..StatusRequest::default() }).await
}

/// Returns the status of each launch like [`status_of_all`], but for this node only.
pub(crate) async fn local_status(launches: &[Running]) -> Vec<(String, Result<StatusReply, String>)> {
    ask_all(launches, StatusRequest { local: true, ..StatusRequest::default() }).await
}

async fn ask_all(launches: &[Running], request: StatusRequest) -> Vec<(String, Result<StatusReply, String>)> {
    let calls: Vec<_> = launches
        .iter()
        .map(|launch| {
            let owned = launch.clone();
            (launch.name.clone(), tokio::spawn(async move { ask_status(&owned, request).await }))
        })
        .collect();
    let mut replies = Vec::new();
    for (name, call) in calls {
        replies.push((name, call.await.unwrap_or_else(|error| Err(error.to_string()))));
    }
    replies
}

/// Returns the message for a failed call.
pub(crate) fn call_error(launch: &Running, status: &tonic::Status) -> String {
    match status.code() {
        tonic::Code::Cancelled | tonic::Code::DeadlineExceeded => format!(
            "{} did not answer within {} s: its xlaunch process may be stopped, or the machine overloaded",
            launch.name,
            AGENT_CALL_TIMEOUT.as_secs()
        ),
        // Only the client's side attaches a source to a status: the connection broke.
        _ if std::error::Error::source(status).is_some() => not_connected(launch),
        _ => format!("{}: {}", launch.name, status.message()),
    }
}

async fn not_suspended(launch: &Running) -> Result<(), String> {
    super::suspended(&launch.socket).await.map_or(Ok(()), |what| Err(format!("{} {what}", launch.name)))
}

fn not_connected(launch: &Running) -> String {
    format!("{} does not accept calls: it is starting or shutting down; try again", launch.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn error_names_the_command_and_where_logs_of_ended_runs_are() {
        let dir = tempfile::tempdir().unwrap();
        for (command, has_logs) in [("logs", true), ("stop", false), ("status", false)] {
            let none = none_running(command, &BTreeSet::new());
            assert!(none.contains(&format!("`xlaunch {command} PATH`")), "{none}");
            let other = none_running(command, &BTreeSet::from(["/t/xlaunch-0/a-1".into()]));
            assert!(
                other.ends_with(&format!("with others: `xlaunch {command} /t/xlaunch-0/a-1`")),
                "{other}"
            );
            let below = find_all(Some(dir.path()), command).await.unwrap_err();
            assert!(below.starts_with("no launch is running in or below "), "{below}");
            for message in [none, below] {
                assert_eq!(message.contains("RUN/logs/attempt_N/RANK"), has_logs, "{message}");
            }
        }
    }
}
