//! gRPC clients for the agents of running launches ([`launches`]) and for the node's daemon ([`daemon`]).

pub(crate) mod daemon;
pub(crate) mod launches;

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::transport::Channel;
use xlaunch_host::process::Process;
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

/// Returns what to do about the process that listens on `socket` if it does not answer because it is stopped, as after
/// Ctrl-Z.
pub(crate) async fn suspended(socket: &Path) -> Option<String> {
    let listener = UnixStream::connect(socket).await.ok()?.peer_cred().ok()?.pid()?;
    let pid = u32::try_from(listener).ok()?;
    Process::read(pid).filter(Process::is_stopped)?;
    Some(format!("is suspended: continue it with `fg` in its shell, or with `kill -CONT {pid}`"))
}
