//! The agent's socket, and the processes that may connect to it.
//!
//! Only processes of the agent's own user and of root may connect. Workers, which are children of this process, keep
//! their connections. The number of other clients is limited: when there are too many, the oldest connection is closed,
//! so that clients that hang or never send anything cannot keep others out.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use xlaunch_host::net::{self, Connection, Connections, Credentials, Limits, Replaces};

use crate::registry;
use xlaunch_host::process::Process;
use xlaunch_host::system_errors;

/// Maximum number of simultaneous client connections. Each takes two descriptors, of which a process often has no more
/// than 1024.
const MAX_CLIENTS: usize = 128;
/// Interval at which the agent checks that its socket has not been deleted.
const SOCKET_POLL_INTERVAL: Duration = Duration::from_secs(1);

type Incoming = ReceiverStream<io::Result<Connection<UnixStream>>>;

/// Listens on `socket`, which only this user (and root) may open, until the returned stream is dropped. If the socket
/// is deleted, it is created again once its directory exists: programs that clean temporary directories delete both.
pub(super) fn listen(socket: &Path) -> io::Result<Incoming> {
    let (per_holder, total) = (MAX_CLIENTS, MAX_CLIENTS);
    let open = Connections::new(Limits { per_holder, total, margin: 1, replaces: Replaces::Own }, None);
    let mut listening = bind(socket, open.clone())?;
    let socket = socket.to_path_buf();
    let (connections, incoming) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut poll = tokio::time::interval(SOCKET_POLL_INTERVAL);
        loop {
            tokio::select! {
                connection = listening.next() => {
                    let Some(connection) = connection else { return };
                    if connections.send(connection).await.is_err() {
                        return;
                    }
                }
                _ = poll.tick() => if is_missing(&socket) {
                    // If this fails, the next tick tries again.
                    listening = bind(&socket, open.clone()).unwrap_or(listening);
                },
                () = connections.closed() => return,
            }
        }
    });
    Ok(ReceiverStream::new(incoming))
}

fn bind(socket: &Path, open: Connections) -> io::Result<Incoming> {
    let listener =
        UnixListener::bind(socket).map_err(|error| system_errors::context(socket.display(), &error))?;
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    Ok(net::accept(listener, open, identify))
}

/// Returns whether the socket was deleted from a directory that is still private. Otherwise another user may have
/// created a directory of that name.
fn is_missing(socket: &Path) -> bool {
    let deleted = socket.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    deleted && socket.parent().is_some_and(registry::is_private)
}

fn identify(stream: &UnixStream) -> io::Result<Option<Credentials>> {
    let peer = net::peer_credentials(stream)?;
    let own = rustix::process::getuid().as_raw();
    if peer.uid != own && peer.uid != 0 {
        return Ok(None);
    }
    let is_worker =
        peer.pid.and_then(Process::read).is_some_and(|caller| caller.parent == std::process::id());
    Ok(Some(Credentials { exempt: is_worker, ..peer }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn deleted_socket_is_created_again_once_its_directory_exists() {
        let dir = tempfile::tempdir().unwrap();
        let private = dir.path().join("entry");
        registry::ensure_private(&private).unwrap();
        let socket = private.join("agent.sock");
        let mut incoming = listen(&socket).unwrap();
        let _first = UnixStream::connect(&socket).await.unwrap();
        incoming.next().await.unwrap().unwrap();
        fs_err::remove_dir_all(&private).unwrap();
        registry::ensure_private(&private).unwrap();
        let again = async {
            loop {
                match UnixStream::connect(&socket).await {
                    Ok(stream) => return stream,
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let _second = tokio::time::timeout(Duration::from_secs(60), again).await.unwrap();
        incoming.next().await.unwrap().unwrap();
        assert_eq!(fs_err::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
