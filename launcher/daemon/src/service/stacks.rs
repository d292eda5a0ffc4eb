//! Stacks of a job's processes. The call is forwarded to the job's agent, whose answer is not trusted.

use std::sync::Arc;

use tokio::sync::mpsc;
use tonic::Status;
use xlaunch_proto::v1::{StacksReply, StacksRequest};

use super::relay;
use crate::view::JobView;

/// Number of replies buffered for a slow client.
const REPLY_CAPACITY: usize = 2;
/// Maximum number of replies forwarded. Each reply has one process.
const MAX_REPLIES: usize = 1024;

/// Streams the answer of the job's agent. Drops `guard` at its end, or when the caller is gone.
///
/// # Errors
/// `FAILED_PRECONDITION` for a job that does not run. The stream contains the errors of the agent.
pub(super) fn stream<T: Send + 'static>(
    job: Arc<JobView>,
    request: StacksRequest,
    guard: T,
) -> Result<mpsc::Receiver<Result<StacksReply, Status>>, Status> {
    relay::check_running(&job)?;
    let (replies, stream) = mpsc::channel(REPLY_CAPACITY);
    tokio::spawn(async move {
        tokio::select! {
            result = ask(&job, request, &replies) => if let Err(status) = result {
                // Fails if the client has disconnected.
                let _ = replies.send(Err(status)).await;
            },
            () = replies.closed() => {}
        }
        drop(guard);
    });
    Ok(stream)
}

async fn ask(
    job: &JobView,
    request: StacksRequest,
    replies: &mpsc::Sender<Result<StacksReply, Status>>,
) -> Result<(), Status> {
    let mut agent = relay::connect_to_agent(job).await?;
    let failed = |status| relay::failure(job, &status);
    let mut answers = agent.stacks(request).await.map_err(failed)?.into_inner();
    for _ in 0..MAX_REPLIES {
        let Some(reply) = answers.message().await.map_err(failed)? else { break };
        if replies.send(Ok(reply)).await.is_err() {
            break;
        }
    }
    Ok(())
}
