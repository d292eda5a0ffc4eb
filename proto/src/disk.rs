//! File operations of data that must survive a crash, with a hook for tests: [`Faults`] can record each operation and
//! make it fail.

use std::fmt::Debug;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use fs_err::{File, OpenOptions};
use rustix::fs::{CWD, FallocateFlags, RenameFlags, fallocate, renameat_with};
use rustix::io::Errno;

/// File operations. Errors name the file.
#[derive(Clone, Debug, Default)]
pub struct Disk(Option<Arc<dyn Faults>>);

/// Decides which operations fail.
pub trait Faults: Debug + Send + Sync {
    /// Returns the failure of an operation that is about to be made, if it is to fail.
    fn check(&self, operation: &Operation<'_>) -> Result<(), Failure>;
}

/// The failure of an operation.
#[derive(Debug)]
pub enum Failure {
    /// The operation fails without an effect.
    Before(io::Error),
    /// The operation takes effect but fails nevertheless.
    After(io::Error),
}

/// An operation with its arguments.
#[derive(Debug)]
#[expect(missing_docs, reason = "the methods of `Disk` describe the operations")]
pub enum Operation<'a> {
    Read(&'a Path),
    CreateDir(&'a Path),
    Open(&'a Path),
    Append { file: &'a File, bytes: &'a [u8] },
    WriteAt { file: &'a File, offset: u64, bytes: &'a [u8] },
    Truncate(&'a File),
    Reserve(&'a File),
    Sync(&'a File),
    Rename { from: &'a Path, to: &'a Path },
    Exchange(&'a Path, &'a Path),
    RemoveFile(&'a Path),
    RemoveDir(&'a Path),
    SyncDir(&'a Path),
}

impl Disk {
    /// Returns a disk on which the operations chosen by `faults` fail.
    pub fn with_faults(faults: Arc<dyn Faults>) -> Self {
        Self(Some(faults))
    }

    fn make<T>(&self, operation: Operation<'_>, effect: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.0.as_ref().map_or(Ok(()), |faults| faults.check(&operation)) {
            Ok(()) => effect(),
            Err(Failure::Before(error)) => Err(error),
            Err(Failure::After(error)) => effect().and(Err(error)),
        }
    }

    /// Reads a whole file.
    pub fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.make(Operation::Read(path), || fs_err::read(path))
    }

    /// Creates a directory and its parents. The directory may exist already.
    pub fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.make(Operation::CreateDir(path), || fs_err::create_dir_all(path))
    }

    /// Opens or creates a file.
    pub fn open(&self, path: &Path, options: &OpenOptions) -> io::Result<File> {
        self.make(Operation::Open(path), || options.open(path))
    }

    /// Writes all bytes to a file that was opened for appending, in a single call unless the kernel writes fewer.
    pub fn append(&self, mut file: &File, bytes: &[u8]) -> io::Result<()> {
        self.make(Operation::Append { file, bytes }, || file.write_all(bytes))
    }

    /// Writes all bytes at this offset.
    pub fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.make(Operation::WriteAt { file, offset, bytes }, || {
            file.file().write_all_at(bytes, offset).map_err(|error| {
                io::Error::new(error.kind(), format!("failed to write to {}: {error}", file.path().display()))
            })
        })
    }

    /// Sets the length of a file.
    pub fn truncate(&self, file: &File, len: u64) -> io::Result<()> {
        self.make(Operation::Truncate(file), || file.set_len(len))
    }

    /// Allocates space for `bytes` bytes after the first `len`, if the disk has that much and the file system supports
    /// it. Does not change the length of the file. Without the space, writes fail on a full disk.
    pub fn reserve(&self, file: &File, len: u64, bytes: u64) {
        let _ = self
            .make(Operation::Reserve(file), || Ok(fallocate(file, FallocateFlags::KEEP_SIZE, len, bytes)?));
    }

    /// fdatasync(2): returns when contents and length are on disk. After an error it is unknown which data is: do not
    /// retry.
    pub fn sync(&self, file: &File) -> io::Result<()> {
        self.make(Operation::Sync(file), || file.sync_data())
    }

    /// rename(2): atomically replaces `to`, unless it is a directory that is not empty.
    pub fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.make(Operation::Rename { from, to }, || fs_err::rename(from, to))
    }

    /// Renames a directory. overlayfs refuses that for directories of its lower layers, such as those of a container's
    /// image; then the files are moved one by one to a new directory, which must not exist yet.
    pub fn rename_dir(&self, from: &Path, to: &Path) -> io::Result<()> {
        match self.rename(from, to) {
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {}
            renamed => return renamed,
        }
        self.create_dir(to)?;
        for entry in fs_err::read_dir(from)? {
            let entry = entry?;
            self.rename(&entry.path(), &to.join(entry.file_name()))?;
        }
        self.remove_dir(from)
    }

    /// Exchanges two directories atomically. Returns `Unsupported` if the file system cannot do that.
    pub fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        self.make(Operation::Exchange(a, b), || {
            renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).map_err(|error| {
                let kind = match error {
                    Errno::INVAL | Errno::NOSYS | Errno::XDEV => io::ErrorKind::Unsupported,
                    other => other.kind(),
                };
                io::Error::new(kind, format!("failed to replace {}: {error}", b.display()))
            })
        })
    }

    /// Removes a file.
    pub fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.make(Operation::RemoveFile(path), || fs_err::remove_file(path))
    }

    /// Removes a directory and its contents.
    pub fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.make(Operation::RemoveDir(path), || fs_err::remove_dir_all(path))
    }

    /// fsync(2) of a directory: returns when its entries are on disk.
    pub fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.make(Operation::SyncDir(path), || sync_dir(path))
    }
}

/// fsync(2) of a directory. File systems that have no such operation, such as AFS and shared folders of VirtualBox,
/// answer with `EINVAL`, and there is nothing else to do on them.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    match File::open(path)?.sync_all() {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_that_cannot_be_synced_is_no_error() {
        let in_proc = rustix::fs::fsync(std::fs::File::open("/proc").unwrap());
        assert_eq!(in_proc, Err(Errno::INVAL), "a file system without this operation");
        Disk::default().sync_dir(Path::new("/proc")).unwrap();
        assert!(sync_dir(Path::new("/nonexistent")).is_err());
    }
}
