//! `xlaunch bench rendezvous`: how long so many ranks take to meet.
//!
//! They are simulated: tasks of one child process, each with a connection of its own, that join as a worker does. They meet
//! at the agent's own service on a unix socket, in this process. Time runs from the first connection to the last answer, by
//! the child's clock.

use std::fmt::Write;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use xlaunch_proto::VERSION;
use xlaunch_proto::convert::Join;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::ids::{Attempt, Digest, NcclId, Rank};
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{JobKind, JoinRequest};

use xlaunch_agent::Refusal;
use xlaunch_agent::rendezvous::Rendezvous;
use xlaunch_agent::rendezvous::barrier::{JoinBarrier, JoinOutcome};
use xlaunch_agent::rendezvous::service::{self, Message};
use xlaunch_agent::status::board::{Board, Launch};

/// Time for everybody to meet.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause of a rank that finds the queue of the socket full.
const BREATH: Duration = Duration::from_millis(2);
/// Descriptors of either process beside those of the ranks.
const BESIDE: u64 = 100;
/// What all ranks have in common.
const JOB: &[u8] = b"bench";

/// What one meeting took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Met {
    /// Ranks that met.
    pub(crate) ranks: u32,
    /// From the first connection to the last answer.
    pub(crate) seconds: f64,
}

/// Has so many ranks meet, each number by itself.
///
/// # Errors
/// Too few descriptors; a meeting that fails.
pub(crate) async fn run(ranks: &[u32]) -> Result<Vec<Met>, Refusal> {
    let mut found = Vec::new();
    for ranks in ranks {
        let met = meet(*ranks).await.map_err(|error| failed(&error))?;
        found.push(met);
    }
    Ok(found)
}

fn failed(error: &io::Error) -> Refusal {
    Refusal::new(ExitCode::Internal, format!("failed to let ranks meet: {error}"))
}

/// The table.
pub(crate) fn table(found: &[Met]) -> String {
    let mut out = format!("{:>8}  seconds to meet\n", "ranks");
    for Met { ranks, seconds } in found {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{ranks:>8}  {seconds:.3}");
    }
    out
}

/// The agent's side.
async fn meet(ranks: u32) -> io::Result<Met> {
    allow(ranks)?;
    let dir = super::scratch()?;
    let socket = dir.path().join("agent.sock");
    let (messages, mut inbox) = mpsc::channel(1024);
    let board = watch::Sender::new(Board::new(Launch {
        kind: JobKind::Trainer,
        id: "bench".into(),
        name: "bench".into(),
        command_line: String::new(),
        max_restarts: 0,
        log_dir: dir.path().into(),
        stall_timeout: PATIENCE,
    }));
    board.send_modify(|board| board.reset(0, ranks));
    let serving = service::serve(&socket, messages, board.clone()).await?;
    let mut callers = Command::new(std::env::current_exe()?);
    callers.args(["bench", "rendezvous", "--ranks", &ranks.to_string(), "--callers"]).arg(&socket);
    let callers = callers.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let deadline = Instant::now() + PATIENCE;
    let mut meeting = JoinBarrier::new(Rendezvous::new(ranks, 0, Digest::of(JOB), deadline));
    let answer = async {
        while let Some(message) = inbox.recv().await {
            let Message::Join(join, reply) = message else { continue };
            let (rank, device) = (join.rank.0, join.device_uuid.clone());
            match meeting.join(join, reply) {
                JoinOutcome::Waiting | JoinOutcome::Complete => board.send_modify(|board| board.joined(rank, &device)),
                JoinOutcome::Ignored => {}
                JoinOutcome::Failed(problem) => return problem,
            }
        }
        "the service has ended".to_owned()
    };
    let output = tokio::select! {
        output = callers.wait_with_output() => output?,
        problem = answer => return Err(io::Error::other(problem)),
        () = tokio::time::sleep(PATIENCE) => return Err(io::ErrorKind::TimedOut.into()),
    };
    serving.finish().await;
    // Why they failed stands on stderr, which is ours.
    serde_json::from_slice(&output.stdout).map_err(|_| io::Error::other("not all ranks have met"))
}

/// The ranks' side, in a child of the agent; what it prints.
///
/// # Errors
/// The first rank's that could not join.
pub(crate) async fn callers(socket: &Path, ranks: u32) -> Result<String, Refusal> {
    allow(ranks).map_err(|error| failed(&error))?;
    let start = Instant::now();
    let mut joining = JoinSet::new();
    for rank in 0..ranks {
        let socket = socket.to_path_buf();
        joining.spawn(async move { join(&socket, rank).await });
    }
    while let Some(joined) = joining.join_next().await {
        joined.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| failed(&error))?;
    }
    let met = Met { ranks, seconds: start.elapsed().as_secs_f64() };
    Ok(serde_json::json!(met).to_string())
}

async fn join(socket: &Path, rank: u32) -> io::Result<()> {
    let request = JoinRequest::from(Join {
        rank: Rank(rank),
        attempt: Attempt(0),
        version: VERSION.into(),
        config_hash: Digest::of(JOB),
        layout_hash: Digest::of(JOB),
        device_uuid: format!("GPU-{rank:032}"),
        nccl_id: (rank == 0).then_some(NcclId([7; 128])),
        ring_address: String::new(),
        pid: std::process::id(),
    });
    let mut agent = AgentClient::new(connect(socket).await?);
    agent.join(request).await.map(drop).map_err(io::Error::other)
}

/// All come at once: a socket's queue holds fewer.
async fn connect(socket: &Path) -> io::Result<Channel> {
    loop {
        match crate::client::connect(socket, PATIENCE).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(BREATH).await,
            connected => return connected,
        }
    }
}

/// Lets this process have a connection for each rank.
fn allow(ranks: u32) -> io::Result<()> {
    let needed = u64::from(ranks) + BESIDE;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if maximum.is_some_and(|maximum| maximum < needed) {
        let limit = maximum.unwrap_or_default();
        return Err(io::Error::other(format!(
            "{ranks} ranks need {needed} descriptors, {limit} are allowed (ulimit -Hn)"
        )));
    }
    Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum })?)
}
