//! Removes directories that a job's user could write to, on a thread of its own.
//!
//! A directory is immediately moved to `<state>/trash` under a new name, and removed there in the background, so that
//! its contents can neither delay nor crash the daemon.
//!
//! ```text
//! remove(jobs/7) --rename--> trash/<name> --> for each entry: unlink it, or rename a directory to trash/<next name>
//!                                             then rmdir
//! ```
//! Subdirectories are moved to the top of the trash, so any depth takes constant stack and two descriptors. Paths are
//! never followed: on the way down every step is a name in an open directory, and there is no way up, because a user
//! could move a directory elsewhere in the meantime. Entries left when the daemon ends are removed after its next
//! start.

use std::ffi::CString;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, fchmod, fchown, openat, renameat, unlinkat};
use rustix::io::Errno;
use tracing::warn;

/// The trash of a state directory. Its thread ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Trash {
    path: PathBuf,
    names: Arc<Names>,
    remover: mpsc::Sender<CString>,
}

impl Trash {
    /// Opens the trash in this directory, and starts to remove the entries that an earlier daemon has left.
    pub(crate) fn open(path: PathBuf) -> io::Result<Self> {
        let dir = open_dir(CWD, &CString::new(path.as_os_str().as_encoded_bytes())?)?;
        let (remover, receiver) = mpsc::channel();
        for name in names(&dir)? {
            // The receiver is alive, so this cannot fail.
            let _ = remover.send(name?);
        }
        let names = Arc::new(Names::default());
        let sweep = Sweep { dir, names: names.clone(), is_root: rustix::process::geteuid().is_root() };
        std::thread::Builder::new().name("trash".into()).spawn(move || {
            receiver.into_iter().for_each(|name| sweep.remove(name));
        })?;
        Ok(Self { path, names, remover })
    }

    /// Moves a directory to the trash. Does nothing if the directory does not exist.
    pub(crate) fn remove(&self, dir: &Path) -> io::Result<()> {
        let name = self.names.next();
        match std::fs::rename(dir, self.path.join(&name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            moved => moved?,
        }
        self.remover.send(CString::new(name)?).map_err(|_| io::Error::other("the trash thread has ended"))
    }
}

/// Generates names for entries of the trash that differ from those of earlier daemons too.
#[derive(Debug)]
struct Names {
    /// A random number. The time is not used, as the clock may have been set back since an earlier daemon was started.
    start: u64,
    next: AtomicU64,
}

impl Default for Names {
    fn default() -> Self {
        let start = RandomState::new().hash_one(std::process::id());
        Self { start, next: AtomicU64::new(0) }
    }
}

impl Names {
    fn next(&self) -> String {
        format!("{:x}-{:x}", self.start, self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// State of the thread.
struct Sweep {
    dir: OwnedFd,
    names: Arc<Names>,
    is_root: bool,
}

impl Sweep {
    /// Removes one entry of the trash and everything below it.
    fn remove(&self, name: CString) {
        let mut pending = vec![name];
        let mut failed = None;
        while let Some(name) = pending.pop() {
            let removed = self.empty(&name, &mut pending).and_then(|()| {
                unlinkat(&self.dir, &name, AtFlags::REMOVEDIR).or_else(|error| match error {
                    Errno::NOTDIR => unlinkat(&self.dir, &name, AtFlags::empty()),
                    error => Err(error),
                })
            });
            if let Err(error) = removed {
                failed.get_or_insert((name, error));
            }
        }
        if let Some((name, error)) = failed {
            warn!(
                "failed to remove {} from the trash before the next start: {error}",
                name.to_string_lossy()
            );
        }
    }

    /// Unlinks the files of a directory in the trash, moves its subdirectories to the trash, and adds them to
    /// `pending`.
    fn empty(&self, name: &CString, pending: &mut Vec<CString>) -> Result<(), Errno> {
        let dir = match open_dir(&self.dir, name) {
            Ok(dir) => dir,
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(()),
            // Happens if the daemon does not run as root, in which case it owns the directory.
            Err(Errno::ACCESS) => {
                rustix::fs::chmodat(&self.dir, name, Mode::RWXU, AtFlags::empty())?;
                open_dir(&self.dir, name)?
            }
            Err(error) => return Err(error),
        };
        if self.is_root {
            // Takes ownership, so that the user cannot add entries any more, and a sticky bit does not keep the daemon
            // from removing them: it may lack CAP_FOWNER.
            fchown(&dir, Some(rustix::fs::Uid::ROOT), Some(rustix::fs::Gid::ROOT))?;
        }
        fchmod(&dir, Mode::RWXU)?;
        let mut failed = Ok(());
        for entry in names(&dir)? {
            let entry = entry?;
            let removed = match unlinkat(&dir, &entry, AtFlags::empty()) {
                // For a directory, Linux returns EISDIR, POSIX requires EPERM.
                Err(Errno::ISDIR | Errno::PERM) => self.take(&dir, &entry).map(|name| pending.push(name)),
                removed => removed,
            };
            failed = failed.and(removed);
        }
        failed
    }

    /// Moves a subdirectory of `dir` to the trash. Returns its new name.
    fn take(&self, dir: &OwnedFd, entry: &CString) -> Result<CString, Errno> {
        let name = CString::new(self.names.next()).map_err(|_| Errno::INVAL)?;
        match renameat(dir, entry, &self.dir, &name) {
            // Moving a directory changes its `..` entry, which requires write permission on the directory itself.
            Err(Errno::ACCESS) if !self.is_root => {
                rustix::fs::chmodat(dir, entry, Mode::RWXU, AtFlags::empty())?;
                renameat(dir, entry, &self.dir, &name)?;
            }
            moved => moved?,
        }
        Ok(name)
    }
}

fn open_dir(at: impl rustix::fd::AsFd, name: &CString) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

/// Returns the names of a directory's entries, except `.` and `..`.
fn names(dir: &OwnedFd) -> Result<impl Iterator<Item = Result<CString, Errno>>, Errno> {
    let names = Dir::read_from(dir)?.map(|entry| Ok(entry?.file_name().to_owned()));
    Ok(names.filter(|name| !name.as_ref().is_ok_and(|name| matches!(name.as_bytes(), b"." | b".."))))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, Instant};

    use super::*;

    const HANG_TIMEOUT: Duration = Duration::from_secs(60);

    fn open(state: &Path) -> io::Result<Trash> {
        fs_err::create_dir_all(state.join("trash"))?;
        Trash::open(state.join("trash"))
    }

    fn wait_until_empty(state: &Path) {
        let deadline = Instant::now() + HANG_TIMEOUT;
        while fs_err::read_dir(state.join("trash")).unwrap().count() > 0 {
            assert!(Instant::now() < deadline, "the trash is not emptied");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Creates nested directories. Their path is too long for any system call.
    fn nest(dir: &Path, depth: usize) {
        let name = CString::new("d").unwrap();
        let mut at: OwnedFd = std::fs::File::open(dir).unwrap().into();
        for _ in 0..depth {
            rustix::fs::mkdirat(&at, &name, Mode::RWXU).unwrap();
            at = open_dir(&at, &name).unwrap();
        }
    }

    #[test]
    fn deep_and_wide_trees_are_removed_in_the_background() {
        let state = tempfile::tempdir().unwrap();
        let trash = open(state.path()).unwrap();
        let job = state.path().join("job");
        fs_err::create_dir(&job).unwrap();
        nest(&job, 5000);
        for file in 0..1000 {
            fs_err::write(job.join(file.to_string()), "").unwrap();
        }
        trash.remove(&job).unwrap();
        assert!(!job.exists());
        trash.remove(&job).unwrap();
        wait_until_empty(state.path());
    }

    #[test]
    fn permissions_do_not_protect_and_links_are_not_followed() {
        let state = tempfile::tempdir().unwrap();
        let outside = state.path().join("outside");
        fs_err::create_dir(&outside).unwrap();
        fs_err::write(outside.join("file"), "kept").unwrap();
        let job = state.path().join("job");
        for (name, mode) in [("closed", 0o000), ("read-only", 0o500), ("sticky", 0o1777)] {
            let dir = job.join(name);
            fs_err::create_dir_all(dir.join("below")).unwrap();
            fs_err::write(dir.join("below/file"), "").unwrap();
            fs_err::os::unix::fs::symlink(&outside, dir.join("link")).unwrap();
            fs_err::hard_link(outside.join("file"), dir.join("hard")).unwrap();
            fs_err::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        open(state.path()).unwrap().remove(&job).unwrap();
        wait_until_empty(state.path());
        assert_eq!(fs_err::read_to_string(outside.join("file")).unwrap(), "kept");
    }

    #[test]
    fn leftovers_of_an_earlier_daemon_are_removed() {
        let state = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(state.path().join("trash/left/below")).unwrap();
        fs_err::write(state.path().join("trash/file"), "").unwrap();
        let _trash = open(state.path()).unwrap();
        wait_until_empty(state.path());
    }
}
