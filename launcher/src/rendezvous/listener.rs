//! Who gets through to the agent: processes of its own user and root, and no more of them at a time than it has descriptors
//! for. Workers, which are children of this process, always do.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use crate::status::sample;

/// Connections at a time that are not workers'. A process may have 1024 descriptors, often enough.
const CALLERS: usize = 256;
/// Pause where a connection could not be taken, for lack of descriptors or memory.
const BREATH: Duration = Duration::from_millis(100);

/// Listens on `socket`, which nobody else may open.
pub(super) fn bind(socket: &Path) -> io::Result<ReceiverStream<io::Result<Connection>>> {
    use std::os::unix::fs::PermissionsExt;
    let listener = UnixListener::bind(socket)?;
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    let (connections, incoming) = mpsc::channel(1);
    tokio::spawn(accept(listener, connections));
    Ok(ReceiverStream::new(incoming))
}

/// Takes connections until nobody wants them. An error of one ends none of the others.
async fn accept(listener: UnixListener, connections: mpsc::Sender<io::Result<Connection>>) {
    let callers = Arc::new(Semaphore::new(CALLERS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = connections.closed() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                // One that is turned away sees its connection closed.
                if let Some(connection) = admit(stream, &callers)
                    && connections.send(Ok(connection)).await.is_err()
                {
                    return;
                }
            }
            Err(_) => tokio::time::sleep(BREATH).await,
        }
    }
}

fn admit(stream: UnixStream, callers: &Arc<Semaphore>) -> Option<Connection> {
    let peer = stream.peer_cred().ok()?;
    let own = rustix::process::getuid().as_raw();
    if peer.uid() != own && peer.uid() != 0 {
        return None;
    }
    let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
    let is_worker = pid.and_then(sample::parent) == Some(std::process::id());
    let permit = match is_worker {
        true => None,
        false => Some(callers.clone().try_acquire_owned().ok()?),
    };
    Some(Connection { stream, _permit: permit })
}

/// A connection that counts until it is closed.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
