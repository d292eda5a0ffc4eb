//! A call, from its headers to the last byte of its answer.
//!
//! An answer that nobody reads stays in memory: its call counts against its user as long, and keeps its connection from
//! being idle.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Bytes, HttpBody};
use axum::http;
use http_body::{Frame, SizeHint};
use tonic::body::Body;
use tonic::{Request, Response, Status};
use tower::Service;

use super::access::{Held, Quota};
use super::busy;
use xlaunch_proto::net::limits::{CallInProgress, Peer};

/// A call in progress; clones are of the same.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) peer: Peer,
    _counted: Arc<(CallInProgress, Held)>,
}

/// Counts a call whose headers have come.
pub(super) fn begin(calls: &Quota, mut request: Request<()>) -> Result<Request<()>, Status> {
    let peer = request.extensions().get::<Peer>().cloned();
    let peer = peer.ok_or_else(|| Status::internal("the connection has no user"))?;
    let in_progress = peer.begin_call();
    let held = calls.take(peer.uid).map_err(|count| busy(count, "calls"))?;
    request.extensions_mut().insert(Call { peer, _counted: Arc::new((in_progress, held)) });
    Ok(request)
}

/// Holds this until the answer is sent, by way of [`UntilSent`].
pub(super) fn until_sent<T>(mut answer: Response<T>, held: Held) -> Response<T> {
    answer.extensions_mut().insert(Arc::new(held));
    answer
}

/// Holds calls until their answers are sent, or nobody wants them.
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
        let answer = self.0.call(request);
        Box::pin(async move {
            let mut answer = answer.await?;
            let held = answer.extensions_mut().remove::<Arc<Held>>();
            Ok(answer.map(|body| Body::new(Unsent { body, _held: (call, held) })))
        })
    }
}

/// An answer with what is held until it is sent. Its trailers are asked for when the caller has taken what is before them.
struct Unsent {
    body: Body,
    _held: (Option<Call>, Option<Arc<Held>>),
}

impl HttpBody for Unsent {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
