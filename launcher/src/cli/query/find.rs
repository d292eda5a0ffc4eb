//! From what the user calls a launch to a connection with its agent.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::transport::Channel;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{StatusReply, StatusRequest};

use xlaunch_agent::registry::{self, Running, SOCKET};

/// How deep below a directory a run may lie: output, job, run.
const DEPTH: usize = 3;
/// Time for an answer; an agent gives it at once, unless it is stopped.
const PATIENCE: Duration = Duration::from_secs(10);

/// The launches that are meant: the one of this name or path, or all that run. Never empty.
///
/// # Errors
/// In words: nothing is found, or more than one of that name.
pub(super) async fn launches(run: Option<&Path>) -> Result<Vec<Running>, String> {
    let running = registry::running();
    let Some(run) = run else {
        return match running.is_empty() {
            true => {
                Err("no launch of yours is running here; `xlaunch status PATH` looks in a directory".into())
            }
            false => Ok(running),
        };
    };
    let text = run.to_string_lossy();
    if let Some(exact) = running.iter().find(|launch| launch.name == text) {
        return Ok(vec![exact.clone()]);
    }
    if run.exists() {
        return newest_below(run).await.map(|launch| vec![launch]);
    }
    let matches: Vec<_> = running.iter().filter(|launch| launch.name.starts_with(&*text)).cloned().collect();
    match matches.len() {
        1 => Ok(matches),
        0 if running.is_empty() => Err(format!("there is no {text}, and no launch of yours is running here")),
        0 => Err(format!("no launch is called {text}; running are:{}", names(&running))),
        _ => Err(format!("more than one launch begins with {text}; which one?{}", names(&matches))),
    }
}

/// The one launch that is meant.
///
/// # Errors
/// As [`launches`]; several, where none was named.
pub(super) async fn launch(run: Option<&Path>) -> Result<Running, String> {
    let mut launches = launches(run).await?;
    match launches.len() {
        1 => Ok(launches.remove(0)),
        count => Err(format!("{count} launches are running; which one?{}", names(&launches))),
    }
}

fn names(launches: &[Running]) -> String {
    launches.iter().map(|launch| format!("\n  {}", launch.name)).collect()
}

/// The newest run in `dir` and below that answers.
async fn newest_below(dir: &Path) -> Result<Running, String> {
    let mut sockets = Vec::new();
    find(dir, DEPTH, &mut sockets);
    // Runs are named by their start: the newest sorts last.
    sockets.sort();
    for socket in sockets.into_iter().rev() {
        let name = socket.parent().map(|run| run.display().to_string()).unwrap_or_default();
        // The run's directory may be too deep for a socket: the agent's is behind a link.
        let launch = Running { name, socket: socket.canonicalize().unwrap_or(socket) };
        if UnixStream::connect(&launch.socket).await.is_ok() {
            return Ok(launch);
        }
    }
    Err(format!("no launch is running in {} or below; `xlaunch status` lists all of yours", dir.display()))
}

/// Agents' sockets in `dir` and below; `latest` links are left out, their targets are found anyway.
fn find(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    let socket = dir.join(SOCKET);
    if socket.symlink_metadata().is_ok() {
        found.push(socket);
    } else if depth > 0 {
        let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            find(&entry.path(), depth - 1, found);
        }
    }
}

/// Connects to a launch's agent.
pub(super) async fn connect(launch: &Running) -> Result<AgentClient<Channel>, String> {
    let channel =
        crate::client::connect(&launch.socket, PATIENCE).await.map_err(|_| no_connection(launch))?;
    Ok(AgentClient::new(channel))
}

/// The state of a launch.
pub(super) async fn ask(launch: &Running) -> Result<StatusReply, String> {
    let mut agent = connect(launch).await?;
    let reply = agent.status(StatusRequest::default()).await;
    reply.map(tonic::Response::into_inner).map_err(|status| problem(launch, &status))
}

/// What a failed call means.
pub(super) fn problem(launch: &Running, status: &tonic::Status) -> String {
    match status.code() {
        tonic::Code::Cancelled | tonic::Code::DeadlineExceeded => {
            let (name, seconds) = (&launch.name, PATIENCE.as_secs());
            format!(
                "{name} has not answered for {seconds} s: is its xlaunch stopped, or the machine overloaded?"
            )
        }
        // Not the agent's words: the connection broke.
        _ if std::error::Error::source(status).is_some() => no_connection(launch),
        _ => format!("{}: {}", launch.name, status.message()),
    }
}

fn no_connection(launch: &Running) -> String {
    format!("{} takes no calls: it starts or ends; ask again", launch.name)
}
