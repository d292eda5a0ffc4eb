//! The daemon's socket, and whose connections stay open.
//!
//! Anybody who may open the socket may hang, never speak, or come a thousand times. Each user has a share of the
//! connections; where theirs or all are used up, the oldest with no call in progress goes, of the user who has most. So
//! nobody keeps another user out.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::unistd::Group;
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::access::lock;
use crate::connection;

/// Connections of a user at a time, of two descriptors each.
const EACH: usize = 64;
/// Of all users.
const ALL: usize = 512;
/// Time to make a first call.
const SILENCE: Duration = Duration::from_secs(10);
/// Between looks at who has not.
const LOOK: Duration = Duration::from_secs(1);
/// Pause where a connection could not be taken, for lack of descriptors or memory.
const BREATH: Duration = Duration::from_millis(100);
/// Connections that wait to be taken.
const BACKLOG: i32 = 1024;

/// Listens on `socket`: for this user alone, or, where this is root, for the members of `group` too, if there is one.
///
/// What a dead daemon has left there is replaced. Two that start at the same moment must be kept apart by other means.
///
/// # Errors
/// `AddrInUse` where a daemon answers there; `AlreadyExists` where it is no socket.
pub fn bind(socket: &Path, group: Option<&str>) -> io::Result<UnixListener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
    let address = SocketAddrUnix::new(socket).map_err(|error| {
        io::Error::new(error.kind(), format!("{} is too long for a socket", socket.display()))
    })?;
    match fs_err::symlink_metadata(socket) {
        Ok(found) if !found.file_type().is_socket() => {
            let message = format!("{} is there already and is no socket", socket.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        Ok(_) if answers(&address)? => {
            let message = format!("another daemon listens on {}", socket.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
        }
        Ok(_) => fs_err::remove_file(socket)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let fd = stream_socket()?;
    rustix::net::bind(&fd, &address)?;
    let group = group.filter(|_| rustix::process::getuid().is_root());
    let gid = group.map(Group::from_name).transpose()?.flatten().map(|group| group.gid.as_raw());
    if let (Some(group), None) = (group, gid) {
        tracing::warn!("there is no group {group}: root alone can reach {}", socket.display());
    }
    if let Some(gid) = gid {
        chown(socket, None, Some(gid))?;
    }
    let mode = if gid.is_some() { 0o660 } else { 0o600 };
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(mode))?;
    // Nobody can have connected before: the permissions come first.
    rustix::net::listen(&fd, BACKLOG)?;
    UnixListener::from_std(fd.into())
}

/// Whether somebody listens there.
fn answers(address: &SocketAddrUnix) -> io::Result<bool> {
    match rustix::net::connect(stream_socket()?, address) {
        // A full backlog is somebody's.
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn stream_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// User and process at the other end.
pub(super) type Credentials = fn(&UnixStream) -> io::Result<(u32, Option<i32>)>;

/// As the kernel says: of the process that connected.
pub(super) fn peer(stream: &UnixStream) -> io::Result<(u32, Option<i32>)> {
    let peer = stream.peer_cred()?;
    Ok((peer.uid(), peer.pid()))
}

/// Takes connections until nobody wants them. An error of one ends none of the others.
pub(super) async fn accept(
    listener: UnixListener,
    credentials: Credentials,
    open: Connections,
    connections: mpsc::Sender<io::Result<Connection>>,
) {
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted.map(|(stream, _)| stream),
            _ = look.tick() => {
                open.end_silent(Instant::now());
                continue;
            }
            () = connections.closed() => return,
        };
        let admitted = accepted.and_then(|stream| {
            let (uid, pid) = credentials(&stream)?;
            open.add(stream, uid, pid)
        });
        match admitted {
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

/// The connections that are open.
#[derive(Clone, Debug, Default)]
pub(super) struct Connections(Arc<Mutex<Open>>);

#[derive(Debug, Default)]
struct Open {
    /// Connections so far.
    count: u64,
    /// By number: the oldest comes first.
    entries: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    uid: u32,
    since: Instant,
    calls: Arc<Calls>,
    stream: OwnedFd,
}

/// What a connection is used for.
#[derive(Debug, Default)]
struct Calls {
    in_progress: AtomicUsize,
    made_any: AtomicBool,
}

impl Connections {
    /// Adds a connection if there is room for it or can be made.
    fn add(&self, stream: UnixStream, uid: u32, pid: Option<i32>) -> io::Result<Option<Connection>> {
        let mut open = lock(&self.0);
        match open.room(uid) {
            Room::Free => {}
            Room::Instead(oldest) => open.entries.remove(&oldest).iter().for_each(end),
            Room::None => return Ok(None),
        }
        let number = open.count;
        open.count += 1;
        let calls = Arc::<Calls>::default();
        let dup = stream.as_fd().try_clone_to_owned()?;
        open.entries.insert(number, Entry { uid, since: Instant::now(), calls: calls.clone(), stream: dup });
        let counted = Counted { open: self.clone(), number };
        Ok(Some(Connection::new(stream, Peer { uid, pid, calls }, counted)))
    }

    /// Ends those that have made no call for too long.
    fn end_silent(&self, now: Instant) {
        lock(&self.0).entries.retain(|_, entry| {
            let silent = !entry.calls.made_any.load(Ordering::Relaxed);
            let stays = !silent || now.duration_since(entry.since) < SILENCE;
            if !stays {
                end(entry);
            }
            stays
        });
    }

    /// Ends all.
    pub(super) fn end_all(&self) {
        std::mem::take(&mut lock(&self.0).entries).values().for_each(end);
    }
}

fn end(entry: &Entry) {
    // The other end sees the end of the stream. One that is closed already needs no end.
    let _ = rustix::net::shutdown(&entry.stream, Shutdown::Both);
}

/// Whether one more connection fits.
#[derive(Debug, PartialEq, Eq)]
enum Room {
    Free,
    /// If this one goes.
    Instead(u64),
    None,
}

impl Open {
    fn room(&self, uid: u32) -> Room {
        let mut counts = BTreeMap::<u32, usize>::new();
        self.entries.values().for_each(|entry| *counts.entry(entry.uid).or_default() += 1);
        let own = counts.get(&uid).copied().unwrap_or(0);
        if own >= EACH {
            return self.oldest_idle(uid).map_or(Room::None, Room::Instead);
        }
        if self.entries.len() < ALL {
            return Room::Free;
        }
        match counts.into_iter().max_by_key(|(_, count)| *count) {
            Some((most, _)) if most == uid => self.oldest_idle(uid).map_or(Room::None, Room::Instead),
            // Who has many has to give one to who has fewer, idle or not.
            Some((most, count)) if count > own + 1 => {
                let oldest = || self.of(most).map(|(number, _)| number).next();
                self.oldest_idle(most).or_else(oldest).map_or(Room::None, Room::Instead)
            }
            _ => self.oldest_idle(uid).map_or(Room::None, Room::Instead),
        }
    }

    fn oldest_idle(&self, uid: u32) -> Option<u64> {
        let mut idle = self.of(uid).filter(|(_, entry)| entry.calls.in_progress.load(Ordering::Relaxed) == 0);
        idle.next().map(|(number, _)| number)
    }

    fn of(&self, uid: u32) -> impl Iterator<Item = (u64, &Entry)> {
        let own = self.entries.iter().filter(move |(_, entry)| entry.uid == uid);
        own.map(|(number, entry)| (*number, entry))
    }
}

/// Who is at the other end of the connection that a call came by.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) uid: u32,
    pub(super) pid: Option<i32>,
    calls: Arc<Calls>,
}

impl Peer {
    /// A call has begun. Until what is returned is dropped the connection is not idle.
    pub(super) fn calls(&self) -> InProgress {
        self.calls.made_any.store(true, Ordering::Relaxed);
        self.calls.in_progress.fetch_add(1, Ordering::Relaxed);
        InProgress(self.calls.clone())
    }
}

/// A call, until it is dropped.
#[derive(Debug)]
pub(super) struct InProgress(Arc<Calls>);

impl Drop for InProgress {
    fn drop(&mut self) {
        self.0.in_progress.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection that counts until it is closed.
pub(super) type Connection = connection::Connection<Peer, Counted>;

/// One of those that are open, until it is dropped.
#[derive(Debug)]
pub(super) struct Counted {
    open: Connections,
    number: u64,
}

impl Drop for Counted {
    fn drop(&mut self) {
        lock(&self.open.0).entries.remove(&self.number);
    }
}

#[cfg(test)]
mod tests;
