//! One connection to the coordinator, and why there is none.
//!
//! ```text
//! host --resolve--> addresses --race--> TCP --> TLS --> munge --> preface --> channel
//! ```
//! Each call resolves the name anew and tries once: the caller retries while [`ConnectError::is_transient`]. A channel
//! has one connection. When that breaks, calls fail, and the caller connects again.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustls::{AlertDescription, Error as RustlsError};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::Channel;
use xlaunch_proto::command::Endpoint;

use super::preface::{Io, PrefaceError, Stream};
use super::socket::Addresses;
use super::tls::Tls;
use super::{MungeError, Security, TlsError, preface, socket, tls};

/// For each address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Delay before the next address is tried beside those that have not answered (RFC 8305).
const NEXT_ADDRESS_DELAY: Duration = Duration::from_millis(250);
/// From the TCP connection to the first frame. Longer than the coordinator's limit: callers wait in its kernel first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Addresses of one name that are tried.
const MAX_ADDRESSES: usize = 16;

/// A connection to the coordinator.
#[derive(Debug)]
pub struct Connection {
    /// For calls.
    pub channel: Channel,
    /// This host's end.
    pub local: SocketAddr,
    /// The coordinator's end.
    pub peer: SocketAddr,
}

/// A failure to connect: one line, with what to do.
#[derive(Debug, thiserror::Error)]
#[error("failed to connect to the coordinator at {coordinator}: {reason}")]
pub struct ConnectError {
    /// `HOST:PORT`.
    pub coordinator: String,
    /// Why.
    #[source]
    pub reason: Reason,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// The name has no address, perhaps not yet.
    #[error("the name does not resolve ({0}); check the host of `--rdzv-endpoint`")]
    Resolve(io::Error),
    /// No process listens.
    #[error(
        "connection refused; check the port of `--rdzv-endpoint` and that the coordinator's node has started"
    )]
    Refused,
    /// No answer to TCP.
    #[error("no answer within {} s; check the address and firewalls", CONNECT_TIMEOUT.as_secs())]
    NoAnswer,
    /// No way to the host.
    #[error("unreachable ({0}); check the address, routes and firewalls")]
    Unreachable(io::Error),
    /// No answer to the handshake.
    #[error("it did not answer within {} s; it may be overloaded or suspended", ANSWER_TIMEOUT.as_secs())]
    Stalled,
    /// Closed during the handshake.
    #[error("it closed the connection ({0}); it may be overloaded, or another program listens there")]
    Closed(io::Error),
    /// It has another key.
    #[error(
        "its token differs; give all nodes the same `--token-file` or `XLAUNCH_TOKEN`, and the same xlaunch"
    )]
    WrongToken,
    /// It speaks plain TCP.
    #[error("it does not use TLS; give its node the token too, or use `--rdzv-insecure` on all nodes")]
    NotTls,
    /// It speaks TLS, but this side does not.
    #[error("it expects TLS; give this node the job's token with `--token-file` or `XLAUNCH_TOKEN`")]
    WantsTls,
    /// Another service.
    #[error("another program listens there; check the port of `--rdzv-endpoint`")]
    Foreign,
    /// Authentication by munge failed.
    #[error(transparent)]
    Munge(#[from] MungeError),
    /// No keys.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl ConnectError {
    /// Whether a later try may succeed without a change of this node's configuration.
    pub fn is_transient(&self) -> bool {
        match &self.reason {
            Reason::Resolve(_)
            | Reason::Refused
            | Reason::NoAnswer
            | Reason::Unreachable(_)
            | Reason::Stalled
            | Reason::Closed(_) => true,
            Reason::Munge(error) => error.is_transient(),
            Reason::WrongToken | Reason::NotTls | Reason::WantsTls | Reason::Foreign | Reason::Tls(_) => {
                false
            }
        }
    }
}

/// Connects to the first of the endpoint's ports where the job's coordinator listens.
///
/// # Errors
/// No port has one. The error is a transient one if there is any: another job may have the ports before.
pub async fn connect(endpoint: &Endpoint, security: &Security) -> Result<Connection, ConnectError> {
    let mut failure: Option<ConnectError> = None;
    for port in &endpoint.ports {
        match connect_to_port(&endpoint.host, *port, security).await {
            Ok(connection) => return Ok(connection),
            Err(error) => {
                let keep =
                    failure.as_ref().is_some_and(|first| first.is_transient() || !error.is_transient());
                if !keep {
                    failure = Some(error);
                }
            }
        }
    }
    let no_port = || ConnectError {
        coordinator: endpoint.to_string(),
        reason: Reason::Unreachable(io::ErrorKind::InvalidInput.into()),
    };
    Err(failure.unwrap_or_else(no_port))
}

/// Connects to one port of a host.
///
/// # Errors
/// See [`Reason`].
pub async fn connect_to_port(host: &str, port: u16, security: &Security) -> Result<Connection, ConnectError> {
    let failed = |reason| ConnectError { coordinator: HostPort(host, port).to_string(), reason };
    let stream = open(host, port).await.map_err(failed)?;
    let secured = timeout(ANSWER_TIMEOUT, secure(stream, security)).await;
    let (stream, Addresses { local, peer }) = secured.unwrap_or(Err(Reason::Stalled)).map_err(failed)?;
    // The URI is a placeholder: the connection is open already.
    let placeholder = tonic::transport::Endpoint::from_static("http://coordinator");
    let channel = xlaunch_proto::net::connect_stream(stream, placeholder).await;
    let channel = channel.map_err(|error| failed(Reason::Closed(error)))?;
    Ok(Connection { channel, local, peer })
}

/// A TCP connection to the first address that answers.
async fn open(host: &str, port: u16) -> Result<TcpStream, Reason> {
    let found = timeout(super::address::RESOLVE_TIMEOUT, tokio::net::lookup_host((host, port))).await;
    let found = found.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(Reason::Resolve)?;
    let addresses = alternate_families(found.take(MAX_ADDRESSES).collect());
    if addresses.is_empty() {
        return Err(Reason::Resolve(io::ErrorKind::NotFound.into()));
    }
    race(addresses).await
}

/// Tries the addresses in order, each when the one before has failed or not answered for a while.
async fn race(addresses: Vec<SocketAddr>) -> Result<TcpStream, Reason> {
    let mut remaining = addresses.into_iter();
    let mut attempts = JoinSet::new();
    let mut failure: Option<Reason> = None;
    loop {
        if let Some(address) = remaining.next() {
            attempts.spawn(timeout(CONNECT_TIMEOUT, TcpStream::connect(address)));
        }
        tokio::select! {
            ended = attempts.join_next() => match ended {
                Some(Ok(Ok(Ok(stream)))) => return Ok(stream),
                Some(Ok(Ok(Err(error)))) => failure = Some(more_telling(failure, tcp_reason(error))),
                Some(Ok(Err(_))) => failure = Some(more_telling(failure, Reason::NoAnswer)),
                Some(Err(_)) => {}
                None => return Err(failure.unwrap_or(Reason::NoAnswer)),
            },
            () = tokio::time::sleep(NEXT_ADDRESS_DELAY), if remaining.len() > 0 => {}
        }
    }
}

/// The order of the resolver, but with the families in turns: one of them may not work.
fn alternate_families(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first_is_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == first_is_v6);
    let mut second = second.into_iter();
    let mut order = Vec::new();
    for address in first {
        order.push(address);
        order.extend(second.next());
    }
    order.extend(second);
    order
}

fn tcp_reason(error: io::Error) -> Reason {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Reason::Refused,
        io::ErrorKind::TimedOut => Reason::NoAnswer,
        _ => Reason::Unreachable(error),
    }
}

/// A host that refuses is there; one without a route may just lack an address family.
fn more_telling(old: Option<Reason>, new: Reason) -> Reason {
    match (old, new) {
        (Some(old @ Reason::Refused), _) | (Some(old), Reason::Unreachable(_)) => old,
        (_, new) => new,
    }
}

async fn secure(stream: TcpStream, security: &Security) -> Result<(Stream, Addresses), Reason> {
    socket::set_options(&stream).map_err(Reason::Closed)?;
    let addresses = Addresses::of(&stream).map_err(Reason::Closed)?;
    let io: Box<dyn Io> = match security {
        Security::Insecure => Box::new(stream),
        Security::Token(tls) => {
            let name = Tls::server_name()?;
            Box::new(tls.connector().connect(name, stream).await.map_err(handshake_reason)?)
        }
        Security::Munge(pair) => {
            let (tls, munge) = pair.as_ref();
            let name = Tls::server_name()?;
            let mut stream = tls.connector().connect(name, stream).await.map_err(handshake_reason)?;
            let channel = tls::channel_id(stream.get_ref().1).map_err(TlsError::from)?;
            match munge.authenticate_coordinator(&mut stream, &channel).await {
                Err(MungeError::Io(error)) => return Err(handshake_reason(error)),
                result => result?,
            }
            Box::new(stream)
        }
    };
    let stream = preface::send(io, addresses).await.map_err(|error| match error {
        PrefaceError::Io(error) => handshake_reason(error),
        PrefaceError::WantsTls => Reason::WantsTls,
        PrefaceError::Foreign => Reason::Foreign,
    })?;
    Ok((stream, addresses))
}

/// What went wrong in a handshake. A server reports a refused key only after the client's handshake, with its first
/// bytes.
fn handshake_reason(error: io::Error) -> Reason {
    let Some(cause) = error.get_ref().and_then(|inner| inner.downcast_ref::<RustlsError>()) else {
        return Reason::Closed(error);
    };
    match cause {
        RustlsError::InvalidCertificate(_)
        | RustlsError::AlertReceived(
            AlertDescription::AccessDenied
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::DecryptError,
        ) => Reason::WrongToken,
        RustlsError::InvalidMessage(_) => Reason::NotTls,
        _ => Reason::Foreign,
    }
}

/// `HOST:PORT`, with brackets around an IPv6 address.
struct HostPort<'a>(&'a str, u16);

impl fmt::Display for HostPort<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.contains(':') {
            true => write!(f, "[{}]:{}", self.0, self.1),
            false => write!(f, "{}:{}", self.0, self.1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn families_are_tried_in_turns() {
        let found = addresses(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1"]);
        let order = addresses(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "[::3]:1"]);
        assert_eq!(alternate_families(found), order);
        assert_eq!(alternate_families(Vec::new()), []);
    }

    #[test]
    fn missing_route_of_one_family_does_not_hide_that_the_other_refuses() {
        let route = || Reason::Unreachable(io::ErrorKind::NetworkUnreachable.into());
        assert!(matches!(more_telling(Some(route()), Reason::Refused), Reason::Refused));
        assert!(matches!(more_telling(Some(Reason::Refused), route()), Reason::Refused));
        assert!(matches!(more_telling(Some(Reason::NoAnswer), route()), Reason::NoAnswer));
        assert!(matches!(more_telling(None, route()), Reason::Unreachable(_)));
    }

    #[tokio::test]
    async fn address_that_does_not_answer_does_not_delay_the_others() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        // A listener with a full queue: further connections get no answer.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let _first = std::net::TcpStream::connect(silent.local_addr().unwrap()).unwrap();
        let order = vec![silent.local_addr().unwrap(), listener.local_addr().unwrap()];
        let start = std::time::Instant::now();
        let stream = race(order).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), listener.local_addr().unwrap());
        assert!(start.elapsed() < CONNECT_TIMEOUT, "{:?}", start.elapsed());
    }
}
