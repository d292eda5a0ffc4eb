//! gRPC channels over unix sockets.

use std::io;
use std::path::Path;

use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// An endpoint for [`connect`] and [`connect_stream`], to which timeouts and limits can be added. Its URI is never
/// resolved: the connection is made by path.
pub fn endpoint() -> Endpoint {
    Endpoint::from_static("http://unix-socket")
}

/// Connects to the server that listens on `socket`. A connection that breaks later is made again by the next call.
///
/// # Errors
/// Those of the socket, with their error numbers.
pub async fn connect(socket: &Path, endpoint: Endpoint) -> io::Result<Channel> {
    let path = socket.to_path_buf();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(hyper_util::rt::TokioIo::new(UnixStream::connect(path).await?)) }
    });
    endpoint.connect_with_connector(connector).await.map_err(|error| socket_error(&error))
}

/// Speaks gRPC over a connection that is open already. When it breaks, calls fail.
///
/// # Errors
/// Those of the handshake.
pub async fn connect_stream(stream: UnixStream, endpoint: Endpoint) -> io::Result<Channel> {
    let mut stream = Some(hyper_util::rt::TokioIo::new(stream));
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.take().ok_or(io::ErrorKind::NotConnected);
        async move { Ok::<_, io::Error>(stream?) }
    });
    endpoint.connect_with_connector(connector).await.map_err(|error| socket_error(&error))
}

/// The socket's error at the root of a transport error.
fn socket_error(error: &tonic::transport::Error) -> io::Error {
    match cause::<io::Error>(error) {
        Some(found) => found.raw_os_error().map_or_else(|| found.kind().into(), io::Error::from_raw_os_error),
        None => io::Error::other(error.to_string()),
    }
}

/// The outermost error of this type in a chain of sources.
pub fn cause<'a, E: std::error::Error + 'static>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a E> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|error| error.downcast_ref())
}
