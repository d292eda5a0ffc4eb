//! gRPC clients: of the agents of running launches ([`launches`]) and of the node's daemon ([`daemon`]).

pub(crate) mod daemon;
pub(crate) mod launches;

use std::io;
use std::path::Path;
use std::time::Duration;

use tonic::transport::Channel;
use xlaunch_proto::net;

/// Connects to the server that listens on `socket`. The connection and each call fail after `timeout`.
///
/// # Errors
/// Those of the socket, with their `errno`; also of [`connect_without_call_timeout`].
pub(crate) async fn connect(socket: &Path, timeout: Duration) -> io::Result<Channel> {
    net::connect(socket, net::connect::endpoint().timeout(timeout).connect_timeout(timeout)).await
}

/// The same for calls that take as long as they take.
pub(crate) async fn connect_without_call_timeout(socket: &Path, timeout: Duration) -> io::Result<Channel> {
    net::connect(socket, net::connect::endpoint().connect_timeout(timeout)).await
}
