//! Appends records to a file on a disk that may be temporarily full.
//!
//! A record is written completely or not at all: the rest of a failed write is truncated. Records that could not be
//! written are queued in order until the next write. The queue is bounded; records that do not fit are counted as lost.
//! A file that someone has moved or deleted begins again. The file is locked as long as it is open, so that programs
//! that follow it notice a writer that was killed.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use fs_err::{File, OpenOptions};

/// Limit on the bytes of queued records: enough for hours of steps.
const MAX_WAITING_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(super) struct Appender {
    path: PathBuf,
    /// The open file; `None` before the first write.
    file: Option<File>,
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    lost: u64,
    /// Whether the file has begun again since the last [`take_restarted`](Self::take_restarted).
    restarted: bool,
}

impl Appender {
    /// Creates an appender. The file at `path` is created with the first record.
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, file: None, waiting: VecDeque::new(), waiting_bytes: 0, lost: 0, restarted: false }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of records that are not in the file.
    pub(super) fn missing(&self) -> u64 {
        self.lost + self.waiting.len() as u64
    }

    /// Opens the file, and creates it if necessary.
    pub(super) fn create(&mut self) -> io::Result<&mut File> {
        let is_deleted = |file: &File| file.metadata().is_ok_and(|metadata| metadata.nlink() == 0);
        let is_gone = |file: &File| is_deleted(file) || self.path.try_exists().is_ok_and(|exists| !exists);
        if self.file.take_if(|file| is_gone(file)).is_some() {
            self.restarted = true;
            self.path.parent().map_or(Ok(()), fs_err::create_dir_all)?;
        }
        match &mut self.file {
            Some(file) => Ok(file),
            none => {
                // Opened in append mode, so that truncation by a user leaves no hole.
                let file = OpenOptions::new().create(true).append(true).open(&self.path)?;
                // Not all file systems have locks. It is shared, as the previous node of rank 0 may still hold it.
                let _ = file.file().try_lock_shared();
                Ok(none.insert(file))
            }
        }
    }

    /// Returns whether the file was moved or deleted, and began again, since the last call.
    pub(super) fn take_restarted(&mut self) -> bool {
        std::mem::take(&mut self.restarted)
    }

    /// Writes the queued records and then this one. If it cannot be written now, it is queued as well.
    pub(super) fn append(&mut self, record: Vec<u8>) -> io::Result<()> {
        if self.waiting_bytes + record.len() > MAX_WAITING_BYTES {
            self.lost += 1;
        } else {
            self.waiting_bytes += record.len();
            self.waiting.push_back(record);
        }
        self.flush()
    }

    /// Writes the queued records.
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

    /// Truncates the file to `bytes`, and drops the queued records for which `is_kept` returns false.
    pub(super) fn cut(&mut self, bytes: Option<u64>, is_kept: impl Fn(&[u8]) -> bool) -> io::Result<()> {
        self.waiting.retain(|record| is_kept(record));
        self.waiting_bytes = self.waiting.iter().map(Vec::len).sum();
        bytes.map_or(Ok(()), |bytes| self.create()?.set_len(bytes))
    }
}

/// Writes a record with a single write, so that a reader that follows the file sees complete records only.
fn write_whole(file: &mut File, record: &[u8]) -> io::Result<()> {
    let end = file.metadata()?.len();
    file.write_all(record).inspect_err(|_| {
        // Truncating needs no space. If it fails anyway, the next write fails too, or leaves a torn line that readers
        // skip.
        let _ = file.set_len(end);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_queued_until_the_directory_exists() {
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
    fn truncated_file_gets_no_hole_and_moved_or_deleted_one_begins_again() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        fs_err::create_dir(&run).unwrap();
        let path = run.join("records");
        let mut appender = Appender::new(path.clone());
        appender.append(b"first\n".into()).unwrap();
        let reader = File::create(&path).unwrap();
        assert!(reader.file().try_lock().is_err(), "readers see that there is a writer");
        appender.append(b"second\n".into()).unwrap();
        assert_eq!(fs_err::read(&path).unwrap(), b"second\n");
        assert!(!appender.take_restarted());
        fs_err::remove_dir_all(&run).unwrap();
        appender.append(b"third\n".into()).unwrap();
        assert_eq!(fs_err::read(&path).unwrap(), b"third\n");
        assert!(appender.take_restarted() && !appender.take_restarted());
        let moved = dir.path().join("moved");
        fs_err::rename(&run, &moved).unwrap();
        appender.append(b"fourth\n".into()).unwrap();
        assert_eq!(fs_err::read(path).unwrap(), b"fourth\n");
        assert_eq!(fs_err::read(moved.join("records")).unwrap(), b"third\n");
        assert!(appender.take_restarted());
    }
}
