//! The coordinator's TCP listener: accepts, authenticates, and yields only connections of members.
//!
//! ```text
//! accept --callers (at most MAX_PENDING)----> task: first bytes -> TLS -> munge -> preface --> stream --> tonic
//!                                                                    '-- refused: named to the user, see `refusals`
//! ```
//! A caller costs a descriptor until its handshake starts, then a small task until it sends something, and then the
//! state of one handshake. The tasks run on all threads of the runtime. A connection that has been yielded is no longer
//! counted: its caller is a member. Without security, the preface is all that a caller has to send, and the same limits
//! apply until then.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep_until;
use tokio_rustls::LazyConfigAcceptor;
use tokio_stream::wrappers::UnboundedReceiverStream;
use xlaunch_spec::command::Endpoint;

use super::callers::{Callers, Start};
use super::preface::{Io, PrefaceError, Stream};
use super::socket::Addresses;
use super::tls::Tls;
use super::{AddressError, MungeError, Security, munge, preface, socket, tls};
use crate::refusals::RefusalLog;
use xlaunch_host::clock::IDLE_SLEEP;

/// Time limit from the first step of a handshake to the preface.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections that may wait in the kernel, which allows fewer if `net.core.somaxconn` is lower.
const BACKLOG: u32 = 4096;
/// Pause after accept(2) has failed, for example for lack of descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The reason why the coordinator cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// This host has no address to listen on.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Another process listens on all the ports.
    #[error(
        "failed to listen on {}: another process uses the port; stop it, or choose another port with `--rdzv-endpoint`",
        list(.0)
    )]
    InUse(Vec<SocketAddr>),
    /// The system refuses to bind the address.
    #[error("failed to listen on {address}: {source}; choose another address with `--rdzv-endpoint`")]
    Bind {
        /// Address to listen on.
        address: SocketAddr,
        source: io::Error,
    },
}

fn list(addresses: &[SocketAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

/// Sockets that listen for the agents of a job.
pub struct Listener {
    sockets: Vec<TcpListener>,
    security: Security,
}

impl Listener {
    /// Listens on the endpoint's addresses that belong to this host, at the first of its ports that is free on all of
    /// them.
    ///
    /// # Errors
    /// Fails if no port is free, or if this host has no suitable address.
    pub async fn bind_host(endpoint: &Endpoint, security: Security) -> Result<Self, ListenError> {
        let addresses = xlaunch_host::network::to_listen(&endpoint.host).await?;
        let mut in_use = Vec::new();
        for port in &endpoint.ports {
            let wanted: Vec<SocketAddr> = addresses.iter().map(|ip| SocketAddr::new(*ip, *port)).collect();
            match Self::bind(&wanted, security.clone()) {
                Err(ListenError::InUse(addresses)) => in_use.extend(addresses),
                result => return result,
            }
        }
        Err(ListenError::InUse(in_use))
    }

    /// Listens on these addresses. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// Fails if one of them is in use or cannot be bound, except a loopback address after others.
    pub fn bind(addresses: &[SocketAddr], security: Security) -> Result<Self, ListenError> {
        let mut sockets = Vec::with_capacity(addresses.len());
        for address in addresses {
            match listen(*address) {
                Ok(socket) => sockets.push(socket),
                Err(source) if source.kind() == io::ErrorKind::AddrInUse => {
                    return Err(ListenError::InUse(vec![*address]));
                }
                // It only serves agents of this host, and is missing where the loopback interface is down.
                Err(_) if address.ip().is_loopback() && !sockets.is_empty() => {}
                Err(source) => return Err(ListenError::Bind { address: *address, source }),
            }
        }
        Ok(Self { sockets, security })
    }

    /// Returns the addresses of the listening sockets.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.sockets.iter().filter_map(|socket| socket.local_addr().ok()).collect()
    }

    /// Accepts and authenticates callers until the returned stream is dropped. The stream has no end and no errors: a
    /// connection that fails does not affect others. `notices` receives lines about refused callers.
    pub fn incoming(
        self,
        notices: mpsc::UnboundedSender<String>,
    ) -> UnboundedReceiverStream<io::Result<Stream>> {
        let (connections, incoming) = mpsc::unbounded_channel();
        tokio::spawn(accept_all(self.sockets, self.security, connections, notices));
        UnboundedReceiverStream::new(incoming)
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Listener").field(&self.addresses()).finish()
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address.ip() {
        IpAddr::V4(_) => TcpSocket::new_v4()?,
        IpAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            // IPv4 gets sockets of its own.
            sockopt::set_ipv6_v6only(&socket, true)?;
            socket
        }
    };
    // Connections left by a coordinator that has ended must not block the port for the next one.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn accept_all(
    sockets: Vec<TcpListener>,
    security: Security,
    connections: mpsc::UnboundedSender<io::Result<Stream>>,
    notices: mpsc::UnboundedSender<String>,
) {
    let mut callers = Callers::<TcpStream, AbortHandle>::new();
    let mut handshakes = JoinSet::new();
    let mut refusals = RefusalLog::default();
    loop {
        let now = Instant::now();
        while let Some(Start { source, connection, displaced }) = callers.start(now) {
            displaced.iter().for_each(AbortHandle::abort);
            let (security, connections, has_greeted) =
                (security.clone(), connections.clone(), Arc::default());
            let flag = Arc::clone(&has_greeted);
            let handle = handshakes.spawn(async move {
                let made = authenticate(connection, &security, &flag);
                let made = tokio::time::timeout(HANDSHAKE_TIMEOUT, made).await;
                // The receiver is gone if the server has ended.
                made.unwrap_or(Err(Refused::Late))
                    .map(|stream| _ = connections.send(Ok(stream)))
                    .map_err(|why| (source, why))
            });
            callers.started(source, has_greeted, handle, now);
        }
        let accepts_at = callers.accepts_at(now);
        let wake = callers.deadline().into_iter().chain((accepts_at > now).then_some(accepts_at)).min();
        tokio::select! {
            // The handshake has finished, was aborted, or panicked.
            Some(ended) = handshakes.join_next() => {
                callers.remove_finished(AbortHandle::is_finished);
                if let Ok(Err((source, why))) = ended
                    && let Some(reason) = why.for_the_user()
                    && let Some(line) = refusals.refused(&format!("a caller at {source}"), &reason, Instant::now())
                {
                    // Fails only if the receiver is gone.
                    let _ = notices.send(line);
                }
            }
            accepted = accept(&sockets), if accepts_at <= now => match accepted {
                Ok((stream, peer)) => callers.accepted(peer.ip().to_canonical(), stream, Instant::now()),
                Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
            },
            () = sleep_until(wake.unwrap_or(now + IDLE_SLEEP).into()) => {}
            () = connections.closed() => return,
        }
    }
}

/// Waits for the next connection on any of the sockets.
async fn accept(sockets: &[TcpListener]) -> io::Result<(TcpStream, SocketAddr)> {
    std::future::poll_fn(|context| {
        for socket in sockets {
            if let Poll::Ready(accepted) = socket.poll_accept(context) {
                return Poll::Ready(accepted);
            }
        }
        Poll::Pending
    })
    .await
}

/// The reason why a caller was not admitted.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Munge(#[from] MungeError),
    #[error(transparent)]
    Preface(#[from] PrefaceError),
    #[error("it did not complete the handshake within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Late,
}

impl Refused {
    /// Returns the text for the user of the coordinator's node; `None` for a caller that went away, or that is looking
    /// for another job's coordinator on this port.
    fn for_the_user(&self) -> Option<String> {
        match self {
            Self::Io(error) => {
                let cause = error.get_ref()?.downcast_ref::<rustls::Error>()?;
                match cause {
                    rustls::Error::NoApplicationProtocol | rustls::Error::PeerSentOversizedRecord => None,
                    rustls::Error::InvalidMessage(_) => Some(
                        "it does not use TLS; if it belongs to this job, give its node the token too".into(),
                    ),
                    rustls::Error::InvalidCertificate(_) | rustls::Error::AlertReceived(_) => {
                        Some("its token differs; give all nodes the same one".into())
                    }
                    other => Some(other.to_string()),
                }
            }
            Self::Munge(MungeError::Io(_)) => None,
            Self::Munge(error) => Some(munge::refused_credential(error)),
            Self::Preface(PrefaceError::Foreign | PrefaceError::WantsTls) => {
                Some("it uses TLS, or another protocol; this job has no token (`--rdzv-insecure`)".into())
            }
            Self::Preface(PrefaceError::Io(_)) => None,
            Self::Tls(error) => Some(error.to_string()),
            Self::Late => Some(self.to_string()),
        }
    }
}

async fn authenticate(
    stream: TcpStream,
    security: &Security,
    has_greeted: &AtomicBool,
) -> Result<Stream, Refused> {
    socket::set_options(&stream)?;
    let addresses = Addresses::of(&stream)?;
    // The state of a handshake is allocated only for callers that send something.
    if stream.peek(&mut [0]).await? == 0 {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    let io: Box<dyn Io> = match security {
        // The preface is all that a caller has to send.
        Security::Insecure => Box::new(stream),
        Security::Token(tls) => Box::new(accept_tls(tls, stream, has_greeted).await?),
        Security::Munge(pair) => {
            let (tls, munge) = pair.as_ref();
            let mut stream = accept_tls(tls, stream, has_greeted).await?;
            let channel = tls::channel_id(stream.get_ref().1)?;
            munge.authenticate_agent(&mut stream, &channel).await?;
            Box::new(stream)
        }
    };
    Ok(preface::receive(io, addresses).await?)
}

async fn accept_tls(
    tls: &Tls,
    stream: TcpStream,
    has_greeted: &AtomicBool,
) -> io::Result<tokio_rustls::server::TlsStream<TcpStream>> {
    let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream).await?;
    has_greeted.store(true, Ordering::Relaxed);
    hello.into_stream(tls.acceptor_config()).await
}
