//! How neighbours meet: each rank listens, connects to the next and accepts the previous, and both say who they are.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::wire::Socket;
use crate::collective::{CommError, Result};

/// Longest path a unix socket can have, less the byte that ends it.
const MAX_PATH: usize = 107;
/// Pause between attempts to accept or connect.
const PAUSE: Duration = Duration::from_millis(2);
/// Time for a stranger on the listening socket to say who it is.
const INTRODUCTION: Duration = Duration::from_millis(500);
/// First bytes of a greeting: name and version of the protocol.
const MAGIC: &[u8; 8] = b"xlring\0\x01";
/// Bytes of a greeting: magic, job, world, rank.
const GREETING: usize = 8 + 8 + 4 + 4;

/// Where one rank waits for its previous neighbour.
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
    /// Listens on a unix socket in `dir`, or in the system's temporary directory where its path would be too long.
    pub fn bind(dir: &Path, rank: usize) -> Result<Self> {
        let name = format!("ring-{}-{rank}.sock", std::process::id());
        let short = dir.join(&name);
        let path = if short.as_os_str().len() <= MAX_PATH { short } else { std::env::temp_dir().join(name) };
        // A socket left by an earlier process of this id would be in the way.
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

    /// What the previous rank needs to know: `unix:PATH` or `tcp:IP:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    fn accept(&self) -> std::io::Result<Socket> {
        match &self.kind {
            Kind::Unix(listener, _) => Ok(Socket::Unix(listener.accept()?.0)),
            Kind::Tcp(listener) => Ok(Socket::Tcp(listener.accept()?.0)),
        }
    }
}

impl Drop for RingListener {
    fn drop(&mut self) {
        if let Kind::Unix(_, path) = &self.kind {
            // The connections live on without the path; one that is gone already needs no removal.
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
        .write_all(&greeting(addresses, rank))
        .map_err(|error| lost(next, format!("failed to greet it: {error}")))?;
    let expected = greeting(addresses, previous);
    let from_previous = loop {
        match listener.accept().and_then(introduce) {
            Ok((socket, said)) if said == expected => break socket,
            // A stranger, or a rank of another job: not ours to answer.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(PAUSE),
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
            Some(("unix", path)) => UnixStream::connect(path).map(Socket::Unix),
            Some(("tcp", host)) => TcpStream::connect(host).map(Socket::Tcp),
            _ => return Err(std::io::Error::other(format!("{address:?} is no ring address"))),
        };
        match attempt {
            Ok(socket) => return Ok(socket),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Reads what a caller says of itself.
fn introduce(mut socket: Socket) -> std::io::Result<(Socket, [u8; GREETING])> {
    socket.set_blocking(INTRODUCTION)?;
    let mut said = [0; GREETING];
    socket.read_exact(&mut said).map_err(std::io::Error::other)?;
    Ok((socket, said))
}

/// What `rank` of the job with these addresses says of itself.
fn greeting(addresses: &[String], rank: usize) -> [u8; GREETING] {
    // FNV-1a over all addresses: tells jobs apart, and is no protection against one that knows them.
    let bytes = addresses.iter().flat_map(|address| address.bytes().chain([0]));
    let job = bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let mut said = [0; GREETING];
    said[..8].copy_from_slice(MAGIC);
    said[8..16].copy_from_slice(&u64::to_le_bytes(job));
    said[16..20].copy_from_slice(&word(addresses.len()));
    said[20..].copy_from_slice(&word(rank));
    said
}
