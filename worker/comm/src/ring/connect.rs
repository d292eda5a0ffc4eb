//! How ring neighbours connect: each rank listens, connects to the next one and accepts the previous one, which sends a
//! handshake with its rank and job.

use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::wire::Socket;
use crate::collective::{CommError, Result};

/// Longest path of a unix socket: `sun_path` without its terminating zero.
const MAX_SOCKET_PATH: usize = 107;
/// Delay between attempts to accept or connect.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(2);
/// Time for an accepted connection to send its handshake. Short, as a foreign process may connect and send nothing.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_millis(500);
/// First bytes of a handshake: name and version of the protocol.
const MAGIC: &[u8; 8] = b"xlring\0\x02";
/// Bytes of a handshake: magic, hash of the job's addresses, world size, rank.
const HANDSHAKE_BYTES: usize = 8 + 8 + 4 + 4;

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
    /// Listens on a unix socket in `dir`, or in the system's temporary directory if the path would be too long.
    pub fn bind(dir: &Path, rank: usize) -> Result<Self> {
        let name = format!("ring-{}-{rank}.sock", std::process::id());
        let in_dir = dir.join(&name);
        let fits = in_dir.as_os_str().len() <= MAX_SOCKET_PATH;
        // Other users can take names in the temporary directory, but not guess this one.
        let unguessable = || format!("ring-{:016x}.sock", RandomState::new().hash_one(rank));
        let path = if fits { in_dir } else { std::env::temp_dir().join(unguessable()) };
        // An earlier process with this id may have left its socket.
        let _ = std::fs::remove_file(&path);
        let failed = |error: std::io::Error| CommError::PeerLost {
            peer: rank,
            reason: format!("failed to listen on {}: {error}", path.display()),
        };
        let listener = UnixListener::bind(&path).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = format!("unix:{}", path.display());
        Ok(Self { kind: Kind::Unix(listener, path), address })
    }

    /// Listens on any free TCP port of `ip`.
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

    /// What the previous rank connects to: `unix:PATH` or `tcp:IP:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    fn accept(&self) -> std::io::Result<Socket> {
        match &self.kind {
            Kind::Unix(listener, _) => Ok(Socket::Unix(of_own_user(listener.accept()?.0)?)),
            Kind::Tcp(listener) => Ok(Socket::Tcp(listener.accept()?.0)),
        }
    }
}

/// The connection, if its peer is a process of this user or of root: another could read and change gradients.
fn of_own_user(stream: UnixStream) -> std::io::Result<UnixStream> {
    let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid;
    if peer == rustix::process::getuid() || peer.is_root() {
        return Ok(stream);
    }
    Err(std::io::Error::new(
        ErrorKind::PermissionDenied,
        format!("the process at the other end belongs to user {}", peer.as_raw()),
    ))
}

impl Drop for RingListener {
    fn drop(&mut self) {
        if let Kind::Unix(_, path) = &self.kind {
            // Connections outlive the path. The error of a path that was removed already is ignored.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The connections to the next and from the previous rank, ready for transfers.
pub(super) fn neighbours(
    listener: &RingListener,
    rank: usize,
    addresses: &[String],
    timeout: Duration,
) -> Result<(Socket, Socket)> {
    let world = addresses.len();
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    let deadline = Instant::now() + timeout;
    let lost = |peer: usize, reason: String| CommError::PeerLost { peer, reason };

    let mut to_next = dial(&addresses[next], deadline).map_err(|error| lost(next, error.to_string()))?;
    to_next
        .write_all(&handshake(addresses, rank))
        .map_err(|error| lost(next, format!("failed to send the handshake: {error}")))?;
    let expected = handshake(addresses, previous);
    let from_previous = loop {
        match listener.accept().and_then(read_handshake) {
            Ok((socket, received)) if received == expected => break socket,
            // A foreign process, or a rank of another job: closed without an answer.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(CONNECT_RETRY_DELAY),
            Err(_) => {}
        }
        if Instant::now() > deadline {
            return Err(lost(previous, format!("it did not connect within {} s", timeout.as_secs())));
        }
    };
    for (peer, socket) in [(next, &to_next), (previous, &from_previous)] {
        socket.prepare().map_err(|error| lost(peer, error.to_string()))?;
    }
    Ok((to_next, from_previous))
}

fn dial(address: &str, deadline: Instant) -> std::io::Result<Socket> {
    loop {
        let attempt = match address.split_once(':') {
            Some(("unix", path)) => UnixStream::connect(path).and_then(of_own_user).map(Socket::Unix),
            Some(("tcp", host)) => TcpStream::connect(host).map(Socket::Tcp),
            _ => return Err(std::io::Error::other(format!("`{address}` is not a ring address"))),
        };
        match attempt {
            Ok(socket) => return Ok(socket),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(CONNECT_RETRY_DELAY),
        }
    }
}

fn read_handshake(mut socket: Socket) -> std::io::Result<(Socket, [u8; HANDSHAKE_BYTES])> {
    socket.set_blocking(HANDSHAKE_TIMEOUT)?;
    let mut received = [0; HANDSHAKE_BYTES];
    // A timed-out read is WouldBlock too, which the caller takes for "no connection yet": hence another kind.
    socket.read_exact(&mut received).map_err(std::io::Error::other)?;
    Ok((socket, received))
}

/// The handshake that `rank` of the job with these addresses sends.
fn handshake(addresses: &[String], rank: usize) -> [u8; HANDSHAKE_BYTES] {
    // FNV-1a over all addresses: it tells jobs apart. It does not authenticate: anyone who knows the addresses can
    // compute it.
    let text = addresses.iter().flat_map(|address| address.bytes().chain([0]));
    let job = text.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let mut bytes = [0; HANDSHAKE_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&u64::to_le_bytes(job));
    bytes[16..20].copy_from_slice(&word(addresses.len()));
    bytes[20..].copy_from_slice(&word(rank));
    bytes
}
