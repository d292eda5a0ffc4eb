//! Accounts for calls, from the headers of the request to the last byte of the response.
//!
//! A response that the client does not read stays in memory. Until it is sent or dropped, its call counts against the
//! user's quota, and its connection does not count as idle.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::http;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::{Request, Response, Status};
use tower::Service;

use super::access::{Quota, QuotaGuard};
use xlaunch_host::net::http::guarded::GuardedBody;
use xlaunch_host::net::limits::{CallInProgress, Peer};

/// A call in progress. It ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) peer: Peer,
    _counted: Arc<(CallInProgress, QuotaGuard)>,
}

/// Starts to account for a call whose headers have arrived.
pub(super) fn begin(calls: &Quota, mut request: Request<()>) -> Result<Request<()>, Status> {
    let peer = request.extensions().get::<Peer>().cloned();
    let peer = peer.ok_or_else(|| Status::internal("the connection has no user"))?;
    let in_progress = peer.begin_call();
    let guard = calls.acquire(peer.holder, peer.reserved)?;
    request.extensions_mut().insert(Call { peer, _counted: Arc::new((in_progress, guard)) });
    Ok(request)
}

/// Runs `work` in a task that sends replies to a caller, and returns the caller's stream, which also contains the error
/// of `work`. Drops `guard` when the work is done or the caller is gone.
pub(super) fn stream<T, F>(
    capacity: usize,
    guard: impl Send + 'static,
    work: impl FnOnce(mpsc::Sender<Result<T, Status>>) -> F,
) -> mpsc::Receiver<Result<T, Status>>
where
    T: Send + 'static,
    F: Future<Output = Result<(), Status>> + Send + 'static,
{
    let (replies, stream) = mpsc::channel(capacity);
    let work = work(replies.clone());
    tokio::spawn(async move {
        tokio::select! {
            result = work => if let Err(status) = result {
                // Fails if the client has disconnected.
                let _ = replies.send(Err(status)).await;
            },
            () = replies.closed() => {}
        }
        drop(guard);
    });
    stream
}

/// Attaches a guard that [`UntilSent`] keeps until the response is sent.
pub(super) fn until_sent<T>(mut response: Response<T>, guard: QuotaGuard) -> Response<T> {
    response.extensions_mut().insert(Arc::new(guard));
    response
}

/// Middleware that keeps calls and attached guards until their responses are sent or dropped.
#[derive(Clone, Debug)]
pub(super) struct UntilSent<S>(pub(super) S);

impl<S> Service<http::Request<Body>> for UntilSent<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let call = request.extensions().get::<Call>().cloned();
        let response = self.0.call(request);
        Box::pin(async move {
            let mut response = response.await?;
            let guard = response.extensions_mut().remove::<Arc<QuotaGuard>>();
            Ok(response.map(|body| Body::new(GuardedBody { body, guard: (call, guard) })))
        })
    }
}
