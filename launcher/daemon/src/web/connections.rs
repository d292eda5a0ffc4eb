//! HTTP connections of the page, limited so that idle or hanging clients do not keep others out.
//!
//! Beyond [`MAX_CONNECTIONS`], a new connection closes the oldest one that has no request in progress, or if there is
//! none the oldest of all. Browsers silently reopen a closed connection.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::task::JoinSet;
use tower::ServiceExt;
use xlaunch_host::net::{Connection, Connections, Credentials, Limits, Replaces};

use super::listen::{Listener, Stream};

const MAX_CONNECTIONS: usize = 64;
/// Time from the start of a connection, or the end of a response, to the end of the next request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Delay after accept(2) has failed for lack of descriptors or memory.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Credentials of all clients, which count as a single user: TCP has no peer credentials.
const READER: Credentials = Credentials { uid: 0, holder: 0, pid: None, exempt: false, reserved: false };

/// Serves until `shutdown` resolves, then drops all connections.
pub(super) async fn serve(listener: Listener, routes: Router, shutdown: impl Future<Output = ()>) {
    let mut shutdown = pin!(shutdown);
    let mut tasks = JoinSet::new();
    let (per_holder, total) = (MAX_CONNECTIONS, MAX_CONNECTIONS);
    let open = Connections::new(Limits { per_holder, total, margin: 1, replaces: Replaces::Own }, None);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted.and_then(|stream| open.admit(stream, READER)) {
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

async fn serve_connection(connection: Connection<Box<dyn Stream>>, routes: Router) {
    let peer = connection.peer().clone();
    let service = tower::service_fn(move |request: Request<_>| {
        let (routes, call) = (routes.clone(), peer.begin_call());
        async move {
            let response = routes.oneshot(request).await;
            drop(call);
            response as Result<_, Infallible>
        }
    });
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD_BYTES);
    // A protocol error of a client only ends its own connection.
    let _ = builder.serve_connection(TokioIo::new(connection), TowerToHyperService::new(service)).await;
}
