//! The socket on which a rank waits for the previous one: a unix socket if that rank is on the same node, otherwise
//! TCP.

use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::wire::Socket;
use crate::collective::{CommError, Result};

/// Maximum length of a unix socket's path: `sun_path` without its terminating zero.
const MAX_SOCKET_PATH: usize = 107;

/// The listening socket on which one rank accepts its previous neighbour.
#[derive(Debug)]
pub struct RingListener {
    kind: Kind,
    address: String,
}

#[derive(Debug)]
enum Kind {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

impl RingListener {
    /// Listens on a unix socket in `dir`, or in the system's temporary directory if the path would be too long or the
    /// file system has no sockets, as those of cloud drives and virtual machines.
    pub fn bind(dir: &Path, rank: usize) -> Result<Self> {
        let name = format!("ring-{}-{rank}.sock", std::process::id());
        let in_dir = dir.join(&name);
        let fits = in_dir.as_os_str().len() <= MAX_SOCKET_PATH;
        // An earlier process with this id may have left its socket behind.
        let _ = std::fs::remove_file(&in_dir);
        let bound = if fits { UnixListener::bind(&in_dir).ok() } else { None };
        // Other users can create files in the temporary directory, but cannot guess this name.
        let unguessable = || format!("ring-{:016x}.sock", RandomState::new().hash_one(rank));
        let path = if bound.is_some() { in_dir } else { std::env::temp_dir().join(unguessable()) };
        let failed = |error: std::io::Error| CommError::PeerLost {
            peer: rank,
            reason: format!("failed to listen on {}: {error}", path.display()),
        };
        let listener = bound.map_or_else(|| UnixListener::bind(&path), Ok).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = format!("unix:{}", path.display());
        Ok(Self { kind: Kind::Unix(listener, path), address })
    }

    /// Listens on any free TCP port of `ip`, which must be one of this host's addresses.
    pub fn bind_tcp(ip: IpAddr, rank: usize) -> Result<Self> {
        let failed = |error: std::io::Error| CommError::PeerLost {
            peer: rank,
            reason: format!("failed to listen on {ip}: {error}"),
        };
        let listener = TcpListener::bind((ip, 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = format!("tcp:{}", listener.local_addr().map_err(failed)?);
        Ok(Self { kind: Kind::Tcp(listener), address })
    }

    /// Returns the address for the previous rank: `unix:PATH` or `tcp:IP:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns a waiting connection; `WouldBlock` if there is none.
    pub(super) fn accept(&self) -> std::io::Result<Socket> {
        match &self.kind {
            Kind::Unix(listener, _) => Ok(Socket::Unix(of_own_user(listener.accept()?.0)?)),
            Kind::Tcp(listener) => Ok(Socket::Tcp(listener.accept()?.0)),
        }
    }
}

/// Returns the connection if its peer is a process of this user or of root: any other process could read and change
/// gradients.
pub(super) fn of_own_user(stream: UnixStream) -> std::io::Result<UnixStream> {
    let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid;
    if peer == rustix::process::getuid() || peer.is_root() {
        return Ok(stream);
    }
    Err(std::io::Error::new(
        ErrorKind::PermissionDenied,
        format!("the process at the other end belongs to user {}", peer.as_raw()),
    ))
}

impl AsFd for RingListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.kind {
            Kind::Unix(listener, _) => listener.as_fd(),
            Kind::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for RingListener {
    fn drop(&mut self) {
        if let Kind::Unix(_, path) = &self.kind {
            // Connections outlive the path. If the path was removed already, the error is ignored.
            let _ = std::fs::remove_file(path);
        }
    }
}
