//! Opens files below a directory that belongs to a job's user, who may have replaced them by anything.
//!
//! The daemon may run as root, so the user must not be able to make it read a file that the user cannot read, or block
//! on a file.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Opens the file at `path` below `dir` for reading. It must be a regular file of user `uid`, and no component of the
/// path may be a symbolic link.
///
/// The path is walked one component at a time: `RestrictSUIDSGID=` in the unit makes systemd block openat2(2).
pub(super) fn open_below(dir: &OwnedFd, path: &Path, uid: u32) -> io::Result<File> {
    let refused = |what: &str| io::Error::other(format!("{} {what}", path.display()));
    let open = |dir: &OwnedFd, name: &OsStr, flags: OFlags| {
        let opened = rustix::fs::openat(dir, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        opened.map_err(|error| match error {
            Errno::LOOP | Errno::NOTDIR => refused("is reached through a symbolic link or a non-directory"),
            Errno::NXIO => refused("is not a regular file"),
            error => error.into(),
        })
    };
    let (parent, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
    let mut at = dir.as_fd().try_clone_to_owned()?;
    for component in parent {
        at = open(&at, component, OFlags::DIRECTORY | OFlags::PATH)?;
    }
    // Without NONBLOCK, opening a FIFO blocks until a process opens it for writing.
    let file = open(&at, name, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
    let found = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(refused("is not a regular file"));
    }
    if found.st_uid != uid {
        // The error does not name the owner, because the caller may have linked a file here that it cannot inspect.
        return Err(refused("does not belong to the job's user"));
    }
    Ok(file.into())
}
