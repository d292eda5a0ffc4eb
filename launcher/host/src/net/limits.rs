//! Decides which connections stay open when there are too many.
//!
//! Each user may have a limited number of connections. A new connection beyond that replaces the user's oldest one
//! without a call in progress. If the total limit is reached, it replaces one of the user with the most connections. A
//! connection without any call is closed after a timeout. [`Peer::begin_call`] marks a connection as busy.
//!
//! One person can connect with many user ids, from user namespaces: [`Credentials::holder`] is the user to whom such a
//! connection is counted. Connections with [`Credentials::reserved`] have separate limits.

use std::collections::BTreeMap;
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

/// Limits of the open connections of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections per user. Each takes two descriptors.
    pub per_user: usize,
    /// Maximum number of connections of all users together; the same number applies separately to reserved connections.
    pub total: usize,
    /// Time within which a connection must make its first call; otherwise it is closed.
    pub first_call_timeout: Option<Duration>,
    /// True to close a user's oldest connection if all of them are busy, instead of refusing a new one.
    pub close_busy: bool,
}

/// The open connections of one server.
#[derive(Clone, Debug)]
pub struct Connections {
    limits: Limits,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    /// Number of the next connection.
    next: u64,
    /// Connections by number, so that the oldest is first.
    entries: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    holder: u32,
    reserved: bool,
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
    /// Creates the set without connections.
    pub fn new(limits: Limits) -> Self {
        Self { limits, open: Arc::default() }
    }

    /// Adds a connection, closing another one if necessary. Returns `None` if it has to be refused.
    pub fn admit<S: AsFd>(&self, stream: S, peer: Credentials) -> io::Result<Option<Connection<S>>> {
        let Credentials { uid, holder, pid, exempt, reserved } = peer;
        let calls = Arc::<Calls>::default();
        let slot = if exempt {
            None
        } else {
            let mut open = self.lock();
            match open.room(holder, reserved, self.limits) {
                Room::Free => {}
                Room::Close(oldest) => open.entries.remove(&oldest).iter().for_each(shut_down),
                Room::None => return Ok(None),
            }
            let number = open.next;
            open.next += 1;
            let duplicate = stream.as_fd().try_clone_to_owned()?;
            let (since, calls) = (Instant::now(), calls.clone());
            let entry = Entry { holder, reserved, since, calls, stream: duplicate };
            open.entries.insert(number, entry);
            Some(Slot { connections: self.clone(), number })
        };
        Ok(Some(Connection { _slot: slot, stream, peer: Peer { uid, holder, pid, reserved, calls } }))
    }

    /// Closes connections that made no call within the timeout.
    pub fn close_unused(&self, now: Instant) {
        let Some(timeout) = self.limits.first_call_timeout else { return };
        self.lock().entries.retain(|_, entry| {
            let unused = !entry.calls.made_any.load(Ordering::Relaxed);
            let keep = !unused || now.duration_since(entry.since) < timeout;
            if !keep {
                shut_down(entry);
            }
            keep
        });
    }

    /// Counts the connections of one holder to another from now on.
    pub fn recount(&self, from: u32, to: u32) {
        let mut open = self.lock();
        open.entries.values_mut().filter(|entry| entry.holder == from).for_each(|entry| entry.holder = to);
    }

    /// Closes all connections.
    pub fn close_all(&self) {
        std::mem::take(&mut self.lock().entries).values().for_each(shut_down);
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn shut_down(entry: &Entry) {
    // The peer sees the end of the stream. Errors are ignored, as the connection may already be closed.
    let _ = rustix::net::shutdown(&entry.stream, Shutdown::Both);
}

/// Room for one more connection.
#[derive(Debug, PartialEq, Eq)]
enum Room {
    Free,
    /// There is room if the connection with this number is closed.
    Close(u64),
    None,
}

impl Open {
    fn room(&self, holder: u32, reserved: bool, limits: Limits) -> Room {
        let mut counts = BTreeMap::<u32, usize>::new();
        let alike = self.entries.values().filter(|entry| entry.reserved == reserved);
        alike.for_each(|entry| *counts.entry(entry.holder).or_default() += 1);
        let own = counts.get(&holder).copied().unwrap_or(0);
        let close = |number: Option<u64>| number.map_or(Room::None, Room::Close);
        let among_own = || {
            if limits.close_busy {
                self.oldest_idle(holder).or_else(|| self.oldest(holder))
            } else {
                self.oldest_idle(holder)
            }
        };
        if own >= limits.per_user {
            return close(among_own());
        }
        if counts.values().sum::<usize>() < limits.total {
            return Room::Free;
        }
        match counts.into_iter().max_by_key(|(_, count)| *count) {
            // The user with the most connections loses one, even a busy one, to a user with fewer.
            Some((most, count)) if most != holder && count > own + 1 => {
                close(self.oldest_idle(most).or_else(|| self.oldest(most)))
            }
            _ => close(among_own()),
        }
    }

    fn oldest(&self, holder: u32) -> Option<u64> {
        self.of(holder).map(|(number, _)| number).next()
    }

    fn oldest_idle(&self, holder: u32) -> Option<u64> {
        let mut idle =
            self.of(holder).filter(|(_, entry)| entry.calls.in_progress.load(Ordering::Relaxed) == 0);
        idle.next().map(|(number, _)| number)
    }

    fn of(&self, holder: u32) -> impl Iterator<Item = (u64, &Entry)> {
        let own = self.entries.iter().filter(move |(_, entry)| entry.holder == holder);
        own.map(|(number, entry)| (*number, entry))
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
    connections: Connections,
    number: u64,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.connections.lock().entries.remove(&self.number);
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
