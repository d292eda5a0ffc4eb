//! Who gets through to the agent: processes of its own user and root.
//!
//! Workers, which are children of this process, stay as long as they want. Of all others there is a limit, below that of
//! descriptors; where it is reached, the oldest has to go, so that callers who hang or never speak keep nobody out.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::Shutdown;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::connection;
use crate::process::Process;

/// Connections at a time that are not workers', of two descriptors each: a process often has no more than 1024.
const CALLERS: usize = 128;
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
    let callers = Callers::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted.and_then(|(stream, _)| admit(stream, &callers)),
            () = connections.closed() => return,
        };
        match accepted {
            Ok(Some(connection)) => {
                if connections.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
            // One that is turned away sees its connection closed.
            Ok(None) => {}
            Err(_) => tokio::time::sleep(BREATH).await,
        }
    }
}

fn admit(stream: UnixStream, callers: &Callers) -> io::Result<Option<Connection>> {
    let peer = stream.peer_cred()?;
    let own = rustix::process::getuid().as_raw();
    if peer.uid() != own && peer.uid() != 0 {
        return Ok(None);
    }
    let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
    let is_worker = pid.and_then(Process::read).is_some_and(|caller| caller.parent == std::process::id());
    let caller = match is_worker {
        true => None,
        false => Some(callers.add(&stream)?),
    };
    Ok(Some(Connection::new(stream, (), caller)))
}

/// The connections that are not workers'.
#[derive(Clone, Debug, Default)]
struct Callers(Arc<Mutex<Open>>);

#[derive(Debug, Default)]
struct Open {
    /// Connections so far.
    count: u64,
    /// By number: the oldest comes first.
    streams: BTreeMap<u64, OwnedFd>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Caller {
    callers: Callers,
    number: u64,
}

impl Callers {
    /// Adds a connection, and ends the oldest where there are too many.
    fn add(&self, stream: &UnixStream) -> io::Result<Caller> {
        let mut open = self.open();
        if open.streams.len() >= CALLERS
            && let Some((_, oldest)) = open.streams.pop_first()
        {
            // Its owner sees the end of the stream. One that is closed already needs no end.
            let _ = rustix::net::shutdown(&oldest, Shutdown::Both);
        }
        let number = open.count;
        open.count += 1;
        open.streams.insert(number, stream.as_fd().try_clone_to_owned()?);
        Ok(Caller { callers: self.clone(), number })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.callers.open().streams.remove(&self.number);
    }
}

/// A connection that counts until it is closed.
pub(super) type Connection = connection::Connection<(), Option<Caller>>;
