//! What the journal asks of the disk, call by call, so that tests can let each one fail.

use std::fmt::Debug;
use std::io::{self, Write};
use std::path::Path;

use fs_err::os::unix::fs::OpenOptionsExt;
use fs_err::{File, OpenOptions};

/// The calls. Errors name the file.
pub(super) trait Disk: Debug + Send {
    /// All of a file.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// A file that exists, to be written at its end.
    fn open(&self, path: &Path) -> io::Result<File>;
    /// A new file of this user alone, to be written at its end.
    fn create(&self, path: &Path) -> io::Result<File>;
    /// All of `bytes` in one call, unless the kernel takes less.
    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()>;
    /// Cuts off what is beyond `len` bytes.
    fn truncate(&self, file: &File, len: u64) -> io::Result<()>;
    /// Returns when contents and length are on disk.
    fn sync(&self, file: &File) -> io::Result<()>;
    /// Gives the file at `from` the name `to`, at once, whatever had it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Takes a file's name away.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Returns when the names in a directory are on disk.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
}

/// The kernel's.
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
