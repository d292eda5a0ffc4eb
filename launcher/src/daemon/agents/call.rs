//! Calls to an agent, which is a process of a job's user and may be any program of theirs: what it sends is bounded, and it is
//! asked only if it runs as that user.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use xlaunch_proto::v1::agent_client::AgentClient;

/// Bytes of a message that an agent may send; a piece of a log has 64 KiB.
const MESSAGE: usize = 256 << 10;
/// Bytes that an agent may send ahead.
const WINDOW: u32 = 128 << 10;
/// Bytes of headers from an agent.
const HEADERS: u32 = 16 << 10;
/// Between questions whether an agent that sends nothing is alive, and time for the answer.
const ALIVE: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(10);

/// Connects to whoever listens on `socket`, if it is this user.
pub(in crate::daemon) async fn connect(socket: &Path, uid: u32) -> io::Result<AgentClient<Channel>> {
    let stream = UnixStream::connect(socket).await?;
    if stream.peer_cred()?.uid() != uid {
        return Err(io::Error::other("whoever listens there is another user"));
    }
    // The URI is never resolved: there is one connection, and no second.
    let endpoint = Endpoint::from_static("http://agent")
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_max_header_list_size(HEADERS)
        .http2_keep_alive_interval(ALIVE)
        .keep_alive_timeout(PATIENCE);
    let mut stream = Some(hyper_util::rt::TokioIo::new(stream));
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.take().ok_or(io::ErrorKind::NotConnected);
        async move { Ok::<_, io::Error>(stream?) }
    });
    let channel = endpoint.connect_with_connector(connector).await.map_err(io::Error::other)?;
    Ok(AgentClient::new(channel).max_decoding_message_size(MESSAGE))
}
