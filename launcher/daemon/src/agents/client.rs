//! Calls to a job's agent.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::timeout;
use tonic::Code;
use tonic::transport::Channel;
use tracing::warn;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::{SignalRequest, StatusReply, StatusRequest, StopRequest};

use super::connect::connect;

const AGENT_CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// A client of the agent that connects on demand, and reconnects after an error.
pub(super) struct Client {
    job: u64,
    socket: PathBuf,
    uid: u32,
    connected: Option<AgentClient<Channel>>,
}

impl Client {
    pub(super) fn new(job: u64, socket: PathBuf, uid: u32) -> Self {
        Self { job, socket, uid, connected: None }
    }

    async fn connected(&mut self) -> Option<&mut AgentClient<Channel>> {
        if self.connected.is_none() {
            let connected = timeout(AGENT_CALL_TIMEOUT, connect(&self.socket, self.uid)).await;
            self.connected = connected.ok()?.ok();
        }
        self.connected.as_mut()
    }

    pub(super) async fn status(&mut self) -> Option<StatusReply> {
        let call = self.connected().await?.status(StatusRequest { history: true, local: true });
        let reply = timeout(AGENT_CALL_TIMEOUT, call).await.ok().and_then(Result::ok);
        if reply.is_none() {
            self.connected = None;
        }
        reply.map(tonic::Response::into_inner)
    }

    /// Returns whether the agent has answered. A refusal counts as an answer, and is not retried.
    pub(super) async fn signal(&mut self, signal: i32) -> bool {
        let Some(client) = self.connected().await else { return false };
        let sent = timeout(AGENT_CALL_TIMEOUT, client.signal(SignalRequest { signal })).await;
        match sent {
            Ok(Ok(_)) => true,
            Ok(Err(status)) if matches!(status.code(), Code::Unimplemented | Code::InvalidArgument) => {
                warn!(
                    job = self.job,
                    "failed to signal the workers of job {}: {}",
                    self.job,
                    status.message()
                );
                true
            }
            _ => {
                self.connected = None;
                false
            }
        }
    }

    /// Returns whether the agent has accepted the request.
    pub(super) async fn stop(&mut self) -> bool {
        let Some(client) = self.connected().await else { return false };
        let stopped =
            timeout(AGENT_CALL_TIMEOUT, client.stop(StopRequest {})).await.is_ok_and(|it| it.is_ok());
        if !stopped {
            self.connected = None;
        }
        stopped
    }
}
