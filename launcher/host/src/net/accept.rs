//! The accept loop of a server on a unix socket.

use std::io;
use std::time::{Duration, Instant};

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;

use super::limits::{Connection, Connections, Credentials};

/// Delay after a failed `accept(2)`, for example because descriptors or memory are exhausted.
pub(crate) const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Interval at which connections that have made no call are closed.
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(1);

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
