//! Connects to the next rank.
//!
//! Attempts are repeated until the deadline: the next rank may start later, its network may be down for a moment, and
//! its listener drops callers when too many connect at once.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::greeting::{self, CHALLENGE_BYTES, Greeting, PROOF_BYTES};
use super::listen::of_own_user;
use super::wire::Socket;

/// Delay before the second attempt. It doubles with each further attempt, up to the maximum.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(2);
const MAX_CONNECT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Time for one attempt to connect. If packets are dropped, the kernel alone would try for two minutes.
const CONNECT_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a listener to begin the greeting.
const CHALLENGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Address at which a rank listens.
#[derive(Debug)]
pub(super) enum Target {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl Target {
    /// Parses `unix:PATH` or `tcp:IP:PORT`.
    pub(super) fn parse(address: &str) -> io::Result<Self> {
        let parsed = match address.split_once(':') {
            Some(("unix", path)) => Some(Self::Unix(path.into())),
            Some(("tcp", host)) => host.parse().ok().map(Self::Tcp),
            _ => None,
        };
        parsed.ok_or_else(|| io::Error::other(format!("`{address}` is not a ring address")))
    }

    /// Connects to the rank that listens at this address, and greets it. At the deadline, returns the last error other
    /// than a timeout.
    pub(super) fn dial(&self, greeting: &Greeting<'_>, deadline: Instant) -> io::Result<Socket> {
        let mut delay = CONNECT_RETRY_DELAY;
        let mut problem = None;
        loop {
            match self.connect(deadline).and_then(|socket| greet(socket, greeting, deadline)) {
                Ok(socket) => return Ok(socket),
                Err(error) if error.kind() == ErrorKind::TimedOut => {}
                Err(error) => problem = Some(error),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(problem.unwrap_or_else(|| ErrorKind::TimedOut.into()));
            }
            std::thread::sleep(delay.min(left));
            delay = (2 * delay).min(MAX_CONNECT_RETRY_DELAY);
        }
    }

    fn connect(&self, deadline: Instant) -> io::Result<Socket> {
        match self {
            Self::Unix(path) => UnixStream::connect(path).and_then(of_own_user).map(Socket::Unix),
            Self::Tcp(address) => {
                let timeout = left(deadline)?.min(CONNECT_ATTEMPT_TIMEOUT);
                TcpStream::connect_timeout(address, timeout).map(Socket::Tcp)
            }
        }
    }
}

/// Performs the greeting, in which both this rank and the listener prove that they belong to the ring.
fn greet(mut socket: Socket, greeting: &Greeting<'_>, deadline: Instant) -> io::Result<Socket> {
    let mut challenge = [0; CHALLENGE_BYTES];
    read_by(&mut socket, &mut challenge, deadline.min(Instant::now() + CHALLENGE_TIMEOUT))?;
    let Some(challenged) = greeting::parse_challenge(&challenge) else {
        return Err(io::Error::other("the listener is not a rank of a ring"));
    };
    let own = super::nonce()?;
    socket.write_all(&greeting.answer(&challenged, &own))?;
    let mut proof = [0; PROOF_BYTES];
    // Wait until the deadline: a listener that has accepted the answer accepts no other connection.
    read_by(&mut socket, &mut proof, deadline).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
            io::Error::other("it refused this rank: it has another key, or waits for another rank")
        }
        _ => error,
    })?;
    if greeting.is_proved(&challenged, &own, &proof) {
        Ok(socket)
    } else {
        Err(io::Error::other("the listener does not have the key of this attempt"))
    }
}

/// Fills `buffer` before a deadline.
fn read_by(socket: &mut Socket, mut buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        socket.set_blocking(left(deadline)?)?;
        match socket.read(buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(ErrorKind::TimedOut.into()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the time until a deadline, for calls in which zero means no limit.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_are_parsed_and_others_refused() {
        for good in ["unix:/run/a:b.sock", "tcp:10.0.0.1:4000", "tcp:[fd77::1]:4000"] {
            assert!(Target::parse(good).is_ok(), "{good}");
        }
        for bad in ["", "nowhere", "tcp:host", "tcp:10.0.0.1", "tcp:fd77::1", "udp:10.0.0.1:4000"] {
            assert!(Target::parse(bad).unwrap_err().to_string().contains(&format!("`{bad}`")), "{bad}");
        }
    }
}
