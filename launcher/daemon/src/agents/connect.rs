//! Connections to agents.
//!
//! The directory of the socket belongs to the job's user, who may have replaced the socket. The daemon connects only to
//! a socket of that user, without following links, and uses the connection only if the peer is a process of that user.
//! So no user can make the daemon query or stop another user's job, or activate a system service. Message and window
//! sizes are bounded.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};

use tokio::net::UnixStream;
use tonic::transport::Channel;
use xlaunch_proto::connect;
use xlaunch_proto::v1::agent_client::AgentClient;

/// Maximum size of a message. Agents send logs in chunks of 64 KiB.
const AGENT_MESSAGE_BYTES: usize = 256 << 10;
/// HTTP/2 flow-control window of a stream, and of the connection.
const AGENT_WINDOW_BYTES: u32 = 128 << 10;
const AGENT_HEADER_BYTES: u32 = 16 << 10;
const AGENT_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const AGENT_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects to `socket` if a process of user `uid` listens on it. The channel does not reconnect: calls fail once the
/// connection is broken.
pub(crate) async fn connect(socket: &Path, uid: u32) -> io::Result<AgentClient<Channel>> {
    let refused = || io::Error::other("there is no socket of the job's user");
    let (dir, name) = socket.parent().zip(socket.file_name()).ok_or_else(refused)?;
    let path = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = openat(CWD, dir, path | OFlags::DIRECTORY, Mode::empty())?;
    let socket = openat(&dir, name, path, Mode::empty())?;
    let found = fstat(&socket)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket || found.st_uid != uid {
        return Err(refused());
    }
    let stream = UnixStream::connect(format!("/proc/self/fd/{}", socket.as_raw_fd())).await?;
    if stream.peer_cred()?.uid() != uid {
        return Err(io::Error::other("the process that listens there belongs to another user"));
    }
    let endpoint = connect::endpoint()
        .initial_stream_window_size(AGENT_WINDOW_BYTES)
        .initial_connection_window_size(AGENT_WINDOW_BYTES)
        .http2_max_header_list_size(AGENT_HEADER_BYTES)
        .http2_keep_alive_interval(AGENT_KEEPALIVE_INTERVAL)
        .keep_alive_timeout(AGENT_KEEPALIVE_TIMEOUT);
    let channel = connect::connect_stream(stream, endpoint).await?;
    Ok(AgentClient::new(channel).max_decoding_message_size(AGENT_MESSAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_socket_of_the_jobs_user_is_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, link) = (dir.path().join("agent.sock"), dir.path().join("link.sock"));
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let own = rustix::process::getuid().as_raw();
        for (path, uid) in [(&socket, own + 1), (&link, own), (&file, own)] {
            let error = connect(path, uid).await.unwrap_err();
            assert!(error.to_string().contains("no socket of the job's user"), "{error}");
        }
        let accepted = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
        assert!(accepted.is_err(), "a refused socket sees no connection");
    }
}
