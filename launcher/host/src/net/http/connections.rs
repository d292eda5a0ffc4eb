//! HTTP connections, limited so that idle or hanging clients do not keep others out.
//!
//! Beyond the limit, a new connection closes the oldest one that has no request in progress; [`HttpLimits::replaces`]
//! says what happens if there is none. A request is in progress until its response is sent. Browsers and clients
//! silently reopen a closed connection.

use std::convert::Infallible;
use std::io;
use std::os::fd::AsFd;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::guarded::GuardedBody;
use crate::net::accept::ACCEPT_RETRY_DELAY;
use crate::net::{Connection, Connections, Credentials, Limits, Replaces};

/// Time from the start of a connection, or the end of a response, to the end of the next request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_HEAD_BYTES: usize = 16 << 10;
/// A TCP connection is closed if its client takes none of the data sent to it for this time.
const TAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// Credentials of all clients, which count as a single user: TCP has no peer credentials.
const CLIENT: Credentials = Credentials { uid: 0, holder: 0, pid: None, exempt: false, reserved: false };

/// Limits on connections.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Maximum number of connections.
    pub connections: usize,
    /// Connections of which a new one replaces the oldest.
    pub replaces: Replaces,
}

/// A listener of an HTTP server.
pub trait Accept: Sync {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + AsFd + Send + Unpin + 'static;

    /// Waits for a connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Accept for TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn accept(&self) -> io::Result<Self::Stream> {
        let (stream, _) = Self::accept(self).await?;
        // Each piece of a response is complete, so Nagle's algorithm would only add latency.
        stream.set_nodelay(true)?;
        let milliseconds = u32::try_from(TAKE_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
        rustix::net::sockopt::set_tcp_user_timeout(&stream, milliseconds)?;
        Ok(stream)
    }
}

/// Serves until `shutdown` resolves, then drops all connections.
pub async fn serve(
    listener: impl Accept,
    limits: HttpLimits,
    routes: Router,
    shutdown: impl Future<Output = ()>,
) {
    let mut shutdown = pin!(shutdown);
    let mut tasks = JoinSet::new();
    let HttpLimits { connections, replaces } = limits;
    let limits = Limits { per_holder: connections, total: connections, margin: 1, replaces };
    let open = Connections::new(limits, None);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted.and_then(|stream| open.admit(stream, CLIENT)) {
                Ok(Some(connection)) => {
                    tasks.spawn(serve_connection(connection, routes.clone()));
                    // Lets the task read a request that has already arrived before the next connection can close this
                    // one.
                    tokio::task::yield_now().await;
                }
                Ok(None) => {}
                Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
            },
            Some(_) = tasks.join_next() => {}
            () = &mut shutdown => return,
        }
    }
}

async fn serve_connection<S>(connection: Connection<S>, routes: Router)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let peer = connection.peer().clone();
    let service = tower::service_fn(move |request: Request<_>| {
        let (routes, call) = (routes.clone(), peer.begin_call());
        async move {
            let response = routes.oneshot(request).await?;
            // The request is in progress until all of the response is written.
            Ok::<_, Infallible>(response.map(|body| Body::new(GuardedBody { body, guard: call })))
        }
    });
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD_BYTES);
    // A protocol error of a client only ends its own connection.
    let _ = builder.serve_connection(TokioIo::new(connection), TowerToHyperService::new(service)).await;
}
