//! The file operations of the journal, behind a trait so that tests can make each one fail or interrupt it.

use std::fmt::Debug;
use std::io::{self, Write};
use std::path::Path;

use fs_err::os::unix::fs::OpenOptionsExt;
use fs_err::{File, OpenOptions};
use rustix::fs::{FallocateFlags, fallocate};

/// File operations of the journal. Errors name the file.
pub(super) trait Disk: Debug + Send {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Opens an existing file for appending.
    fn open(&self, path: &Path) -> io::Result<File>;
    /// Creates a file with mode 0600 for appending. Fails if the file exists.
    fn create(&self, path: &Path) -> io::Result<File>;
    /// Writes all bytes, in a single call unless the kernel writes fewer.
    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()>;
    fn truncate(&self, file: &File, len: u64) -> io::Result<()>;
    /// Allocates space for `bytes` bytes after the first `len`, if the disk has that much. Does not change the length
    /// of the file.
    fn reserve(&self, file: &File, len: u64, bytes: u64);
    /// fdatasync(2): returns when contents and length are on disk.
    fn sync(&self, file: &File) -> io::Result<()>;
    /// rename(2): atomically replaces `to`.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// fsync(2) of a directory: returns when its entries are on disk.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
}

#[derive(Debug)]
pub(super) struct RealDisk;

impl Disk for RealDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs_err::read(path)
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().append(true).open(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn truncate(&self, file: &File, len: u64) -> io::Result<()> {
        file.set_len(len)
    }

    fn reserve(&self, file: &File, len: u64, bytes: u64) {
        // Not all file systems support that. Without it, appends fail on a full disk.
        let _ = fallocate(file, FallocateFlags::KEEP_SIZE, len, bytes);
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs_err::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs_err::remove_file(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }
}
