//! `xlaunch status` and `xlaunch stop`: gRPC to a running agent, found by its run's directory.

use std::path::{Path, PathBuf};

use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{JobState, RankState, StatusReply, StatusRequest, StopRequest};

use crate::progress::count;
use crate::registry::SOCKET;

/// How deep below the given directory a run may lie: output, job, run.
const DEPTH: usize = 3;

pub(super) async fn status(run: Option<PathBuf>, json: bool) -> ExitCode {
    let reply = match ask(run).await {
        Ok(mut agent) => agent.status(StatusRequest {}).await.map_err(|status| status.message().to_string()),
        Err(problem) => Err(problem),
    };
    finish(reply.map(|reply| if json { as_json(reply.get_ref()) } else { as_table(reply.get_ref()) }))
}

pub(super) async fn stop(run: Option<PathBuf>) -> ExitCode {
    let reply = match ask(run).await {
        Ok(mut agent) => agent.stop(StopRequest {}).await.map_err(|status| status.message().to_string()),
        Err(problem) => Err(problem),
    };
    finish(reply.map(|_| "asked to stop at the next step, with a checkpoint\n".into()))
}

#[expect(clippy::print_stderr, clippy::print_stdout, reason = "results to stdout, errors to stderr")]
fn finish(result: Result<String, String>) -> ExitCode {
    match result {
        Ok(text) => {
            print!("{text}");
            ExitCode::Done
        }
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::WorkerFailed
        }
    }
}

async fn ask(run: Option<PathBuf>) -> Result<AgentClient<Channel>, String> {
    let base = run.unwrap_or_else(|| "runs".into());
    let mut sockets = Vec::new();
    find(&base, DEPTH, &mut sockets);
    // Runs are named by their start: the newest sorts last.
    sockets.sort();
    let mut problem = format!("no running launch below {}", base.display());
    for socket in sockets.into_iter().rev() {
        match connect(&socket).await {
            Ok(channel) => return Ok(AgentClient::new(channel)),
            Err(error) => problem = format!("no answer on {}: {error}", socket.display()),
        }
    }
    Err(problem)
}

/// Agent sockets in `dir` and below; `latest` links are left out, their targets are found anyway.
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

async fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let path = socket.to_path_buf();
    // The URI is never resolved: the connector below ignores it.
    Endpoint::from_static("http://agent")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move {
                Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(UnixStream::connect(path).await?))
            }
        }))
        .await
}

fn state(reply: &StatusReply) -> &'static str {
    match reply.state() {
        JobState::Unspecified => "unknown",
        JobState::Starting => "starting",
        JobState::Rendezvous => "rendezvous",
        JobState::Running => "running",
        JobState::Stopping => "stopping",
        JobState::Done => "done",
        JobState::Failed => "failed",
    }
}

fn rank_state(state: RankState) -> &'static str {
    match state {
        RankState::Unspecified => "unknown",
        RankState::Started => "started",
        RankState::Joined => "joined",
        RankState::Running => "running",
        RankState::Exited => "exited",
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn as_table(reply: &StatusReply) -> String {
    let mut out = format!("{}/{}  {}", reply.job_name, reply.job_id, state(reply));
    if !reply.reason.is_empty() {
        out += &format!(" ({})", reply.reason);
    }
    out += &format!(
        "\nstep {}/{}  loss {:.4}  {} tok/s  attempt {}\n\n",
        reply.step,
        reply.total_steps,
        reply.loss,
        count(reply.tokens_per_second),
        reply.attempt
    );
    out += "RANK  PID      STATE    STEP     HEARD     POOL LIVE  MAPPED  PEAK    FRAG  DEVICE\n";
    for rank in &reply.ranks {
        let shown = if rank.exit.is_empty() { &rank.device_uuid } else { &rank.exit };
        out += &format!(
            "{:<6}{:<9}{:<9}{:<9}{:<10}{:<11}{:<8}{:<8}{:<6}{}\n",
            rank.rank,
            rank.pid,
            rank_state(rank.state()),
            rank.step,
            format!("{:.1}s ago", rank.seconds_since_heartbeat),
            count(rank.pool_live_bytes as f64),
            count(rank.pool_mapped_bytes as f64),
            count(rank.pool_peak_bytes as f64),
            format!("{:.0}%", 100.0 * rank.pool_fragmentation),
            shown
        );
    }
    out
}

fn as_json(reply: &StatusReply) -> String {
    let ranks: Vec<_> = reply
        .ranks
        .iter()
        .map(|rank| {
            serde_json::json!({
                "rank": rank.rank, "local_rank": rank.local_rank, "pid": rank.pid,
                "state": rank_state(rank.state()), "step": rank.step, "device_uuid": rank.device_uuid,
                "seconds_since_heartbeat": rank.seconds_since_heartbeat, "exit": rank.exit,
                "pool_live_bytes": rank.pool_live_bytes, "pool_mapped_bytes": rank.pool_mapped_bytes,
                "pool_peak_bytes": rank.pool_peak_bytes, "pool_fragmentation": rank.pool_fragmentation,
            })
        })
        .collect();
    let job = serde_json::json!({
        "job_id": reply.job_id, "job_name": reply.job_name, "state": state(reply), "reason": reply.reason,
        "attempt": reply.attempt, "world_size": reply.world_size, "step": reply.step,
        "total_steps": reply.total_steps, "loss": reply.loss, "tokens_per_second": reply.tokens_per_second,
        "ranks": ranks,
    });
    format!("{job:#}\n")
}
