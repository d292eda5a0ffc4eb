//! Heartbeat files, which the ranks of a command write: one per rank, in the run's private directory.
//!
//! Each file exists, empty, before its worker starts. Any change of the file is a heartbeat. If it contains a decimal
//! number, that is the rank's step; any other contents are ignored. A worker that removes its file turns hang detection
//! off for its rank until it writes the file again. If the whole directory is gone, a program that cleans temporary
//! directories has removed it, so it is created again with its files. The directory is on a local file system, so a
//! poll costs one system call per rank. Only changed files are opened, without following links or waiting for a writer.

use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use fs_err::os::unix::fs::OpenOptionsExt;
use rustix::fs::OFlags;

/// Number of bytes read from a file: more than any step number has digits.
const MAX_STEP_BYTES: u64 = 32;

/// The heartbeat files of one attempt, and the versions seen last.
#[derive(Debug)]
pub(in crate::workload) struct HeartbeatFiles {
    dir: PathBuf,
    /// Last version of each rank's file; `None` while the file does not exist.
    seen: Vec<Option<Version>>,
    /// Time of the last poll. A change that a poll finds was made after it, which bounds its age: clocks can be set, so
    /// the time of a file alone is not reliable.
    polled: Instant,
}

/// Version of a file: modification time (seconds, nanoseconds), size and inode. It differs after every change.
type Version = (i64, i64, u64, u64);

/// A change of a rank's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::workload) enum Change {
    Heartbeat {
        /// The step number in the file, if there is one.
        step: Option<u64>,
        /// Time since the file changed.
        age: Duration,
    },
    Removed,
}

impl HeartbeatFiles {
    /// Creates empty files for ranks 0 to `world` - 1 in `dir`, in place of those of an earlier attempt.
    pub(in crate::workload) fn create(dir: PathBuf, world: u32) -> io::Result<Self> {
        match fs_err::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut files = Self { dir, seen: Vec::new(), polled: Instant::now() };
        files.fill(world)?;
        Ok(files)
    }

    /// Creates the directory with an empty file per rank.
    fn fill(&mut self, world: u32) -> io::Result<()> {
        fs_err::create_dir(&self.dir)?;
        self.seen.clear();
        for rank in 0..world {
            let created = fs_err::File::create_new(path(&self.dir, rank))?.metadata()?;
            self.seen.push(Some(version(&created)));
        }
        Ok(())
    }

    /// Returns the changes since the last poll, each with its rank.
    pub(in crate::workload) fn poll(&mut self) -> Vec<(u32, Change)> {
        if !self.dir.is_dir() {
            let world = u32::try_from(self.seen.len()).unwrap_or(u32::MAX);
            if self.fill(world).is_err() {
                // The ranks cannot send heartbeats until the directory exists.
                self.seen.resize(world as usize, None);
                return Vec::new();
            }
        }
        let now = SystemTime::now();
        let longest = std::mem::replace(&mut self.polled, Instant::now()).elapsed();
        let mut changes = Vec::new();
        for (rank, seen) in (0..).zip(&mut self.seen) {
            let path = path(&self.dir, rank);
            let found = fs_err::symlink_metadata(&path).ok();
            let current = found.as_ref().map(version);
            if current == std::mem::replace(seen, current) {
                continue;
            }
            let change = match found {
                Some(found) => Change::Heartbeat {
                    step: read_step(&path),
                    age: found
                        .modified()
                        .ok()
                        .and_then(|then| now.duration_since(then).ok())
                        .unwrap_or_default()
                        .min(longest),
                },
                None => Change::Removed,
            };
            changes.push((rank, change));
        }
        changes
    }
}

/// Path of a rank's file.
pub(in crate::workload) fn path(dir: &Path, rank: u32) -> PathBuf {
    dir.join(rank.to_string())
}

impl Drop for HeartbeatFiles {
    fn drop(&mut self) {
        // Errors are ignored: a run in the foreground removes its whole directory anyway.
        let _ = fs_err::remove_dir_all(&self.dir);
    }
}

fn version(found: &std::fs::Metadata) -> Version {
    (found.mtime(), found.mtime_nsec(), found.size(), found.ino())
}

fn read_step(path: &Path) -> Option<u64> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let file =
        fs_err::OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path).ok()?;
    file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let mut text = String::new();
    file.take(MAX_STEP_BYTES).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    impl HeartbeatFiles {
        fn path(&self, rank: u32) -> PathBuf {
            path(&self.dir, rank)
        }
    }

    fn files(dir: &tempfile::TempDir) -> HeartbeatFiles {
        HeartbeatFiles::create(dir.path().join("heartbeats"), 2).unwrap()
    }

    fn steps(files: &mut HeartbeatFiles) -> Vec<(u32, Option<u64>)> {
        let step = |(rank, change)| match change {
            Change::Heartbeat { step, .. } => (rank, step),
            Change::Removed => panic!("rank {rank} has removed its file"),
        };
        files.poll().into_iter().map(step).collect()
    }

    #[test]
    fn step_is_read_and_other_contents_are_a_touch() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(&dir);
        assert_eq!(files.poll(), [], "the files are empty and nobody has written");
        let long = "9".repeat(10_000);
        for (text, step) in [
            ("12", Some(12)),
            (" 13\n", Some(13)),
            ("0", Some(0)),
            ("", None),
            ("epoch 3", None),
            ("-1", None),
            ("1.5", None),
            (&long, None),
            ("18446744073709551616", None),
        ] {
            fs_err::write(files.path(1), text).unwrap();
            assert_eq!(steps(&mut files), [(1, step)], "{text:.20}");
            assert_eq!(files.poll(), [], "{text:.20}: nothing has changed since");
        }
        fs_err::write(files.path(0), b"\xff\xfe").unwrap();
        assert_eq!(steps(&mut files), [(0, None)]);
    }

    #[test]
    fn touch_and_replacement_are_heartbeats() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(&dir);
        let file = fs_err::File::open(files.path(0)).unwrap();
        file.file().set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
        match files.poll()[..] {
            [(0, Change::Heartbeat { step: None, age })] => {
                assert!(age < Duration::from_secs(3000), "the clock was set meanwhile: {age:?}")
            }
            ref other => panic!("{other:?}"),
        }
        fs_err::write(dir.path().join("new"), "7").unwrap();
        fs_err::rename(dir.path().join("new"), files.path(0)).unwrap();
        assert_eq!(steps(&mut files), [(0, Some(7))]);
        fs_err::remove_file(files.path(0)).unwrap();
        assert_eq!(files.poll(), [(0, Change::Removed)]);
        assert_eq!(files.poll(), []);
    }

    #[test]
    fn links_pipes_and_directories_are_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(&dir);
        fs_err::write(dir.path().join("other"), "5").unwrap();
        fs_err::remove_file(files.path(0)).unwrap();
        symlink(dir.path().join("other"), files.path(0)).unwrap();
        fs_err::remove_file(files.path(1)).unwrap();
        // Without O_NONBLOCK, opening the FIFO would wait for a writer forever.
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, files.path(1), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(steps(&mut files), [(0, None), (1, None)]);
    }

    #[test]
    fn deleted_directory_is_recreated_and_heartbeats_continue() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(&dir);
        fs_err::remove_dir_all(&files.dir).unwrap();
        assert_eq!(files.poll(), [], "no rank has removed its file");
        fs_err::write(files.path(1), "7").unwrap();
        assert_eq!(steps(&mut files), [(1, Some(7))]);
        // It cannot be created while its parent directory is missing.
        let (root, moved) = (dir.path().to_path_buf(), dir.path().with_extension("moved"));
        fs_err::rename(&root, &moved).unwrap();
        assert_eq!((files.poll(), files.poll()), (vec![], vec![]));
        fs_err::rename(&moved, &root).unwrap();
        fs_err::remove_dir_all(&files.dir).unwrap();
        assert_eq!(files.poll(), []);
        fs_err::write(files.path(0), "8").unwrap();
        assert_eq!(steps(&mut files), [(0, Some(8))]);
    }

    #[test]
    fn files_of_the_last_attempt_are_replaced_and_removed_with_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let last = files(&dir);
        fs_err::write(last.path(0), "99").unwrap();
        drop(last);
        assert_eq!(fs_err::read_dir(dir.path()).unwrap().count(), 0);
        let mut files = files(&dir);
        assert_eq!((files.poll(), fs_err::read(files.path(0)).unwrap().len()), (vec![], 0));
    }
}
