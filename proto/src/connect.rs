//! gRPC channels over unix sockets, and over streams that are already open.

use std::io;
use std::path::Path;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Returns an endpoint for [`connect`] and [`connect_stream`], to which timeouts and limits can be added. Its URI is a
/// placeholder that is never resolved.
pub fn endpoint() -> Endpoint {
    Endpoint::from_static("http://unix-socket")
}

/// Connects to the server that listens on `socket`. If the connection breaks, the next call reconnects. Errors keep the
/// socket's error number.
pub async fn connect(socket: &Path, endpoint: Endpoint) -> io::Result<Channel> {
    let path = socket.to_path_buf();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(hyper_util::rt::TokioIo::new(UnixStream::connect(path).await?)) }
    });
    endpoint.connect_with_connector(connector).await.map_err(|error| socket_error(&error))
}

/// Returns a channel over a connection that is already open. If the connection breaks, calls fail.
pub async fn connect_stream<S>(stream: S, endpoint: Endpoint) -> io::Result<Channel>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut stream = Some(hyper_util::rt::TokioIo::new(stream));
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.take().ok_or(io::ErrorKind::NotConnected);
        async move { Ok::<_, io::Error>(stream?) }
    });
    endpoint.connect_with_connector(connector).await.map_err(|error| socket_error(&error))
}

/// Returns the socket error that caused a transport error.
fn socket_error(error: &tonic::transport::Error) -> io::Error {
    match cause::<io::Error>(error) {
        Some(found) => found.raw_os_error().map_or_else(|| found.kind().into(), io::Error::from_raw_os_error),
        None => io::Error::other(error.to_string()),
    }
}

/// Returns the first error of this type in a chain of sources.
pub fn cause<'a, E: std::error::Error + 'static>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a E> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|error| error.downcast_ref())
}
