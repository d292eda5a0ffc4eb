//! Removal of directories that a job's user has filled, on a thread of its own.
//!
//! A directory is moved into `<state>/trash` at once, under a new name, and removed there in the background: what a
//! user has put into it neither delays nor ends the daemon.
//!
//! ```text
//! remove(jobs/7) --rename--> trash/<name> --> for each entry: unlink it, or rename a directory to trash/<next name>
//!                                             then rmdir
//! ```
//! Directories are never nested in the trash, so any depth takes the same stack and two descriptors. Paths are not
//! followed: not down, because every step is a name in an open directory, and not up, because a user could have moved a
//! directory elsewhere meanwhile. What is left when the daemon ends is removed after its next start.

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

/// The trash of a state directory, and its thread, which ends with the last clone.
#[derive(Clone, Debug)]
pub(crate) struct Trash {
    path: PathBuf,
    names: Arc<Names>,
    remover: mpsc::Sender<CString>,
}

impl Trash {
    /// Opens the trash in this directory, and starts to remove what an earlier daemon has left in it.
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

    /// Moves a directory into the trash. Nothing happens if it does not exist.
    pub(crate) fn remove(&self, dir: &Path) -> io::Result<()> {
        let name = self.names.next();
        match std::fs::rename(dir, self.path.join(&name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            moved => moved?,
        }
        self.remover
            .send(CString::new(name)?)
            .map_err(|_| io::Error::other("the thread of the trash has ended"))
    }
}

/// Names in the trash, unique also among those of earlier daemons.
#[derive(Debug)]
struct Names {
    /// Random: the clock may have been set back since an earlier daemon was started.
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

/// What the thread works with.
struct Sweep {
    dir: OwnedFd,
    names: Arc<Names>,
    is_root: bool,
}

impl Sweep {
    /// Removes one entry of the trash and all that is below it.
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
            warn!("failed to remove {} of the trash, until the next start: {error}", name.to_string_lossy());
        }
    }

    /// Unlinks the files of a directory of the trash, and moves its directories into the trash: onto `pending`.
    fn empty(&self, name: &CString, pending: &mut Vec<CString>) -> Result<(), Errno> {
        let dir = match open_dir(&self.dir, name) {
            Ok(dir) => dir,
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(()),
            // Of a daemon that is not root: the directory is its own.
            Err(Errno::ACCESS) => {
                rustix::fs::chmodat(&self.dir, name, Mode::RWXU, AtFlags::empty())?;
                open_dir(&self.dir, name)?
            }
            Err(error) => return Err(error),
        };
        if self.is_root {
            // Its user cannot add to it any more, and a sticky bit does not protect its entries from the owner: the
            // daemon may lack CAP_FOWNER.
            fchown(&dir, Some(rustix::fs::Uid::ROOT), Some(rustix::fs::Gid::ROOT))?;
        }
        fchmod(&dir, Mode::RWXU)?;
        let mut failed = Ok(());
        for entry in names(&dir)? {
            let entry = entry?;
            let removed = match unlinkat(&dir, &entry, AtFlags::empty()) {
                // Linux says ISDIR, POSIX PERM.
                Err(Errno::ISDIR | Errno::PERM) => self.take(&dir, &entry).map(|name| pending.push(name)),
                removed => removed,
            };
            failed = failed.and(removed);
        }
        failed
    }

    /// Moves a directory in `dir` into the trash. Returns its new name.
    fn take(&self, dir: &OwnedFd, entry: &CString) -> Result<CString, Errno> {
        let name = CString::new(self.names.next()).map_err(|_| Errno::INVAL)?;
        match renameat(dir, entry, &self.dir, &name) {
            // Moving a directory changes its `..`, for which its owner needs the right to write to it.
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

/// Names of the entries of a directory, but for `.` and `..`.
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

    /// Creates directories within each other; their path is too long for any system call.
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
    fn what_an_earlier_daemon_left_is_removed() {
        let state = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(state.path().join("trash/left/below")).unwrap();
        fs_err::write(state.path().join("trash/file"), "").unwrap();
        let _trash = open(state.path()).unwrap();
        wait_until_empty(state.path());
    }
}
