//! gRPC clients of agents and of the daemon.

use std::io;
use std::path::Path;
use std::time::Duration;

use tonic::transport::Channel;
use xlaunch_proto::net;

/// Connects to the server that listens on `socket`. Each call, and the connection itself, fails after `timeout`.
///
/// # Errors
/// Those of the socket, with their error numbers.
pub(crate) async fn connect(socket: &Path, timeout: Duration) -> io::Result<Channel> {
    net::connect(socket, net::connect::endpoint().timeout(timeout).connect_timeout(timeout)).await
}
