//! The daemon's socket: permissions, and limits on connections.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use nix::unistd::Group;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use xlaunch_host::net::limits::Connection;
use xlaunch_host::net::{self, Connections, Credentials, Limits, Replaces};

use crate::files::check_socket;
use crate::{trusted_path, users};

pub(super) const LIMITS: Limits =
    Limits { per_holder: 64, total: 512, margin: 1, replaces: Replaces::OwnYielding };
/// A connection without any call is closed after this time.
pub(super) const FIRST_CALL_TIMEOUT: Option<Duration> = Some(Duration::from_secs(10));
/// Interval between checks that the socket still exists.
const SOCKET_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of connections that the kernel queues until they are accepted.
const LISTEN_BACKLOG: i32 = 1024;

/// Listens on `socket`. Only this user can connect; if the daemon runs as root, the members of `group` can too.
///
/// Replaces the socket of a dead daemon. This is not safe against two daemons that start at the same time, which the
/// lock on the state directory prevents.
///
/// # Errors
/// `AddrInUse` if a daemon listens there; `AlreadyExists` if the path is a file that is not a socket.
pub fn bind(socket: &Path, group: Option<&str>) -> io::Result<UnixListener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
    check_socket(socket)?;
    let address = SocketAddrUnix::new(socket)?;
    match fs_err::symlink_metadata(socket) {
        Ok(found) if !found.file_type().is_socket() => {
            let message = format!("{} exists and is not a socket", socket.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        Ok(_) if is_listening(&address)? => {
            let message = format!("another daemon listens on {}", socket.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
        }
        Ok(_) => fs_err::remove_file(socket)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let fd = stream_socket()?;
    rustix::net::bind(&fd, &address)?;
    let group = group.filter(|_| rustix::process::getuid().is_root());
    let found = group.map(|group| users::known(Group::from_name(group))).transpose()?.flatten();
    let gid = found.map(|group| group.gid.as_raw());
    if let (Some(group), None) = (group, gid) {
        tracing::warn!("group `{group}` does not exist: only root can connect to {}", socket.display());
    }
    if let Some(gid) = gid {
        chown(socket, None, Some(gid))?;
    }
    let mode = if gid.is_some() { 0o660 } else { 0o600 };
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(mode))?;
    // Listening starts after the permissions are set, so that no other user can connect before.
    rustix::net::listen(&fd, LISTEN_BACKLOG)?;
    UnixListener::from_std(fd.into())
}

/// Accepts connections, as [`net::accept`] does. If the socket is deleted, for example by a cleaner of temporary files,
/// it is bound again, because clients could not find this daemon otherwise.
pub(super) fn accept(
    listener: UnixListener,
    group: Option<String>,
    open: Connections,
    identify: impl Fn(&UnixStream) -> io::Result<Option<Credentials>> + Clone + Send + 'static,
) -> ReceiverStream<io::Result<Connection<UnixStream>>> {
    let address = listener.local_addr().ok();
    let path = address.and_then(|address| Some(address.as_pathname()?.to_path_buf()));
    let (connections, incoming) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut accepted = net::accept(listener, open.clone(), identify.clone());
        let mut poll = tokio::time::interval(SOCKET_POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_reported = false;
        loop {
            tokio::select! {
                Some(connection) = accepted.next() => if connections.send(connection).await.is_err() {
                    return;
                },
                _ = poll.tick() => match path.as_deref().and_then(|path| restore(path, group.as_deref())) {
                    None => is_reported = false,
                    Some(Ok(listener)) => accepted = net::accept(listener, open.clone(), identify.clone()),
                    Some(Err(error)) if !is_reported => {
                        is_reported = true;
                        tracing::warn!("failed to restore the daemon's socket, which was deleted: {error}");
                    }
                    Some(Err(_)) => {}
                },
                () = connections.closed() => return,
            }
        }
    });
    ReceiverStream::new(incoming)
}

/// Binds the socket again if it does not exist.
fn restore(socket: &Path, group: Option<&str>) -> Option<io::Result<UnixListener>> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    match fs_err::symlink_metadata(socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        _ => return None,
    }
    let restored = || {
        trusted_path::check_parent(socket)?;
        if let Some(dir) = socket.parent().filter(|dir| !dir.exists()) {
            std::fs::DirBuilder::new().mode(0o755).create(dir)?;
            // Set explicitly, whatever the umask is, because users reach the socket through this directory.
            fs_err::set_permissions(dir, std::fs::Permissions::from_mode(0o755))?;
        }
        let listener = bind(socket, group)?;
        tracing::warn!("{} was deleted and is restored", socket.display());
        Ok(listener)
    };
    Some(restored())
}

fn is_listening(address: &SocketAddrUnix) -> io::Result<bool> {
    match rustix::net::connect(stream_socket()?, address) {
        // EAGAIN means that the backlog of a listener is full.
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn stream_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

#[cfg(test)]
mod tests;
