//! Locks a directory of checkpoints for one job: two jobs would delete and replace each other's checkpoints.

use std::fs::Metadata;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err::{File, OpenOptions};
use rustix::io::Errno;
use xlaunch_spec::lineage::DirectoryLock;

/// Name of the locked file, which stays in the directory: removing it would let two jobs lock different files.
const NAME: &str = ".lock";
/// Maximum length of the holder's description in bytes.
const MAX_HOLDER_BYTES: u64 = 1024;
/// How often, and after which pause, a lock that is held is tried again: [`is_held`] holds it for a moment.
const RETRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(10);

/// The lock, held by the agent as long as the job runs. The kernel releases it if the agent is killed.
#[derive(Debug)]
pub struct Lock {
    file: File,
    warning: Option<String>,
}

/// Reason why a directory cannot be locked.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages describe the fields")]
pub enum LockError {
    #[error("checkpoint directory {} is used by another job: {holder}", path.display())]
    Held { path: PathBuf, holder: String },
    #[error("failed to lock checkpoint directory {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

impl Lock {
    /// Locks a directory. Other jobs are shown `holder` as the description of the lock's holder.
    pub fn acquire(dir: &Path, holder: &str) -> Result<Self, LockError> {
        let io = |source| LockError::Io { path: dir.into(), source };
        let path = dir.join(NAME);
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        let mut warning = None;
        let mut locked = file.file().try_lock();
        let mut retries = RETRIES;
        while retries > 0 && matches!(locked, Err(std::fs::TryLockError::WouldBlock)) {
            std::thread::sleep(PAUSE);
            locked = file.file().try_lock();
            retries -= 1;
        }
        match locked {
            Ok(()) => {}
            Err(std::fs::TryLockError::Error(error)) if has_no_locks(&error) => {
                warning = Some(format!(
                    "checkpoint directory {}: its file system has no locks ({error}); make sure that no other job \
                     uses it",
                    dir.display()
                ));
            }
            Err(std::fs::TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // The holder may be about to write its description; what matters is that the directory is in use.
                let _ = file.take(MAX_HOLDER_BYTES).read_to_string(&mut holder);
                let holder = if holder.is_empty() { "unknown".into() } else { holder.trim().to_owned() };
                return Err(LockError::Held { path: dir.into(), holder });
            }
            Err(std::fs::TryLockError::Error(source)) => return Err(io(source)),
        }
        let written = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{holder}"));
        written.map_err(io)?;
        Ok(Self { file, warning })
    }

    /// Returns a warning for the user if the directory could not be locked.
    pub(crate) fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }
}

impl DirectoryLock for Lock {
    fn is_in_place(&self) -> bool {
        let (Ok(locked), found) = (self.file.metadata(), fs_err::metadata(self.file.path())) else {
            return true;
        };
        match found {
            Ok(found) => file_id(&found) == file_id(&locked),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }
}

/// A rank's view of the lock of its own job, which the agent holds. A rank may write to a directory whose lock it has
/// seen, or to one without a lock: the rank creates such a directory, and the agent locks it before a checkpoint is
/// committed.
#[derive(Debug)]
pub(super) struct OwnLock {
    dir: PathBuf,
    seen: Option<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// Device and inode.
    file: (u64, u64),
    holder: Vec<u8>,
}

impl OwnLock {
    /// Looks at the lock of a directory. Call this when the agent has locked it.
    pub(super) fn look(dir: &Path) -> Self {
        Self { dir: dir.into(), seen: Seen::read(dir) }
    }

    /// Requires that no other job has locked the directory, which is possible after it was moved or removed.
    pub(super) fn check(&mut self) -> io::Result<()> {
        let Some(found) = Seen::read(&self.dir) else { return Ok(()) };
        if self.seen.as_ref().is_some_and(|seen| seen.file != found.file && seen.holder != found.holder) {
            let holder = String::from_utf8_lossy(&found.holder).trim().to_owned();
            return Err(io::Error::other(LockError::Held { path: self.dir.clone(), holder }));
        }
        self.seen = Some(found);
        Ok(())
    }
}

impl Seen {
    fn read(dir: &Path) -> Option<Self> {
        let file = File::open(dir.join(NAME)).ok()?;
        let id = file_id(&file.metadata().ok()?);
        let mut holder = Vec::new();
        file.take(MAX_HOLDER_BYTES).read_to_end(&mut holder).ok()?;
        Some(Self { file: id, holder })
    }
}

/// Returns what distinguishes a file from all others of this host.
fn file_id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Returns whether a job has locked this directory; false if its file system has no locks.
pub(crate) fn is_held(dir: &Path) -> bool {
    let Ok(file) = File::open(dir.join(NAME)) else { return false };
    matches!(file.file().try_lock_shared(), Err(std::fs::TryLockError::WouldBlock))
}

/// Returns whether a lock fails because the file system has none, such as Lustre that is mounted without `flock`.
pub(crate) fn has_no_locks(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_job_is_refused_with_the_name_of_the_first_until_that_ends() {
        let dir = tempfile::tempdir().unwrap();
        let first = Lock::acquire(dir.path(), "job `a`, process 1").unwrap();
        let error = Lock::acquire(dir.path(), "job `b`").unwrap_err();
        assert!(error.to_string().ends_with("is used by another job: job `a`, process 1"), "{error}");
        drop(first);
        let _second = Lock::acquire(dir.path(), "b").unwrap();
        assert!(Lock::acquire(dir.path(), "c").unwrap_err().to_string().ends_with(": b"));
    }

    /// Moves a locked directory away, and creates another one of its name.
    fn move_away(dir: &Path) {
        fs_err::rename(dir, dir.with_file_name("moved")).unwrap();
        fs_err::create_dir(dir).unwrap();
    }

    #[test]
    fn lock_of_a_directory_that_was_moved_away_is_not_in_place() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("saved");
        fs_err::create_dir(&dir).unwrap();
        let lock = Lock::acquire(&dir, "job `a`").unwrap();
        assert!(lock.is_in_place());
        move_away(&dir);
        assert!(!lock.is_in_place());
        let other = Lock::acquire(&dir, "job `b`").unwrap();
        assert!(!lock.is_in_place() && other.is_in_place());
    }

    #[test]
    fn rank_writes_to_no_directory_that_another_job_has_locked_meanwhile() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("saved");
        fs_err::create_dir(&dir).unwrap();
        let _first = Lock::acquire(&dir, "job `a`").unwrap();
        let mut own = OwnLock::look(&dir);
        own.check().unwrap();
        move_away(&dir);
        own.check().unwrap();
        let again = Lock::acquire(&dir, "job `a`").unwrap();
        own.check().unwrap();
        drop(again);
        // Another node has taken over the duties of rank 0: the same file has another text.
        let _taken_over = Lock::acquire(&dir, "job `a` of another node").unwrap();
        own.check().unwrap();
        fs_err::remove_dir_all(&dir).unwrap();
        fs_err::create_dir(&dir).unwrap();
        let _second = Lock::acquire(&dir, "job `b`").unwrap();
        let error = own.check().unwrap_err().to_string();
        assert!(error.contains("saved") && error.ends_with("is used by another job: job `b`"), "{error}");
    }
}
