//! The launches of this user that run now: how `xlaunch status` finds them from any directory.
//!
//! ```text
//! <$XDG_RUNTIME_DIR or the temporary directory>/xlaunch-<uid>/    mode 0700
//!     <name>-<run id>/          of one launch, locked (flock) as long as it runs
//!         agent.sock            short enough for a socket, wherever the run's directory is
//!         run -> DIRECTORY      where that is; absent if this is the run's directory itself
//! ```
//! Whose lock can be taken is no launch's any more, whatever ended it: such entries are skipped, and removed by whoever looks.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use xlaunch_proto::exit::ExitCode;

use crate::Refusal;
use crate::names::{file_name, unique};

/// Name of the agent's socket in a run's directory and in its entry.
pub const SOCKET: &str = "agent.sock";
/// The run's directory, in its entry.
const RUN: &str = "run";
/// Longest path that a unix socket can have.
const SOCKET_PATH: usize = 107;
/// Longest path of a temporary directory for which there is room in that of a socket.
const PLACE: usize = 30;
/// Characters of a run's id that go into the name of its entry.
const ID: usize = 32;
/// Characters of its name that do at least, if it has so many.
const NAME: usize = 8;
/// An unlocked entry may be one that is just being made.
const NEW: Duration = Duration::from_secs(60);

/// The entry of a launch, as long as it runs.
#[derive(Debug)]
pub struct Entry {
    path: PathBuf,
    name: String,
    _lock: File,
}

/// A launch that runs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Running {
    /// `<name>-<run id>`.
    pub name: String,
    /// Where its agent listens.
    pub socket: PathBuf,
}

impl Entry {
    /// Makes the entry of a launch that starts now.
    ///
    /// # Errors
    /// Where no directory for it can be made or trusted.
    pub fn create(name: &str, id: &str) -> Result<Self, Refusal> {
        let mut problems = String::new();
        for place in places() {
            match Self::create_in(&place, name, id) {
                Ok(entry) => return Ok(entry),
                Err(error) => problems += &format!("\n  {}: {error}", place.display()),
            }
        }
        let message = format!(
            "there is no place for the agent's socket; XDG_RUNTIME_DIR or TMPDIR can name another directory:{problems}"
        );
        Err(Refusal::new(ExitCode::Usage, message))
    }

    fn create_in(place: &Path, name: &str, id: &str) -> io::Result<Self> {
        let place = std::path::absolute(place)?;
        trust(&place, true)?;
        let (mut name, mut id) = (file_name(name), file_name(id));
        id.truncate(ID);
        // Two dashes and a number, should there be another of this name; two slashes.
        let rest = place.as_os_str().len() + id.len() + SOCKET.len() + "-".len() + "-99".len() + "//".len();
        match SOCKET_PATH.checked_sub(rest) {
            Some(room) if room >= NAME.min(name.len()) => name.truncate(room),
            _ => return Err(io::Error::other("its path is too long for a socket")),
        }
        let (path, name) = unique(&place, &format!("{name}-{id}"), 0o700)?;
        let lock = File::open(&path)?;
        lock.lock()?;
        Ok(Self { path, name, _lock: lock })
    }

    /// Says that the run's directory is `run`, and leaves a link to the socket there.
    pub fn lead_to(&self, run: &Path) -> io::Result<()> {
        fs_err::os::unix::fs::symlink(std::path::absolute(run)?, self.path.join(RUN))?;
        fs_err::os::unix::fs::symlink(self.socket(), run.join(SOCKET))
    }

    /// Its directory, private to this user.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the launch is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where its agent is to listen.
    pub fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // What cannot be removed now is no launch's any more once the lock is gone, which is next.
        let _ = fs_err::remove_dir_all(&self.path);
    }
}

/// All launches of this user, by name.
pub fn running() -> Vec<Running> {
    let mut found: Vec<_> = places().iter().flat_map(|place| running_in(place)).collect();
    found.sort();
    found.dedup();
    found
}

fn running_in(place: &Path) -> Vec<Running> {
    if trust(place, false).is_err() {
        return Vec::new();
    }
    let entries = fs_err::read_dir(place).into_iter().flatten().flatten();
    let running = entries.filter(|entry| is_locked(&entry.path())).filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some(Running { name, socket: entry.path().join(SOCKET) })
    });
    running.collect()
}

/// Whether the entry's launch runs. One that has been left behind is removed.
fn is_locked(entry: &Path) -> bool {
    let Ok(dir) = File::open(entry) else { return false };
    match dir.try_lock() {
        Err(TryLockError::WouldBlock) => true,
        Err(TryLockError::Error(_)) => false,
        Ok(()) => {
            let age =
                dir.metadata().and_then(|entry| entry.modified()).map(|at| at.elapsed().unwrap_or_default());
            if age.is_ok_and(|age| age > NEW) {
                // Somebody else may be removing it, too.
                let _ = fs_err::remove_dir_all(entry);
            }
            false
        }
    }
}

/// Where registries may be, the first choice first. Launches and those who look for them agree unless their environments
/// differ.
fn places() -> Vec<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let given = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let runtime = given.unwrap_or_else(|| format!("/run/user/{user}").into());
    let temporary = Some(std::env::temp_dir()).filter(|dir| dir.as_os_str().len() <= PLACE);
    let mut places = vec![runtime, temporary.unwrap_or_else(|| "/tmp".into())];
    places.retain(|place| place.is_dir());
    places.iter().map(|place| place.join(format!("xlaunch-{user}"))).collect()
}

/// Whether `dir` is a directory of this user that nobody else can write to; it is made if `create` says so.
fn trust(dir: &Path, create: bool) -> io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    if create {
        match std::fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    // Of the name itself: a link is nobody's directory.
    let found = std::fs::symlink_metadata(dir)?;
    if !found.is_dir() {
        return Err(io::Error::other("it is not a directory"));
    }
    if found.uid() != rustix::process::getuid().as_raw() {
        return Err(io::Error::other(format!("it belongs to user {}", found.uid())));
    }
    if found.mode() & 0o077 != 0 {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(place: &Path) -> Vec<String> {
        let mut names: Vec<_> = running_in(place).into_iter().map(|running| running.name).collect();
        names.sort();
        names
    }

    #[test]
    fn launches_are_found_as_long_as_they_run() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("registry");
        let (a, b) =
            (Entry::create_in(&place, "a", "1").unwrap(), Entry::create_in(&place, "a", "1").unwrap());
        assert_eq!(names(&place), ["a-1", "a-1-2"]);
        drop(a);
        assert_eq!(names(&place), ["a-1-2"]);
        let path = b.path().to_path_buf();
        drop(b);
        assert!(names(&place).is_empty() && !path.exists());
    }

    #[test]
    fn what_a_killed_launch_leaves_is_skipped_and_removed_when_it_is_not_new() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("registry");
        let entry = Entry::create_in(&place, "live", "1").unwrap();
        for (name, age) in [("dead-1", Duration::from_secs(3600)), ("dead-2", Duration::ZERO)] {
            fs_err::create_dir_all(place.join(name).join("attempt_0")).unwrap();
            let time = std::time::SystemTime::now() - age;
            File::open(place.join(name)).unwrap().set_modified(time).unwrap();
        }
        assert_eq!(names(&place), [entry.name()]);
        assert!(!place.join("dead-1").exists() && place.join("dead-2").exists());
    }

    #[test]
    fn a_directory_that_is_not_ours_alone_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let (ours, link) = (dir.path().join("ours"), dir.path().join("link"));
        fs_err::create_dir(&ours).unwrap();
        fs_err::set_permissions(&ours, std::fs::Permissions::from_mode(0o777)).unwrap();
        drop(Entry::create_in(&ours, "n", "1").unwrap());
        assert_eq!(fs_err::metadata(&ours).unwrap().permissions().mode() & 0o777, 0o700);
        fs_err::os::unix::fs::symlink(&ours, &link).unwrap();
        let error = Entry::create_in(&link, "n", "1").unwrap_err();
        assert!(error.to_string().contains("not a directory"), "{error}");
        // The root directory's owner is another user for all but root, who may not have this test's rights taken.
        if !rustix::process::getuid().is_root() {
            assert!(trust(Path::new("/"), false).unwrap_err().to_string().contains("user 0"));
        }
    }

    #[test]
    fn a_socket_fits_whatever_the_names_are() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("registry");
        let entry = Entry::create_in(&place, &"long/name ".repeat(20), &"id".repeat(100)).unwrap();
        std::os::unix::net::UnixListener::bind(entry.socket()).unwrap();
        let deep = dir.path().join("d".repeat(100));
        assert!(Entry::create_in(&deep, "n", "1").unwrap_err().to_string().contains("too long"));
    }

    #[test]
    fn a_run_and_its_entry_know_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        fs_err::create_dir(&run).unwrap();
        let entry = Entry::create_in(&dir.path().join("registry"), "n", "1").unwrap();
        entry.lead_to(&run).unwrap();
        fs_err::write(entry.socket(), "").unwrap();
        assert!(run.join(SOCKET).exists());
        assert_eq!(
            fs_err::canonicalize(entry.path().join("run")).unwrap(),
            fs_err::canonicalize(run).unwrap()
        );
    }
}
