//! The gRPC service of a coordinator: one stream per agent.

use std::error::Error;
use std::io::ErrorKind;
use std::pin::Pin;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};
use xlaunch_proto::v1::agent_message::Body;
use xlaunch_proto::v1::group_server::Group;
use xlaunch_proto::v1::{AgentMessage, CoordinatorMessage};

use super::coordinator::{Event, HowClosed};
use super::presence::Presence;

/// Time for an agent to send its greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// Passes messages on to the coordinator's task.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) events: mpsc::UnboundedSender<Event>,
}

#[tonic::async_trait]
impl Group for Service {
    type AttendStream = Pin<Box<dyn Stream<Item = Result<CoordinatorMessage, Status>> + Send>>;

    async fn attend(
        &self,
        request: Request<Streaming<AgentMessage>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let mut messages = request.into_inner();
        let ending = || Status::unavailable("the coordinator is shutting down");
        let first = tokio::time::timeout(GREETING_TIMEOUT, messages.next()).await;
        let Ok(Some(Ok(AgentMessage { acknowledged, body: Some(Body::Greeting(greeting)), .. }))) = first
        else {
            return Err(Status::invalid_argument("the first message must be a greeting"));
        };
        let (replies, outgoing) = mpsc::unbounded_channel();
        let (opened, connection) = oneshot::channel();
        let presence = match u16::try_from(greeting.probe_port) {
            Ok(port) if port > 0 => Some(Presence::watch(greeting.address.clone(), port)),
            _ => None,
        };
        let event = Event::Opened { greeting, acknowledged, replies, opened };
        self.events.send(event).map_err(|_| ending())?;
        let connection = connection.await.map_err(|_| ending())?;
        let events = self.events.clone();
        tokio::spawn(async move {
            let how = loop {
                match messages.next().await {
                    Some(Ok(message)) => {
                        if events.send(Event::Received(connection, message)).is_err() {
                            return;
                        }
                    }
                    Some(Err(status)) if !is_end_of_file(&status) => break HowClosed::ByNetwork,
                    Some(Err(_)) | None => break HowClosed::ByAgent,
                }
            };
            // Fails only if the coordinator has ended.
            let _ = events.send(Event::Closed(connection, how));
            if let (HowClosed::ByNetwork, Some(presence)) = (how, presence)
                && presence.ends().await
            {
                let _ = events.send(Event::Closed(connection, HowClosed::ByAgent));
            }
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(outgoing).map(Ok))))
    }
}

/// Returns whether a stream has ended because the agent's kernel closed the connection, as it does when the process is
/// gone. A reset does not count, because a middlebox can send one too; see `presence`.
fn is_end_of_file(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if let Some(io) = error.downcast_ref::<h2::Error>().and_then(h2::Error::get_io) {
            // The first with TLS, the second without.
            return matches!(io.kind(), ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe);
        }
        source = error.source();
    }
    false
}
