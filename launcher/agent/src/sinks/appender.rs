//! A file that records are appended to, on a disk that may be full for a while.
//!
//! A record is written whole or not at all: what a failed write has left is cut off. Records that could not be written
//! wait, in order and within a bound, for the next one; those beyond the bound are counted as lost.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use fs_err::{File, OpenOptions};

/// Most bytes of records that wait for the disk: hours of steps.
const MAX_WAITING_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(super) struct Appender {
    path: PathBuf,
    /// `None` until there is something to write.
    file: Option<File>,
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    lost: u64,
}

impl Appender {
    /// Appends to the file at `path`, which is created with the first record.
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, file: None, waiting: VecDeque::new(), waiting_bytes: 0, lost: 0 }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Records that are not in the file.
    pub(super) fn missing(&self) -> u64 {
        self.lost + self.waiting.len() as u64
    }

    /// Creates the file, if there is none yet.
    pub(super) fn create(&mut self) -> io::Result<&mut File> {
        match &mut self.file {
            Some(file) => Ok(file),
            none => {
                // Appended to, so that a file that a user truncates gets no hole.
                Ok(none.insert(OpenOptions::new().create(true).append(true).open(&self.path)?))
            }
        }
    }

    /// Writes a record, after those that wait. If it cannot be written now, it waits as well.
    pub(super) fn append(&mut self, record: Vec<u8>) -> io::Result<()> {
        if self.waiting_bytes + record.len() > MAX_WAITING_BYTES {
            self.lost += 1;
        } else {
            self.waiting_bytes += record.len();
            self.waiting.push_back(record);
        }
        self.flush()
    }

    /// Writes the records that wait.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while let Some(record) = self.waiting.pop_front() {
            match self.create().and_then(|file| write_whole(file, &record)) {
                Ok(()) => self.waiting_bytes -= record.len(),
                Err(error) => {
                    self.waiting.push_front(record);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Cuts the file, and drops the records that wait and that `is_kept` does not want.
    pub(super) fn cut(&mut self, bytes: Option<u64>, is_kept: impl Fn(&[u8]) -> bool) -> io::Result<()> {
        self.waiting.retain(|record| is_kept(record));
        self.waiting_bytes = self.waiting.iter().map(Vec::len).sum();
        bytes.map_or(Ok(()), |bytes| self.create()?.set_len(bytes))
    }
}

/// One write per record, so that a reader that follows the file sees whole ones only.
fn write_whole(file: &mut File, record: &[u8]) -> io::Result<()> {
    let end = file.metadata()?.len();
    file.write_all(record).inspect_err(|_| {
        // Needs no space. If it fails all the same, the next write fails, too, or leaves a torn line that readers skip.
        let _ = file.set_len(end);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_wait_for_a_directory_that_is_not_there_yet_and_are_then_written_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/records");
        let mut appender = Appender::new(path.clone());
        assert!(appender.append(b"1\n".into()).is_err() && appender.append(b"2\n".into()).is_err());
        assert_eq!(appender.missing(), 2);
        fs_err::create_dir(dir.path().join("run")).unwrap();
        appender.append(b"3\n".into()).unwrap();
        assert_eq!((fs_err::read(path).unwrap(), appender.missing()), (b"1\n2\n3\n".to_vec(), 0));
    }

    #[test]
    fn records_beyond_the_bound_are_counted_and_the_others_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/records");
        let mut appender = Appender::new(path.clone());
        for _ in 0..5 {
            appender.append(vec![b'x'; MAX_WAITING_BYTES / 4]).unwrap_err();
        }
        assert_eq!((appender.missing(), appender.waiting.len()), (5, 4));
        fs_err::create_dir(dir.path().join("run")).unwrap();
        appender.flush().unwrap();
        assert_eq!(appender.missing(), 1);
        assert_eq!(fs_err::metadata(path).unwrap().len(), MAX_WAITING_BYTES as u64);
    }

    #[test]
    fn file_that_a_user_truncates_gets_no_hole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("records");
        let mut appender = Appender::new(path.clone());
        appender.append(b"first\n".into()).unwrap();
        File::create(&path).unwrap();
        appender.append(b"second\n".into()).unwrap();
        assert_eq!(fs_err::read(path).unwrap(), b"second\n");
    }
}
