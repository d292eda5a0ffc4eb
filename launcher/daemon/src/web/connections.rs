//! The HTTP connections of the page, limited so that clients that hang or never speak keep no other client out.
//!
//! Where there are too many, the oldest connection without a request in progress is closed, or the oldest of all: a new
//! connection stays open until [`MAX_CONNECTIONS`] newer ones are. Browsers reopen a closed connection silently.

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
use xlaunch_proto::net::{Connection, Connections, Credentials, Limits};

use super::listen::{Listener, Stream};

/// Connections at a time.
pub(super) const MAX_CONNECTIONS: usize = 64;
/// From the end of an answer, or the start of a connection, to the end of the next request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// Pause after a failed `accept(2)`, for lack of descriptors or memory.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Anyone who reaches the page may read it: to the limits all clients are one user.
const READER: Credentials = Credentials { uid: 0, pid: None, exempt: false };

/// Answers until `ended` is.
pub(super) async fn serve(listener: Listener, routes: Router, ended: impl Future<Output = ()>) {
    let mut ended = pin!(ended);
    let mut tasks = JoinSet::new();
    let open = Connections::new(Limits {
        per_user: MAX_CONNECTIONS,
        total: MAX_CONNECTIONS,
        first_call_timeout: None,
        close_busy: true,
    });
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted.and_then(|stream| open.admit(stream, READER)) {
                Ok(Some(connection)) => {
                    tasks.spawn(answer(connection, routes.clone()));
                    // It may read what has arrived before the next connection takes its place.
                    tokio::task::yield_now().await;
                }
                Ok(None) => {}
                Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
            },
            Some(_) = tasks.join_next() => {}
            () = &mut ended => return,
        }
    }
}

/// Answers the requests of one connection.
async fn answer(connection: Connection<Box<dyn Stream>>, routes: Router) {
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
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(HEAD_BYTES);
    // A client's protocol error concerns no other client.
    let _ = builder.serve_connection(TokioIo::new(connection), TowerToHyperService::new(service)).await;
}
