//! Checkpoints on request. The call is forwarded to the job's agent, whose answer is not trusted.

use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;
use xlaunch_proto::v1::{CheckpointReply, CheckpointRequest};

use super::relay;
use crate::view::JobView;

/// Longest path that is forwarded: the kernel's limit.
const MAX_PATH_BYTES: usize = 4096;

/// Returns a stream of the answer of the job's agent. Drops `guard` after the answer, or when the caller is gone.
///
/// # Errors
/// `FAILED_PRECONDITION` for a job that does not run. The stream contains the errors of the agent.
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
    if saved.path.len() <= MAX_PATH_BYTES {
        Ok(saved)
    } else {
        Err(Status::internal(format!("the agent of job {} sent an invalid path", job.job.id)))
    }
}
