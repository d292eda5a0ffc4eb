//! The accept loop of a server on a unix socket.

use std::io;
use std::time::{Duration, Instant};

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;

use super::limits::{Connection, Connections};

/// Delay after a failed `accept(2)`, for example because descriptors or memory are exhausted.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Interval at which connections that have made no call are closed.
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// User id of the process.
    pub uid: u32,
    /// User to whom the connection is counted: the same as `uid`, unless that is one of several ids of a person.
    pub holder: u32,
    /// Process id; `None` if the process is not visible in this PID namespace.
    pub pid: Option<u32>,
    /// Whether the connection is exempt from limits.
    pub exempt: bool,
    /// Whether the connection is counted separately, so that ordinary users cannot lock it out.
    pub reserved: bool,
}

/// Returns the credentials of the process that connected, from the kernel (`SO_PEERCRED`).
pub fn peer_credentials(stream: &UnixStream) -> io::Result<Credentials> {
    let peer = stream.peer_cred()?;
    let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
    Ok(Credentials { uid: peer.uid(), holder: peer.uid(), pid, exempt: false, reserved: false })
}

/// Accepts connections until the returned stream is dropped. `identify` returns the credentials of a peer, or `None` to
/// refuse it. An error of one connection does not affect others.
pub fn accept(
    listener: UnixListener,
    open: Connections,
    identify: impl Fn(&UnixStream) -> io::Result<Option<Credentials>> + Send + 'static,
) -> ReceiverStream<io::Result<Connection<UnixStream>>> {
    let (connections, incoming) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut poll = tokio::time::interval(IDLE_POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted.map(|(stream, _)| stream),
                _ = poll.tick() => {
                    open.close_unused(Instant::now());
                    continue;
                }
                () = connections.closed() => return,
            };
            let admitted = accepted.and_then(|stream| match identify(&stream)? {
                Some(credentials) => open.admit(stream, credentials),
                None => Ok(None),
            });
            match admitted {
                Ok(Some(connection)) => {
                    if connections.send(Ok(connection)).await.is_err() {
                        return;
                    }
                }
                // Refused: the stream was dropped, so the peer sees its connection closed.
                Ok(None) => {}
                Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
            }
        }
    });
    ReceiverStream::new(incoming)
}
