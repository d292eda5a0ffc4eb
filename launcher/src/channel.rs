//! gRPC over a unix socket.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Connects to whoever listens on `socket`. A connection that breaks later is made again by the next call; each call is
/// answered within `patience` or fails.
///
/// # Errors
/// Those of the socket as they are.
pub(crate) async fn connect(socket: &Path, patience: Duration) -> io::Result<Channel> {
    let path = socket.to_path_buf();
    // The URI is never resolved: the connector below ignores it.
    let endpoint = Endpoint::from_static("http://socket").timeout(patience).connect_timeout(patience);
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(hyper_util::rt::TokioIo::new(UnixStream::connect(path).await?)) }
    });
    endpoint.connect_with_connector(connector).await.map_err(|error| as_io(&error))
}

/// The error of the socket that is at the bottom of it.
fn as_io(error: &tonic::transport::Error) -> io::Error {
    match cause::<io::Error>(error) {
        Some(found) => found.raw_os_error().map_or_else(|| found.kind().into(), io::Error::from_raw_os_error),
        None => io::Error::other(error.to_string()),
    }
}

/// The first error of this type, from the outside inwards.
pub(crate) fn cause<'a, E: std::error::Error + 'static>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a E> {
    std::iter::successors(Some(error), |error| error.source()).find_map(|error| error.downcast_ref())
}
