//! A connection with an agent, for those who are no workers.

use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error, Uri};
use xlaunch_proto::v1::agent_client::AgentClient;

/// Connects to the agent that listens on `socket`; `patience` is for each answer.
pub async fn connect(socket: &Path, patience: Duration) -> Result<AgentClient<Channel>, Error> {
    Ok(AgentClient::new(channel(socket, patience).await?))
}

/// A channel over a unix socket.
pub async fn channel(socket: &Path, patience: Duration) -> Result<Channel, Error> {
    let path = socket.to_path_buf();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(UnixStream::connect(path).await?)) }
    });
    // The URI is never resolved: the connector ignores it.
    let endpoint = Endpoint::from_static("http://unix").timeout(patience).connect_timeout(patience);
    endpoint.connect_with_connector(connector).await
}
