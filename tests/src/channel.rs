//! gRPC over a Unix socket.

use std::path::Path;

use tonic::transport::{Channel, Endpoint, Error, Uri};

/// Connects to the gRPC server at this socket.
///
/// # Errors
/// If it does not listen.
pub async fn connect(socket: &Path) -> Result<Channel, Error> {
    let socket = socket.to_path_buf();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    Endpoint::from_static("http://socket").connect_with_connector(connector).await
}
