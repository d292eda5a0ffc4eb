//! The daemon's socket: its permissions, and the limits on connections.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use nix::unistd::Group;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;
use xlaunch_proto::net::Limits;

pub(super) const LIMITS: Limits =
    Limits { per_user: 64, total: 512, first_call_timeout: Some(Duration::from_secs(10)), close_busy: false };
/// Connections that the kernel queues until they are accepted.
const LISTEN_BACKLOG: i32 = 1024;

/// Listens on `socket`, which only this user can connect to; if the daemon is root, the members of `group` can too.
///
/// Replaces the socket of a dead daemon. Not safe against two daemons that start at the same moment: the lock on the
/// state directory prevents that.
///
/// # Errors
/// `AddrInUse` if a daemon listens there; `AlreadyExists` if there is a file that is not a socket.
pub fn bind(socket: &Path, group: Option<&str>) -> io::Result<UnixListener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
    let address = SocketAddrUnix::new(socket).map_err(|error| {
        io::Error::new(error.kind(), format!("{} is too long for a socket", socket.display()))
    })?;
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
    let gid = group.map(Group::from_name).transpose()?.flatten().map(|group| group.gid.as_raw());
    if let (Some(group), None) = (group, gid) {
        tracing::warn!("group `{group}` does not exist: only root can connect to {}", socket.display());
    }
    if let Some(gid) = gid {
        chown(socket, None, Some(gid))?;
    }
    let mode = if gid.is_some() { 0o660 } else { 0o600 };
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(mode))?;
    // Listening starts after the permissions are set, so no other user can have connected before.
    rustix::net::listen(&fd, LISTEN_BACKLOG)?;
    UnixListener::from_std(fd.into())
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
