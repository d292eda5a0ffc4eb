//! gRPC clients for the agents of running launches ([`launches`]) and for the node's daemon ([`daemon`]).

pub(crate) mod daemon;
pub(crate) mod launches;

use std::io;
use std::path::Path;
use std::time::Duration;

use tonic::transport::Channel;
use xlaunch_proto::connect;

/// Connects to the server that listens on `socket`. The connection and each call fail after `timeout`.
///
/// # Errors
/// Errors of the socket, with their `errno`.
pub(crate) async fn connect(socket: &Path, timeout: Duration) -> io::Result<Channel> {
    connect::connect(socket, connect::endpoint().timeout(timeout).connect_timeout(timeout)).await
}

/// Like [`connect()`], but without a timeout for calls; `timeout` limits the connection only.
pub(crate) async fn connect_without_call_timeout(socket: &Path, timeout: Duration) -> io::Result<Channel> {
    connect::connect(socket, connect::endpoint().connect_timeout(timeout)).await
}
