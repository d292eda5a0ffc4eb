//! Checkpoints on request: the call goes on to the agent of the job, whose answer is not trusted.

use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;
use xlaunch_proto::v1::{CheckpointReply, CheckpointRequest};

use super::relay;
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
    relay::check_running(&job)?;
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
    let mut agent = relay::connect_to_agent(job).await?;
    let saved = agent.checkpoint(CheckpointRequest {}).await;
    let saved = saved.map_err(|status| relay::failure(job, &status))?.into_inner();
    match saved.path.len() <= MAX_PATH_BYTES {
        true => Ok(saved),
        false => Err(Status::internal(format!("the agent of job {} sent an invalid path", job.job.id))),
    }
}
