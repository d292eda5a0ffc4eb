//! Plain files of a job's user, who may have put anything in their place: nobody has the daemon read what they could not read
//! themselves, or wait where nothing ever comes.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Opens the file at `path` below `dir`: a regular one of this user's, not behind a link of any kind.
/// Step by step: RestrictSUIDSGID of the unit keeps openat2 from the daemon.
pub(super) fn open_below(dir: &OwnedFd, path: &Path, uid: u32) -> io::Result<File> {
    let refused = |what: &str| io::Error::other(format!("{} {what}", path.display()));
    let open = |dir: &OwnedFd, name: &OsStr, flags: OFlags| {
        let opened = rustix::fs::openat(dir, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        opened.map_err(|error| match error {
            Errno::LOOP | Errno::NOTDIR => refused("is behind a link, or no file"),
            Errno::NXIO => refused("is not a regular file"),
            error => error.into(),
        })
    };
    let (parent, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
    let mut at = dir.as_fd().try_clone_to_owned()?;
    for step in parent {
        at = open(&at, step, OFlags::DIRECTORY | OFlags::PATH)?;
    }
    // A pipe that nobody writes to would be waited for otherwise.
    let file = open(&at, name, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
    let found = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(refused("is not a regular file"));
    }
    if found.st_uid != uid {
        return Err(refused(&format!("belongs to user {}", found.st_uid)));
    }
    Ok(file.into())
}
