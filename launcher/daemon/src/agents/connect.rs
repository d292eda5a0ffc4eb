//! A connection with the agent of a job, whose user may have put anything in its place: it is used only if that user is at
//! the other end, so that nobody has the daemon ask or end another user's job, and what it says is bounded.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::transport::Channel;
use xlaunch_proto::net;
use xlaunch_proto::v1::agent_client::AgentClient;

/// Bytes of a message; our agents send pieces of 64 KiB.
pub(crate) const PIECE: usize = 256 << 10;
/// Bytes that an agent may send ahead.
const WINDOW: u32 = 128 << 10;
/// Bytes of headers.
const HEADERS: u32 = 16 << 10;
/// Between questions whether an agent that sends nothing is alive.
const ALIVE: Duration = Duration::from_secs(20);
/// Time for the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connects to who listens on `socket`, if it is this user. There is one connection: when it breaks, calls fail.
///
/// # Errors
/// Those of the socket; where another user listens.
pub(crate) async fn connect(socket: &Path, uid: u32) -> io::Result<AgentClient<Channel>> {
    let stream = UnixStream::connect(socket).await?;
    if stream.peer_cred()?.uid() != uid {
        return Err(io::Error::other("whoever listens there is another user"));
    }
    let endpoint = net::connect::endpoint()
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_max_header_list_size(HEADERS)
        .http2_keep_alive_interval(ALIVE)
        .keep_alive_timeout(PATIENCE);
    let channel = net::connect_stream(stream, endpoint).await?;
    Ok(AgentClient::new(channel).max_decoding_message_size(PIECE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn another_users_agent_is_not_spoken_to() {
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
