//! Common parts of calls that are forwarded to the agent of a running job.

use tonic::Status;
use tonic::transport::Channel;
use xlaunch_proto::v1::NodeJobState;
use xlaunch_proto::v1::agent_client::AgentClient;

use super::logs::{AGENT_REPLY_TIMEOUT, agent_error};
use crate::agents::connect::connect;
use crate::view::JobView;

/// Refuses a job that does not run.
pub(super) fn check_running(job: &JobView) -> Result<(), Status> {
    let problem = match job.job.state() {
        NodeJobState::Running => return Ok(()),
        _ if job.has_ended() => "has ended",
        NodeJobState::Stopping => "is stopping",
        _ => "has not started",
    };
    Err(Status::failed_precondition(format!("job {} {problem}", job.job.id)))
}

pub(super) async fn connect_to_agent(job: &JobView) -> Result<AgentClient<Channel>, Status> {
    let connected = tokio::time::timeout(AGENT_REPLY_TIMEOUT, connect(&job.socket, job.job.uid)).await;
    connected.ok().and_then(Result::ok).ok_or_else(|| no_answer(job))
}

/// Converts the error of a call to the agent for the client.
pub(super) fn failure(job: &JobView, status: &Status) -> Status {
    agent_error(status).unwrap_or_else(|| no_answer(job))
}

fn no_answer(job: &JobView) -> Status {
    Status::unavailable(format!("the agent of job {} does not answer; try again", job.job.id))
}
