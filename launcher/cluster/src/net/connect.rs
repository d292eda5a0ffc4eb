//! A single attempt to connect to an address of the coordinator, and the reason if it fails.
//!
//! ```text
//! address --> TCP --> TLS --> munge --> preface --> channel
//! ```
//! Each phase has a time limit of its own. `search` decides which addresses are tried, and when. A channel has one
//! connection. When that breaks, calls fail, and the caller connects again.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustls::{AlertDescription, Error as RustlsError};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::Channel;

use super::preface::{Io, PrefaceError, Stream};
use super::socket::Addresses;
use super::tls::Tls;
use super::{MungeError, Security, TlsError, preface, socket, tls};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time from the TCP connection to the first frame. Longer than the coordinator's own limit, because callers first wait
/// in its kernel's queue.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the coordinator.
#[derive(Debug)]
pub struct Connection {
    /// Channel for gRPC calls.
    pub channel: Channel,
    /// This host's end.
    pub local: SocketAddr,
    /// The coordinator's end.
    pub peer: SocketAddr,
}

/// A failure to connect that no later attempt can mend. The message is one line, with advice.
#[derive(Debug, thiserror::Error)]
#[error("failed to connect to the coordinator at {coordinator}: {reason}")]
pub struct ConnectError {
    /// `HOST:PORT`.
    pub coordinator: String,
    #[source]
    pub reason: Reason,
}

/// The reason why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// No process listens at the address.
    #[error(
        "connection refused; check the port of `--rdzv-endpoint` and that the coordinator's node has started"
    )]
    Refused,
    /// TCP got no answer.
    #[error("no answer within {} s; check the address and firewalls", CONNECT_TIMEOUT.as_secs())]
    NoAnswer,
    /// The host cannot be reached.
    #[error("unreachable ({0}); check the address, routes and firewalls")]
    Unreachable(io::Error),
    /// The handshake got no answer.
    #[error("it did not answer within {} s; it may be overloaded or suspended", ANSWER_TIMEOUT.as_secs())]
    Stalled,
    /// The coordinator closed the connection during the handshake.
    #[error("it closed the connection ({0}); it may be overloaded, or another program listens there")]
    Closed(io::Error),
    /// The coordinator has a different key.
    #[error(
        "its token differs; give all nodes the same `--token-file` or `XLAUNCH_TOKEN`, and the same xlaunch"
    )]
    WrongToken,
    /// The coordinator uses plain TCP, or it is a different service: the first bytes do not tell.
    #[error(
        "it does not use TLS; give its node the token too, or use `--rdzv-insecure` on all nodes; if another program \
         listens there, check the port of `--rdzv-endpoint`"
    )]
    NotTls,
    /// The coordinator uses TLS, but this side does not.
    #[error("it expects TLS; give this node the job's token with `--token-file` or `XLAUNCH_TOKEN`")]
    WantsTls,
    /// It is the coordinator of another job.
    #[error("the coordinator of another job, or of another version of xlaunch, listens there")]
    OtherJob,
    /// It is a different service.
    #[error("another program listens there; check the port of `--rdzv-endpoint`")]
    Foreign,
    /// Authentication by munge failed.
    #[error(transparent)]
    Munge(#[from] MungeError),
    /// This side has no keys for TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl Reason {
    /// Returns whether a later attempt may succeed without a change of this node's configuration.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Refused
            | Self::NoAnswer
            | Self::Unreachable(_)
            | Self::Stalled
            | Self::Closed(_)
            | Self::OtherJob => true,
            Self::Munge(error) => error.is_transient(),
            Self::WrongToken | Self::NotTls | Self::WantsTls | Self::Foreign | Self::Tls(_) => false,
        }
    }

    /// Returns whether this shows that the coordinator is gone: no process listens at its address, or a different one
    /// does.
    pub(super) fn is_another_process(&self) -> bool {
        matches!(
            self,
            Self::Refused | Self::WrongToken | Self::NotTls | Self::WantsTls | Self::OtherJob | Self::Foreign
        )
    }

    /// Returns whether this shows that the coordinator of this job is there, but one side does not accept the other, or
    /// this side has no keys. With several ports, a coordinator turns away callers of other jobs before it
    /// authenticates them, so a refusal comes from this job.
    pub(super) fn is_of_this_job(&self) -> bool {
        matches!(self, Self::WrongToken | Self::Munge(_) | Self::Tls(_))
    }

    /// Ranks how much the reason says about what to change. A host that refuses connections is up; one without a route
    /// may just lack an address family; an answer, however wrong, says more than silence.
    pub(super) fn specificity(&self) -> u8 {
        match self {
            Self::Unreachable(_) => 0,
            Self::NoAnswer => 1,
            Self::Refused => 2,
            Self::Stalled => 3,
            Self::Closed(_) => 4,
            Self::OtherJob => 5,
            Self::Foreign | Self::NotTls | Self::WantsTls => 6,
            Self::Munge(error) if error.is_transient() => 7,
            Self::WrongToken | Self::Munge(_) | Self::Tls(_) => 8,
        }
    }
}

/// Message about a name that does not resolve, perhaps not yet. In a launch over ssh, the name can be one that only the
/// user's ssh knows, and `--rdzv-endpoint` comes from the launch.
pub fn unresolved(why: &dyn fmt::Display) -> String {
    format!(
        "the name does not resolve ({why}); give `--rdzv-endpoint` a name or an address that all nodes can use"
    )
}

/// Connects to one address. `reached` is called once the TCP connection is open.
pub(super) async fn connect_to(
    address: SocketAddr,
    security: &Security,
    reached: impl FnOnce(),
) -> Result<Connection, Reason> {
    let stream = match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
        Ok(connected) => connected.map_err(tcp_reason)?,
        Err(_) => return Err(Reason::NoAnswer),
    };
    reached();
    let secured = timeout(ANSWER_TIMEOUT, secure(stream, security)).await;
    let (stream, Addresses { local, peer }) = secured.unwrap_or(Err(Reason::Stalled))?;
    // The URI is a placeholder: the connection is already open.
    let placeholder = tonic::transport::Endpoint::from_static("http://coordinator");
    let channel =
        xlaunch_proto::connect::connect_stream(stream, placeholder).await.map_err(Reason::Closed)?;
    Ok(Connection { channel, local, peer })
}

fn tcp_reason(error: io::Error) -> Reason {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Reason::Refused,
        io::ErrorKind::TimedOut => Reason::NoAnswer,
        _ => Reason::Unreachable(error),
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

/// Classifies the failure of a handshake. A server reports a refused key only after the client's handshake has
/// finished, in its first bytes.
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
        RustlsError::AlertReceived(AlertDescription::NoApplicationProtocol) => Reason::OtherJob,
        RustlsError::InvalidMessage(_) => Reason::NotTls,
        _ => Reason::Foreign,
    }
}
