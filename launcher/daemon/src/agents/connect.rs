//! Connections to agents.
//!
//! The socket's directory belongs to the job's user, who may have replaced the socket by a link to another one. The
//! connection is used only if its peer is a process of that user, so that no user can make the daemon query or stop
//! another user's job. Message and window sizes are bounded.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::transport::Channel;
use xlaunch_proto::net;
use xlaunch_proto::v1::agent_client::AgentClient;

/// Maximum size of a message. Agents send logs in chunks of 64 KiB.
const AGENT_MESSAGE_BYTES: usize = 256 << 10;
/// HTTP/2 flow-control window of a stream and of the connection.
const AGENT_WINDOW_BYTES: u32 = 128 << 10;
const AGENT_HEADER_BYTES: u32 = 16 << 10;
const AGENT_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const AGENT_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects to `socket` if a process of user `uid` listens on it. The channel does not reconnect: when the connection
/// breaks, calls fail.
pub(crate) async fn connect(socket: &Path, uid: u32) -> io::Result<AgentClient<Channel>> {
    let stream = UnixStream::connect(socket).await?;
    if stream.peer_cred()?.uid() != uid {
        return Err(io::Error::other("the process that listens there belongs to another user"));
    }
    let endpoint = net::connect::endpoint()
        .initial_stream_window_size(AGENT_WINDOW_BYTES)
        .initial_connection_window_size(AGENT_WINDOW_BYTES)
        .http2_max_header_list_size(AGENT_HEADER_BYTES)
        .http2_keep_alive_interval(AGENT_KEEPALIVE_INTERVAL)
        .keep_alive_timeout(AGENT_KEEPALIVE_TIMEOUT);
    let channel = net::connect_stream(stream, endpoint).await?;
    Ok(AgentClient::new(channel).max_decoding_message_size(AGENT_MESSAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn socket_of_another_user_receives_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let own = rustix::process::getuid().as_raw();
        let error = connect(&socket, own + 1).await.unwrap_err();
        assert!(error.to_string().contains("another user"), "{error}");
        use tokio::io::AsyncReadExt;
        assert_eq!(listener.accept().await.unwrap().0.read(&mut [0]).await.unwrap(), 0);
    }
}
