//! The time that many ranks of one node need to join.
//!
//! The ranks are tasks of one child process, each with its own connection. They join as workers do, at the agent's
//! service on a unix socket, which runs in this process. The child measures from its first connection to the last
//! reply.

use std::fmt::Write;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use xlaunch_proto::VERSION;
use xlaunch_proto::connect;
use xlaunch_proto::convert::Join;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{JobKind, JoinRequest};
use xlaunch_spec::ids::{Attempt, Digest, NcclId, Rank, RingKey};

use crate::raise_file_limit;
use xlaunch_agent::rendezvous::Rendezvous;
use xlaunch_agent::rendezvous::barrier::{JoinBarrier, JoinOutcome};
use xlaunch_agent::rendezvous::message::Message;
use xlaunch_agent::rendezvous::service;
use xlaunch_agent::status::board::{Board, Launch};
use xlaunch_cluster::Assignment;
use xlaunch_cluster::group_rendezvous as group;

/// Maximum time for all ranks to join.
const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(120);
/// Delay before another attempt to connect if the backlog of the socket is full.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(2);
/// Stands for the configuration of all ranks, whose hashes must agree.
const CONFIG: &[u8] = b"bench";

/// The result of one rendezvous.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    ranks: u32,
    /// Time from the first connection to the last reply.
    seconds: f64,
}

/// Measures one rendezvous for each number of ranks.
///
/// # Errors
/// The limit of open files is too low, or the rendezvous failed.
pub(super) async fn run(ranks: &[u32]) -> io::Result<Vec<Measured>> {
    let mut measured = Vec::new();
    for ranks in ranks {
        measured.push(measure(*ranks).await?);
    }
    Ok(measured)
}

pub(super) fn table(measured: &[Measured]) -> String {
    let mut out = format!("{:>8}  seconds\n", "ranks");
    for Measured { ranks, seconds } in measured {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{ranks:>8}  {seconds:.3}");
    }
    out
}

/// Runs the agent's service, and the ranks in a child process.
async fn measure(ranks: u32) -> io::Result<Measured> {
    raise_file_limit(ranks, "ranks")?;
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("agent.sock");
    let (messages, mut inbox) = mpsc::channel(1024);
    let board = watch::Sender::new(Board::new(Launch {
        kind: JobKind::Trainer,
        id: "bench".into(),
        name: "bench".into(),
        command_line: String::new(),
        max_restarts: 0,
        total_steps: 0,
        log_dir: dir.path().into(),
        stall_timeout: RENDEZVOUS_TIMEOUT,
    }));
    let assignment = Assignment { nodes: 1, world: ranks, ..Assignment::default() };
    board.send_modify(|board| board.reset(0, ranks, &assignment));
    let serving = service::serve(&socket, messages, board.clone()).await?;
    let mut child = Command::new(std::env::current_exe()?);
    child.arg("join-at").arg(&socket).arg(ranks.to_string());
    let child = child.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let deadline = Instant::now() + RENDEZVOUS_TIMEOUT;
    let mut barrier = JoinBarrier::new(Rendezvous::new(0..ranks, ranks, 0, Digest::of(CONFIG), deadline));
    let answer = async {
        while let Some(message) = inbox.recv().await {
            let Message::Join(join, reply) = message else { continue };
            let (rank, device) = (join.rank.0, join.device_uuid.clone());
            match barrier.join(join, reply) {
                JoinOutcome::Waiting => board.send_modify(|board| board.joined(rank, &device)),
                JoinOutcome::Complete(node) => {
                    board.send_modify(|board| board.joined(rank, &device));
                    match group::join_alone(ranks, node, RingKey([0; 32])) {
                        Ok(group) => barrier.finish(&group),
                        Err(problem) => return problem,
                    }
                }
                JoinOutcome::Ignored => {}
                JoinOutcome::Failed(problem) => return problem,
            }
        }
        "the service has stopped".to_owned()
    };
    let output = tokio::select! {
        output = child.wait_with_output() => output?,
        problem = answer => return Err(io::Error::other(problem)),
        () = tokio::time::sleep(RENDEZVOUS_TIMEOUT) => return Err(io::ErrorKind::TimedOut.into()),
    };
    serving.finish().await;
    // The child inherits stderr, where it has printed why it failed.
    serde_json::from_slice(&output.stdout).map_err(|_| io::Error::other("not all ranks have joined"))
}

/// Joins with all ranks: the child process. Returns the result as JSON.
///
/// # Errors
/// The error of the first rank that could not join.
pub(super) async fn join_all(socket: &Path, ranks: u32) -> io::Result<String> {
    raise_file_limit(ranks, "ranks")?;
    let start = Instant::now();
    let mut joining = JoinSet::new();
    for rank in 0..ranks {
        let socket = socket.to_path_buf();
        joining.spawn(async move { join(&socket, rank).await });
    }
    while let Some(joined) = joining.join_next().await {
        joined??;
    }
    let measured = Measured { ranks, seconds: start.elapsed().as_secs_f64() };
    Ok(serde_json::json!(measured).to_string())
}

async fn join(socket: &Path, rank: u32) -> io::Result<()> {
    let request = JoinRequest::from(Join {
        rank: Rank(rank),
        attempt: Attempt(0),
        version: VERSION.into(),
        config_hash: Digest::of(CONFIG),
        layout_hash: Digest::of(CONFIG),
        device_uuid: format!("GPU-{rank:032}"),
        nccl_id: (rank == 0).then_some(NcclId([7; 128])),
        ring_address: String::new(),
        pid: std::process::id(),
    });
    let mut agent = AgentClient::new(connected(socket).await?);
    agent.join(request).await.map(drop).map_err(io::Error::other)
}

/// Connects, and retries while the backlog of the socket is full, as all ranks connect at once.
async fn connected(socket: &Path) -> io::Result<Channel> {
    loop {
        match connect::connect(socket, connect::endpoint().timeout(RENDEZVOUS_TIMEOUT)).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(CONNECT_RETRY_DELAY).await
            }
            connected => return connected,
        }
    }
}
