//! Accounting of a log file's bytes: how many could not be written, how many rotation has removed, and at which offset
//! of the stream each file begins.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use xlaunch_proto::v1::LogLoss;

use super::lock;

/// Number of files whose start offset is remembered.
const MAX_STARTS: usize = 256;

/// Counters of one log file, shared by its writer and by status queries and reports.
#[derive(Debug)]
pub(crate) struct LogRecord {
    path: PathBuf,
    /// The rank; `None` for a file that several ranks share.
    rank: Option<u32>,
    lost: AtomicU64,
    /// Bytes left in the worker's pipe when the attempt was over.
    unread: AtomicU64,
    rotated: AtomicU64,
    /// The reason of the first loss.
    reason: OnceLock<String>,
    /// Inode of each file, and the offset in the stream at which the file begins. The stream consists of the bytes that
    /// were written.
    starts: Mutex<VecDeque<(u64, u64)>>,
}

impl LogRecord {
    pub(crate) fn new(path: &Path, rank: Option<u32>) -> Self {
        Self {
            path: path.into(),
            rank,
            lost: AtomicU64::new(0),
            unread: AtomicU64::new(0),
            rotated: AtomicU64::new(0),
            reason: OnceLock::new(),
            starts: Mutex::default(),
        }
    }

    /// Counts bytes that could not be written. Returns whether they are the first.
    pub(super) fn lose(&self, bytes: u64, reason: &str) -> bool {
        self.lost.fetch_add(bytes, Ordering::Relaxed);
        self.reason.set(reason.into()).is_ok()
    }

    pub(super) fn set_unread(&self, bytes: u64) {
        self.unread.store(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that rotation has removed.
    pub(super) fn rotate(&self, bytes: u64) {
        self.rotated.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records that a file begins at this offset of the stream.
    pub(crate) fn begin(&self, inode: u64, offset: u64) {
        let mut starts = lock(&self.starts);
        if starts.len() == MAX_STARTS {
            starts.pop_front();
        }
        starts.push_back((inode, offset));
    }

    /// Number of bytes between an offset in the file with one inode and the beginning of another file; `None` if
    /// unknown.
    pub(crate) fn between(&self, (inode, offset): (u64, u64), next: u64) -> Option<u64> {
        let starts = lock(&self.starts);
        // Inodes are reused, so the newest entry is the right one.
        let start = |inode| starts.iter().rev().find(|(other, _)| *other == inode).map(|(_, start)| *start);
        start(next)?.checked_sub(start(inode)? + offset)
    }

    fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The losses for status queries; `None` if the file is complete.
    pub(crate) fn loss(&self) -> Option<LogLoss> {
        let [lost, unread, rotated] =
            [&self.lost, &self.unread, &self.rotated].map(|count| count.load(Ordering::Relaxed));
        (lost + unread + rotated > 0).then(|| LogLoss {
            file: self.name(),
            lost_bytes: lost + unread,
            rotated_bytes: rotated,
            reason: self.reason.get().cloned().unwrap_or_default(),
        })
    }

    /// Describes the losses in one line, with the number of bytes. Bytes removed by rotation do not count: the user has
    /// asked for rotation, or it is documented.
    pub(super) fn describe_loss(&self) -> Option<(u64, String)> {
        let (lost, unread) = (self.lost.load(Ordering::Relaxed), self.unread.load(Ordering::Relaxed));
        let who = self.rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
        let path = self.path.display();
        let reason = self.reason.get().map_or("unknown error", String::as_str);
        let text = match (lost, unread) {
            (0, 0) => return None,
            (lost, 0) => format!("{who}{lost} bytes are missing in {path}: {reason}"),
            (0, unread) => {
                format!("{who}{unread} bytes were not read for {path}: the console or the disk was too slow")
            }
            (lost, unread) => format!(
                "{who}{lost} bytes are missing in {path}: {reason}; {unread} bytes more were not read in time"
            ),
        };
        Some((lost + unread, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_between_files_is_known_after_inode_reuse() {
        let record = LogRecord::new(Path::new("/logs/0/stdout.log"), Some(0));
        for (inode, start) in [(7, 0), (8, 100), (9, 200), (8, 300)] {
            record.begin(inode, start);
        }
        assert_eq!(record.between((7, 100), 9), Some(100));
        assert_eq!(record.between((9, 50), 8), Some(50));
        assert_eq!(record.between((9, 100), 8), Some(0));
        assert_eq!((record.between((1, 0), 8), record.between((8, 0), 9)), (None, None));
    }
}
