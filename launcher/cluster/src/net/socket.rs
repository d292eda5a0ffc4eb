//! Options and addresses of TCP connections between agents and the coordinator.
//!
//! Heartbeats detect a lost peer long before TCP does. These options let the kernel give up connections that no process
//! closes.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// Longer than the longest silence after which a host counts as lost.
const USER_TIMEOUT: Duration = Duration::from_secs(70);
/// Probes of an idle connection begin after this time.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(20);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_ALIVE_PROBES: u32 = 5;

/// Addresses of both ends of a connection. An IPv4 address is never in its IPv6-mapped form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Address of this process.
    pub local: SocketAddr,
    /// Address of the other side.
    pub peer: SocketAddr,
}

impl Addresses {
    pub(super) fn of(stream: &TcpStream) -> io::Result<Self> {
        let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        Ok(Self { local: canonical(stream.local_addr()?), peer: canonical(stream.peer_addr()?) })
    }
}

/// Sets the socket options of a connection.
pub(super) fn set_options(stream: &TcpStream) -> io::Result<()> {
    // Messages are small and written in one piece, so there is nothing to coalesce.
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_PROBES)?;
    let milliseconds = u32::try_from(USER_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
    Ok(sockopt::set_tcp_user_timeout(stream, milliseconds)?)
}
