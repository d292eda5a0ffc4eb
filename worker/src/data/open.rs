//! Data files. They stay open as long as half of the process's descriptors are free; files opened after that are opened
//! again for each read, so that their number has no limit.

use std::fs::{File, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};
use xlaunch_data::open_regular;

use super::DataError;

/// A file that is read at any position.
#[derive(Debug)]
pub(super) struct DataFile {
    path: PathBuf,
    bytes: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    Open(File),
    /// Opened again for each read, which fails if it is not the same file.
    Closed(Version),
}

/// Tells a file from one that has replaced it.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds since the epoch. The inode of a deleted file may be used again.
    modified: (i64, i64),
}

impl DataFile {
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let failed = |error| read_error(path, &error);
        let file = open_regular(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        // The kernel assigns the lowest free number.
        let is_low = getrlimit(Resource::Nofile)
            .current
            .is_none_or(|limit| u64::try_from(file.as_raw_fd()).is_ok_and(|number| number < limit / 2));
        let state = if is_low { State::Open(file) } else { State::Closed(Version::of(&metadata)) };
        Ok(Self { path: path.into(), bytes: metadata.len(), state })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size when it was opened.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `buffer` with the bytes from `offset`.
    pub(super) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), DataError> {
        let failed = |error| read_error(&self.path, &error);
        match &self.state {
            State::Open(file) => file.read_exact_at(buffer, offset).map_err(failed),
            State::Closed(version) => {
                let file = open_regular(&self.path).map_err(failed)?;
                if Version::of(&file.metadata().map_err(failed)?) != *version {
                    let reason = "the file was changed or replaced while it was in use".into();
                    return Err(DataError::Read { path: self.path.clone(), reason });
                }
                file.read_exact_at(buffer, offset).map_err(failed)
            }
        }
    }

    /// Returns the first bytes of the file.
    pub(super) fn head(&self, bytes: usize) -> Result<Vec<u8>, DataError> {
        let mut head = vec![0; usize::try_from(self.bytes).map_or(bytes, |all| all.min(bytes))];
        self.read_at(&mut head, 0)?;
        Ok(head)
    }
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

pub(super) fn read_error(path: &Path, error: &std::io::Error) -> DataError {
    let reason = match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "the file was truncated while it was in use".into(),
        _ => error.to_string(),
    };
    DataError::Read { path: path.into(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_file_is_opened_again_unless_another_has_replaced_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs_err::write(&path, "abcdef").unwrap();
        let version = Version::of(&fs_err::metadata(&path).unwrap());
        let file = DataFile { path: path.clone(), bytes: 6, state: State::Closed(version) };
        assert_eq!(file.head(3).unwrap(), b"abc");
        assert_eq!(file.head(10).unwrap(), b"abcdef");

        fs_err::write(dir.path().join("other"), "abcdef").unwrap();
        fs_err::rename(dir.path().join("other"), &path).unwrap();
        let error = file.head(3).unwrap_err().to_string();
        assert!(error.contains("text: the file was changed or replaced while it was in use"), "{error}");
    }
}
