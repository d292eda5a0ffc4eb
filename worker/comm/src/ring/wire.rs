//! Full-duplex transfer: sends bytes to the next rank and receives from the previous one at the same time, so that a
//! ring in which every rank sends cannot deadlock on full socket buffers.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt;

/// Size of the send and receive buffer of each unix socket. It holds a chunk of a small model's bucket, so that a rank
/// need not wait until its neighbour is scheduled.
const SOCKET_BUFFER_BYTES: usize = 1 << 20;
/// Transfers fail after this time without a packet from the neighbour's host. The agent of a dead host is considered
/// lost earlier, which ends the job's attempt. This is longer than TCP needs to recover from a network that was cut for
/// some seconds, because the pauses between retransmissions double.
const TCP_STALL_TIMEOUT: Duration = Duration::from_secs(30);
const TCP_KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const TCP_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Number of keepalive probes. The last one ends when [`TCP_STALL_TIMEOUT`] does.
const TCP_KEEPALIVE_PROBES: u32 = 4;

/// A stream socket of either kind.
#[derive(Debug)]
pub(super) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

macro_rules! either {
    ($self:expr, $socket:ident => $call:expr) => {
        match $self {
            Socket::Unix($socket) => $call,
            Socket::Tcp($socket) => $call,
        }
    };
}

impl Socket {
    pub(super) fn try_clone(&self) -> std::io::Result<Self> {
        Ok(match self {
            Self::Unix(socket) => Self::Unix(socket.try_clone()?),
            Self::Tcp(socket) => Self::Tcp(socket.try_clone()?),
        })
    }

    /// Ends transfers in progress on all clones. If the socket is closed already, the error is ignored.
    pub(super) fn shutdown(&self) {
        let _ = either!(self, socket => socket.shutdown(std::net::Shutdown::Both));
    }

    /// Configures the socket for the greeting: blocking reads of at most `timeout`.
    pub(super) fn set_blocking(&self, timeout: Duration) -> std::io::Result<()> {
        either!(self, socket => {
            socket.set_nonblocking(false)?;
            socket.set_read_timeout(Some(timeout))
        })
    }

    pub(super) fn set_nonblocking(&self) -> std::io::Result<()> {
        either!(self, socket => socket.set_nonblocking(true))
    }

    /// Configures the socket for transfers: non-blocking, with the settings that each kind needs.
    pub(super) fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking()?;
        let fd = self.as_fd();
        match self {
            Self::Unix(_) => {
                sockopt::set_socket_send_buffer_size(fd, SOCKET_BUFFER_BYTES)?;
                sockopt::set_socket_recv_buffer_size(fd, SOCKET_BUFFER_BYTES)?;
            }
            // TCP buffers grow automatically, beyond the limit for sizes set by programs.
            Self::Tcp(socket) => {
                // Avoid Nagle's delay of small messages.
                socket.set_nodelay(true)?;
                sockopt::set_socket_keepalive(fd, true)?;
                sockopt::set_tcp_keepidle(fd, TCP_KEEPALIVE_IDLE)?;
                sockopt::set_tcp_keepintvl(fd, TCP_KEEPALIVE_INTERVAL)?;
                sockopt::set_tcp_keepcnt(fd, TCP_KEEPALIVE_PROBES)?;
                let milliseconds = u32::try_from(TCP_STALL_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
                sockopt::set_tcp_user_timeout(fd, milliseconds)?;
            }
        }
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        either!(self, socket => socket.as_fd())
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        either!(self, socket => socket.read(buffer))
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        either!(self, socket => socket.write(bytes))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The neighbour with which a transfer failed.
#[derive(Debug)]
pub(super) enum Side {
    Next,
    Previous,
}

/// Sends all of `out` to `next` while filling `into` from `previous`.
pub(super) fn exchange(
    next: &mut Socket,
    mut out: &[u8],
    previous: &mut Socket,
    mut into: &mut [u8],
) -> Result<(), (Side, std::io::Error)> {
    loop {
        let mut moved = false;
        if !out.is_empty() {
            let sent = progress(next.write(out)).map_err(|error| (Side::Next, error))?;
            out = &out[sent..];
            moved |= sent > 0;
        }
        if !into.is_empty() {
            let got = progress(previous.read(into)).map_err(|error| (Side::Previous, error))?;
            into = &mut into[got..];
            moved |= got > 0;
        }
        if out.is_empty() && into.is_empty() {
            return Ok(());
        }
        if !moved {
            wait(next, !out.is_empty(), previous, !into.is_empty())
                .map_err(|error| (Side::Previous, error))?;
        }
    }
}

/// Returns how many bytes a call moved: 0 if it would block, an error if the peer has closed the connection.
fn progress(result: std::io::Result<usize>) -> std::io::Result<usize> {
    match result {
        Ok(0) => Err(std::io::Error::new(ErrorKind::UnexpectedEof, "the connection was closed")),
        Ok(count) => Ok(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Blocks until one of the wanted directions can make progress.
fn wait(next: &Socket, writing: bool, previous: &Socket, reading: bool) -> std::io::Result<()> {
    let mut fds = Vec::with_capacity(2);
    if writing {
        fds.push(PollFd::new(next, PollFlags::OUT));
    }
    if reading {
        fds.push(PollFd::new(previous, PollFlags::IN));
    }
    match poll(&mut fds, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
