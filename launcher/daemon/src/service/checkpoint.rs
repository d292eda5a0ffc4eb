//! Checkpoints on request: the call goes on to the agent of the job, whose answer is not trusted.

use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;
use xlaunch_proto::v1::{CheckpointReply, CheckpointRequest, NodeJobState};

use super::logs::{AGENT_REPLY_TIMEOUT, agent_error};
use crate::agents::connect::connect;
use crate::view::JobView;

/// Longest path that is passed on: the kernel's.
const MAX_PATH_BYTES: usize = 4096;

/// Sends the answer of the job's agent, when it comes. Drops `guard` then, or when the caller is gone.
///
/// # Errors
/// `FAILED_PRECONDITION` for a job that does not run. In the stream: the agent's errors.
pub(super) fn stream<T: Send + 'static>(
    job: Arc<JobView>,
    guard: T,
) -> Result<mpsc::Receiver<Result<CheckpointReply, Status>>, Status> {
    let problem = match job.job.state() {
        NodeJobState::Running => None,
        _ if job.has_ended() => Some("has ended"),
        NodeJobState::Stopping => Some("is stopping"),
        _ => Some("has not started"),
    };
    if let Some(problem) = problem {
        return Err(Status::failed_precondition(format!("job {} {problem}", job.job.id)));
    }
    let (replies, stream) = mpsc::channel(1);
    tokio::spawn(async move {
        tokio::select! {
            // Fails if the client has disconnected.
            reply = ask(&job) => drop(replies.send(reply).await),
            () = replies.closed() => {}
        }
        drop(guard);
    });
    Ok(stream)
}

async fn ask(job: &JobView) -> Result<CheckpointReply, Status> {
    let id = job.job.id;
    let no_answer = || Status::unavailable(format!("the agent of job {id} does not answer; try again"));
    let connected = tokio::time::timeout(AGENT_REPLY_TIMEOUT, connect(&job.socket, job.job.uid)).await;
    let mut agent = connected.ok().and_then(Result::ok).ok_or_else(no_answer)?;
    let saved = match agent.checkpoint(CheckpointRequest {}).await {
        Ok(reply) => reply.into_inner(),
        Err(status) => return Err(agent_error(&status).unwrap_or_else(no_answer)),
    };
    match saved.path.len() <= MAX_PATH_BYTES {
        true => Ok(saved),
        false => Err(Status::internal(format!("the agent of job {id} sent an invalid path"))),
    }
}
