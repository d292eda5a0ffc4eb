//! File operations used to save checkpoints, behind a trait so that tests can make each of them fail or lose unsynced
//! data.

use std::fmt::Debug;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use fs_err::{File, OpenOptions};
use rustix::fs::{CWD, RenameFlags};

/// File operations. Errors name the path.
pub(super) trait Disk: Debug + Send + Sync {
    /// Creates a directory and its parents. The directory may exist already.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Opens a file for writing; creates it if it does not exist.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Writable>>;
    /// Renames without replacing: fails if `to` is a directory that is not empty.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Exchanges two directories atomically. Returns `Unsupported` if the file system cannot do that.
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()>;
    /// Removes a directory and its contents.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes the entries of a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// A file that is written in ranges.
pub(super) trait Writable: Send {
    /// Writes all of `bytes` at this offset.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Makes all written data durable. After an error it is unknown which data was written: do not retry.
    fn sync(&self) -> io::Result<()>;
}

/// File operations of the operating system.
#[derive(Clone, Copy, Debug)]
pub(super) struct Real;

impl Disk for Real {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs_err::create_dir_all(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Writable>> {
        Ok(Box::new(OpenOptions::new().write(true).create(true).truncate(false).open(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs_err::rename(from, to)
    }

    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).map_err(|error| {
            let kind = match error {
                rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS => io::ErrorKind::Unsupported,
                other => other.kind(),
            };
            io::Error::new(kind, format!("failed to replace {}: {error}", b.display()))
        })
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs_err::remove_dir_all(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

impl Writable for File {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file().write_all_at(bytes, offset).map_err(|error| {
            io::Error::new(error.kind(), format!("failed to write to {}: {error}", self.path().display()))
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}
