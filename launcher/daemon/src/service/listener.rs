//! The daemon's socket: who may open it, and how many connections each user has.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use nix::unistd::Group;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;
use xlaunch_proto::net::Limits;

/// Connections of callers.
pub(super) const LIMITS: Limits =
    Limits { per_user: 64, total: 512, first_call_timeout: Some(Duration::from_secs(10)), close_busy: false };
/// Connections that the kernel holds until they are accepted.
const BACKLOG: i32 = 1024;

/// Listens on `socket`: for this user alone, or, where this is root, for the members of `group` too, if there is one.
///
/// What a dead daemon has left there is replaced. Two that start at the same moment must be kept apart by other means.
///
/// # Errors
/// `AddrInUse` where a daemon answers there; `AlreadyExists` where it is no socket.
pub fn bind(socket: &Path, group: Option<&str>) -> io::Result<UnixListener> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
    let address = SocketAddrUnix::new(socket).map_err(|error| {
        io::Error::new(error.kind(), format!("{} is too long for a socket", socket.display()))
    })?;
    match fs_err::symlink_metadata(socket) {
        Ok(found) if !found.file_type().is_socket() => {
            let message = format!("{} is there already and is no socket", socket.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        Ok(_) if answers(&address)? => {
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
        tracing::warn!("there is no group {group}: root alone can reach {}", socket.display());
    }
    if let Some(gid) = gid {
        chown(socket, None, Some(gid))?;
    }
    let mode = if gid.is_some() { 0o660 } else { 0o600 };
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(mode))?;
    // Nobody can have connected before: the permissions come first.
    rustix::net::listen(&fd, BACKLOG)?;
    UnixListener::from_std(fd.into())
}

/// Whether somebody listens there.
fn answers(address: &SocketAddrUnix) -> io::Result<bool> {
    match rustix::net::connect(stream_socket()?, address) {
        // A full backlog is somebody's.
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
