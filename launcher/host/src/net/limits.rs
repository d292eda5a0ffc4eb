//! The open connections of a server: applies the decisions of `admission`.
//!
//! Each user may have a limited number of connections. A new connection beyond that replaces the user's oldest one
//! without a call in progress. If the total limit is reached, it replaces one of the user with the most connections. A
//! connection without any call is closed after a timeout. [`Peer::begin_call`] marks a connection as busy.
//!
//! One person can connect with many user ids, from user namespaces: [`Credentials::holder`] is the user against whom
//! such a connection counts. Connections with [`Credentials::reserved`] have separate limits.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use super::admission::{self, Admission, Decision, Limits};

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// User id of the process.
    pub uid: u32,
    /// User to whom the connection is counted: the same as `uid`, unless that is one of several ids of a person.
    pub holder: u32,
    /// Process id; `None` if the process is not visible in this PID namespace.
    pub pid: Option<u32>,
    /// True if the connection is exempt from limits.
    pub exempt: bool,
    /// True if the connection is counted separately, so that ordinary users cannot lock it out.
    pub reserved: bool,
}

/// The open connections of one server.
#[derive(Clone, Debug)]
pub struct Connections {
    ordinary: Open,
    /// The same limits apply separately to reserved connections.
    reserved: Open,
    first_call_timeout: Option<Duration>,
}

type Open = Arc<Mutex<Admission<u32, Entry>>>;

fn lock(open: &Open) -> MutexGuard<'_, Admission<u32, Entry>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Entry {
    since: Instant,
    calls: Arc<Calls>,
    /// A duplicate of the descriptor, to shut the connection down.
    stream: OwnedFd,
}

#[derive(Debug, Default)]
struct Calls {
    in_progress: AtomicUsize,
    made_any: AtomicBool,
}

impl Connections {
    /// Creates the set without connections. A connection is closed if it makes no call within the timeout. Each takes
    /// two descriptors.
    pub fn new(limits: Limits, first_call_timeout: Option<Duration>) -> Self {
        let open = || Arc::new(Mutex::new(Admission::new(limits)));
        Self { ordinary: open(), reserved: open(), first_call_timeout }
    }

    /// Adds a connection, closing another one if necessary. Returns `None` if it has to be refused.
    pub fn admit<S: AsFd>(&self, stream: S, peer: Credentials) -> io::Result<Option<Connection<S>>> {
        let Credentials { uid, holder, pid, exempt, reserved } = peer;
        let calls = Arc::<Calls>::default();
        let slot = if exempt {
            None
        } else {
            let set = if reserved { &self.reserved } else { &self.ordinary };
            let (mut open, since) = (lock(set), Instant::now());
            match open.decide(holder, since) {
                Decision::Admit => {}
                Decision::Evict(other) => open.remove(other).iter().for_each(Entry::shut_down),
                Decision::Refuse => return Ok(None),
            }
            let duplicate = stream.as_fd().try_clone_to_owned()?;
            let number = open.insert(holder, Entry { since, calls: calls.clone(), stream: duplicate });
            Some(Slot { open: set.clone(), number })
        };
        Ok(Some(Connection { _slot: slot, stream, peer: Peer { uid, holder, pid, reserved, calls } }))
    }

    /// Closes connections that made no call within the timeout.
    pub fn close_unused(&self, now: Instant) {
        let Some(timeout) = self.first_call_timeout else { return };
        self.close(|entry| {
            !entry.calls.made_any.load(Ordering::Relaxed) && now.duration_since(entry.since) >= timeout
        });
    }

    /// Counts the connections of one holder to another from now on.
    pub fn recount(&self, from: u32, to: u32) {
        self.sets().for_each(|open| lock(open).recount(from, to));
    }

    /// Closes all connections.
    pub fn close_all(&self) {
        self.close(|_| true);
    }

    fn close(&self, closes: impl Fn(&Entry) -> bool) {
        for open in self.sets() {
            lock(open).retain(|entry| {
                let closes = closes(entry);
                if closes {
                    entry.shut_down();
                }
                !closes
            });
        }
    }

    fn sets(&self) -> impl Iterator<Item = &Open> {
        [&self.ordinary, &self.reserved].into_iter()
    }
}

impl Entry {
    fn shut_down(&self) {
        // The peer sees the end of the stream. Errors are ignored, as the connection may already be closed.
        let _ = rustix::net::shutdown(&self.stream, Shutdown::Both);
    }
}

impl admission::Entry for Entry {
    fn yields(&self, _: Instant) -> bool {
        self.calls.in_progress.load(Ordering::Relaxed) == 0
    }
}

/// The process at the other end of a connection, as gRPC handlers see it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// User id of the process.
    pub uid: u32,
    /// User to whom the connection is counted.
    pub holder: u32,
    /// Process id; `None` if the process is not visible in this PID namespace.
    pub pid: Option<u32>,
    /// True if the connection is counted separately from those of ordinary users.
    pub reserved: bool,
    calls: Arc<Calls>,
}

impl Peer {
    /// Marks the connection as busy until the result is dropped.
    pub fn begin_call(&self) -> CallInProgress {
        self.calls.made_any.store(true, Ordering::Relaxed);
        self.calls.in_progress.fetch_add(1, Ordering::Relaxed);
        CallInProgress(self.calls.clone())
    }
}

/// A call in progress, until it is dropped.
#[derive(Debug)]
pub struct CallInProgress(Arc<Calls>);

impl Drop for CallInProgress {
    fn drop(&mut self) {
        self.0.in_progress.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An admitted connection. It counts towards the limits until it is dropped.
#[derive(Debug)]
pub struct Connection<S> {
    /// Declared before the stream, because fields are dropped in order and a closed connection must no longer count.
    _slot: Option<Slot>,
    stream: S,
    peer: Peer,
}

impl<S> Connection<S> {
    /// Returns the process at the other end.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }
}

#[derive(Debug)]
struct Slot {
    open: Open,
    number: u64,
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.open).remove(self.number);
    }
}

impl<S> Connected for Connection<S> {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
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

#[cfg(test)]
mod tests;
