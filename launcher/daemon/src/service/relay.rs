//! Calls that are forwarded to the agent of a running job, whose answer is not trusted: checkpoints on request, and
//! stacks of processes.
//!
//! Errors of the functions are `FAILED_PRECONDITION` for a job that does not run; the streams contain those of the
//! agent. A guard is dropped after the answer, or when the caller is gone.

use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::Channel;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{CheckpointReply, CheckpointRequest, NodeJobState, StacksReply, StacksRequest};

use super::calls;
use super::logs::{AGENT_REPLY_TIMEOUT, agent_error};
use crate::agents::connect::connect;
use crate::view::JobView;

/// Longest path of a checkpoint that is forwarded: the kernel's limit.
const MAX_PATH_BYTES: usize = 4096;
/// Number of stacks buffered for a slow client.
const STACKS_CAPACITY: usize = 2;
/// Maximum number of stacks forwarded. Each reply has one process.
const MAX_STACKS: usize = 1024;

/// Asks the job's agent for a checkpoint. The stream has one answer.
pub(super) fn checkpoint(
    job: Arc<JobView>,
    guard: impl Send + 'static,
) -> Result<mpsc::Receiver<Result<CheckpointReply, Status>>, Status> {
    check_running(&job)?;
    Ok(calls::stream(1, guard, |replies| async move {
        let saved = connect_to_agent(&job).await?.checkpoint(CheckpointRequest {}).await;
        let saved = saved.map_err(|status| failure(&job, &status))?.into_inner();
        if saved.path.len() > MAX_PATH_BYTES {
            let message = format!("the agent of job {} sent an invalid path", job.job.id);
            return Err(Status::internal(message));
        }
        // Fails if the client has disconnected.
        let _ = replies.send(Ok(saved)).await;
        Ok(())
    }))
}

/// Streams the stacks that the job's agent reads.
pub(super) fn stacks(
    job: Arc<JobView>,
    request: StacksRequest,
    guard: impl Send + 'static,
) -> Result<mpsc::Receiver<Result<StacksReply, Status>>, Status> {
    check_running(&job)?;
    Ok(calls::stream(STACKS_CAPACITY, guard, |replies| async move {
        let failed = |status| failure(&job, &status);
        let mut answers = connect_to_agent(&job).await?.stacks(request).await.map_err(failed)?.into_inner();
        for _ in 0..MAX_STACKS {
            let Some(reply) = answers.message().await.map_err(failed)? else { break };
            if replies.send(Ok(reply)).await.is_err() {
                break;
            }
        }
        Ok(())
    }))
}

/// Refuses a job that does not run.
fn check_running(job: &JobView) -> Result<(), Status> {
    let problem = match job.job.state() {
        NodeJobState::Running => return Ok(()),
        _ if job.has_ended() => "has ended",
        NodeJobState::Stopping => "is stopping",
        _ => "has not started",
    };
    Err(Status::failed_precondition(format!("job {} {problem}", job.job.id)))
}

async fn connect_to_agent(job: &JobView) -> Result<AgentClient<Channel>, Status> {
    let connected = tokio::time::timeout(AGENT_REPLY_TIMEOUT, connect(&job.socket, job.job.uid)).await;
    connected.ok().and_then(Result::ok).ok_or_else(|| no_answer(job))
}

/// Converts the error of a call to the agent for the client.
fn failure(job: &JobView, status: &Status) -> Status {
    agent_error(status).unwrap_or_else(|| no_answer(job))
}

fn no_answer(job: &JobView) -> Status {
    Status::unavailable(format!("the agent of job {} does not answer; try again", job.job.id))
}
