//! Atomic and durable writes, by the daemon and by agents.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use xlaunch_proto::disk::sync_dir;

use super::records::RESULT;

/// Space allocated in advance for a result, whose texts are at most 4 KiB each.
const RESERVED_RESULT_BYTES: u64 = 16 << 10;

/// Writes a file atomically and durably.
pub fn write(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let new = new_file(dir, name);
    remove_if_present(&new)?;
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    finish(file, bytes, &new, &dir.join(name))
}

/// Allocates space for the [`JobResult`](crate::state::JobResult), so that it can be written even if the disk is full.
pub fn reserve_result(dir: &Path) -> io::Result<()> {
    let new = new_file(dir, RESULT);
    remove_if_present(&new)?;
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
    match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, RESERVED_RESULT_BYTES) {
        // Not all file systems support that.
        Err(Errno::OPNOTSUPP) => Ok(()),
        allocated => Ok(allocated?),
    }
}

/// Writes the [`JobResult`](crate::state::JobResult) into the space that was allocated for it, atomically and durably.
pub fn write_result(dir: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = new_file(dir, RESULT);
    // The job may have replaced the file by a link or a pipe.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let Ok(file) = std::fs::OpenOptions::new().write(true).custom_flags(flags).open(&new) else {
        return write(dir, RESULT, bytes);
    };
    finish(file, bytes, &new, &dir.join(RESULT))
}

/// Writes a new file and renames it to its final path.
fn finish(mut file: File, bytes: &[u8], new: &Path, path: &Path) -> io::Result<()> {
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)?;
    file.sync_all()?;
    std::fs::rename(new, path)?;
    path.parent().map_or(Ok(()), sync_dir)
}

fn new_file(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!(".{name}.new"))
}

/// Removes a file if it exists.
pub fn remove_if_present(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns whether a write failed because the disk or the quota is full, in which case it may succeed later.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
