//! The registry of this user's running launches, which `xlaunch status` finds from any directory.
//!
//! ```text
//! <$XDG_RUNTIME_DIR, $TMPDIR, /tmp, /var/tmp or ~/.cache>/xlaunch-<uid>/    mode 0700
//!     <name>-<run id>/          one launch; locked (flock) while it runs
//!         agent.sock            here because the path of a socket is limited
//!         run -> DIRECTORY      the run's directory; absent if that is this entry itself
//! ```
//! An unlocked entry is stale, regardless of how its launch ended: readers skip it, and remove it if it is old.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fs_err::os::unix::fs::OpenOptionsExt;
use rustix::fs::OFlags;
use rustix::io::Errno;
use xlaunch_proto::env;
use xlaunch_spec::exit::ExitCode;

use xlaunch_host::naming::{file_name, unique};
use xlaunch_host::process::Process;
use xlaunch_spec::refusal::Refusal;

/// File name of the agent's socket, both in a run's directory and in its entry.
pub const SOCKET: &str = "agent.sock";
/// Name of the link from an entry to the run's directory.
const RUN_LINK: &str = "run";
/// Longest path of a unix socket: `sizeof(sun_path) - 1`.
const MAX_SOCKET_PATH_LEN: usize = 107;
/// A temporary directory with a longer path leaves no room for the socket's path.
const MAX_TEMP_DIR_LEN: usize = 30;
/// Temporary directories that any host has, in case `TMPDIR` is unusable.
const TEMP_DIRS: [&str; 2] = ["/tmp", "/var/tmp"];
/// Maximum number of characters of the run id in the name of its entry.
const MAX_ID_LEN: usize = 32;
/// An entry's name keeps at least this many characters of the launch's name.
const MIN_NAME_LEN: usize = 8;
/// An unlocked entry younger than this may just have been created and not be locked yet.
const STALE_AFTER: Duration = Duration::from_secs(60);

/// The entry of a running launch. Dropping it removes the entry.
#[derive(Debug)]
pub struct Entry {
    path: PathBuf,
    name: String,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The locked directory.
    dir: File,
    /// The run's directory, if the entry links to one.
    run: Option<PathBuf>,
}

/// A running launch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Running {
    /// `<name>-<run id>`.
    pub name: String,
    /// Socket of its agent.
    pub socket: PathBuf,
}

impl Entry {
    /// Creates the entry of a launch that starts now.
    ///
    /// # Errors
    /// Fails if no private directory for it can be created.
    pub fn create(name: &str, id: &str) -> Result<Self, Refusal> {
        Self::create_in_first(&registry_dirs(), name, id)
    }

    /// Creates the entry in the first of these registries that belongs to this user, or can be created.
    fn create_in_first(registries: &[PathBuf], name: &str, id: &str) -> Result<Self, Refusal> {
        let mut problems = String::new();
        for registry in registries {
            match Self::create_in(registry, name, id) {
                Ok(entry) => return Ok(entry),
                Err(error) => problems += &format!("\n  {}: {error}", registry.display()),
            }
        }
        let message = format!(
            "failed to create a directory for the agent's socket; create /tmp, or set XDG_RUNTIME_DIR or TMPDIR to a \
             local directory that you can write to:{problems}"
        );
        Err(Refusal::new(ExitCode::Usage, message))
    }

    fn create_in(registry: &Path, name: &str, id: &str) -> io::Result<Self> {
        if !registry.parent().is_some_and(Path::is_dir) {
            return Err(io::Error::other("the parent directory does not exist"));
        }
        let registry = std::path::absolute(registry)?;
        ensure_private(&registry)?;
        let (mut name, mut id) = (file_name(name), file_name(id));
        id.truncate(MAX_ID_LEN);
        // The dash, the suffix of an entry with a taken name, and two slashes.
        let rest =
            registry.as_os_str().len() + id.len() + SOCKET.len() + "-".len() + "-99".len() + "//".len();
        match MAX_SOCKET_PATH_LEN.checked_sub(rest) {
            Some(room) if room >= MIN_NAME_LEN.min(name.len()) => name.truncate(room),
            _ => return Err(io::Error::other("the path is too long for a socket")),
        }
        let (path, name) = unique(&registry, &format!("{name}-{id}"), 0o700)?;
        let dir = File::open(&path)?;
        dir.lock()?;
        Ok(Self { path, name, state: Mutex::new(State { dir, run: None }) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the entry again if it was deleted, as programs that clean temporary directories do. Of its contents,
    /// only the link is restored. Returns whether the entry was missing.
    ///
    /// # Errors
    /// Fails if it cannot be created, or if another user has taken the name of the registry.
    pub(crate) fn restore(&self) -> io::Result<bool> {
        let mut state = self.state();
        let held = state.dir.metadata()?;
        let is_held = |found: std::fs::Metadata| (found.dev(), found.ino()) == (held.dev(), held.ino());
        if std::fs::symlink_metadata(&self.path).is_ok_and(is_held) {
            return Ok(false);
        }
        let registry = self.path.parent();
        if let Some(parent) = registry.and_then(Path::parent) {
            // `TMPDIR` may be a directory of the user's own, which was deleted too.
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        }
        for dir in registry.into_iter().chain([&*self.path]) {
            ensure_private(dir)?;
        }
        let dir = File::open(&self.path)?;
        dir.lock()?;
        state.dir = dir;
        if let Some(run) = &state.run {
            match fs_err::os::unix::fs::symlink(run, self.path.join(RUN_LINK)) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        Ok(true)
    }

    /// Links the entry to the run's directory `run`, and that directory to the socket.
    pub(crate) fn link_run_dir(&self, run: &Path) -> io::Result<()> {
        let absolute = std::path::absolute(run)?;
        fs_err::os::unix::fs::symlink(&absolute, self.path.join(RUN_LINK))?;
        self.state().run = Some(absolute);
        self.link_socket(run)
    }

    /// Links the run's directory to the socket again, if the link is gone.
    pub(crate) fn restore_link(&self) -> io::Result<()> {
        let run = self.state().run.clone();
        match run.filter(|run| run.join(SOCKET).symlink_metadata().is_err()) {
            Some(run) => self.link_socket(&run),
            None => Ok(()),
        }
    }

    /// Links a run's directory to the socket, unless its file system has no links, as those of cloud drives and shared
    /// folders of virtual machines: `xlaunch status` finds the launch by its name too.
    pub(crate) fn link_socket(&self, run: &Path) -> io::Result<()> {
        // An agent of the same node that was killed leaves its link behind, and a new one replaces it.
        let new = run.join(format!(".{SOCKET}-{}", self.name));
        let has_no_links = |error: &io::Error| {
            matches!(Errno::from_io_error(error), Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS))
        };
        match std::os::unix::fs::symlink(self.socket(), &new) {
            Ok(()) => fs_err::rename(new, run.join(SOCKET)),
            Err(error) if has_no_links(&error) => Ok(()),
            Err(error) => {
                let message = format!("failed to create the link {}: {error}", new.display());
                Err(io::Error::new(error.kind(), message))
            }
        }
    }

    /// Returns the entry's directory, which is private to this user.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of the socket for the agent.
    pub fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // If this fails, the entry becomes stale, since the lock is released next.
        let _ = fs_err::remove_dir_all(&self.path);
    }
}

/// Returns all running launches of this user, sorted by name.
pub fn running() -> Vec<Running> {
    let mut found: Vec<_> = registry_dirs().iter().flat_map(|registry| running_in(registry)).collect();
    found.sort();
    found.dedup();
    found
}

/// Returns the directories of this user's launches that are registered elsewhere because they run with another
/// `XDG_RUNTIME_DIR` or `TMPDIR`, as jobs of many clusters do. Their workers' environments name them. Root reads those
/// of all users, who can write any path there, so nothing is changed or removed.
pub fn running_elsewhere() -> BTreeSet<PathBuf> {
    let (known, name) = (registry_dirs(), registry_name());
    let entry =
        |process: &Process| Some(Path::new(&process.variable(env::AGENT_SOCKET)?).parent()?.to_owned());
    let is_elsewhere = |entry: &PathBuf| {
        let registry = entry.parent().filter(|registry| !known.iter().any(|known| known == registry));
        registry.is_some_and(|registry| registry.ends_with(&name) && is_private(registry))
            && state_of(entry) == EntryState::Running
    };
    Process::all().iter().filter_map(entry).filter(is_elsewhere).collect()
}

/// Returns the running launches of a registry, and removes stale entries.
fn running_in(registry: &Path) -> Vec<Running> {
    if !is_private(registry) {
        return Vec::new();
    }
    let entries = fs_err::read_dir(registry).into_iter().flatten().flatten();
    let running = entries.filter_map(|entry| match state_of(&entry.path()) {
        EntryState::Running => {
            let name = entry.file_name().into_string().ok()?;
            Some(Running { name, socket: entry.path().join(SOCKET) })
        }
        EntryState::Stale => {
            // Another process may be removing it as well.
            let _ = fs_err::remove_dir_all(entry.path());
            None
        }
        EntryState::Other => None,
    });
    running.collect()
}

/// State of what a registry contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    Running,
    /// Its launch has ended without removing it.
    Stale,
    /// Not an entry, or one that may just have been created.
    Other,
}

fn state_of(entry: &Path) -> EntryState {
    // Opening a pipe would block.
    let directory = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits().cast_signed();
    let Ok(dir) = fs_err::OpenOptions::new().read(true).custom_flags(directory).open(entry) else {
        return EntryState::Other;
    };
    match dir.file().try_lock() {
        Err(TryLockError::WouldBlock) => EntryState::Running,
        Err(TryLockError::Error(_)) => EntryState::Other,
        Ok(()) => {
            let age =
                dir.metadata().and_then(|entry| entry.modified()).map(|at| at.elapsed().unwrap_or_default());
            if age.is_ok_and(|age| age > STALE_AFTER) { EntryState::Stale } else { EntryState::Other }
        }
    }
}

/// Returns the possible directories of the registry, preferred one first. Launches and queries agree on them unless
/// their environments differ.
fn registry_dirs() -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    registry_dirs_in(variable("XDG_RUNTIME_DIR"), variable("TMPDIR"), &TEMP_DIRS, variable("HOME"))
}

/// Same as [`registry_dirs`], in these directories, which need not exist.
fn registry_dirs_in(
    runtime: Option<PathBuf>,
    temporary: Option<PathBuf>,
    fallbacks: &[&str],
    home: Option<PathBuf>,
) -> Vec<PathBuf> {
    let (user, name) = (rustix::process::getuid().as_raw(), registry_name());
    let temporary = temporary.filter(|dir| dir.as_os_str().len() <= MAX_TEMP_DIR_LEN);
    // `su` and `sudo -E` pass on directories of the user who has become root. That user can replace a registry there.
    let is_unsafe = |dir: &PathBuf| user == 0 && std::fs::metadata(dir).is_ok_and(|found| found.uid() != 0);
    let mut dirs: Vec<_> = runtime.into_iter().chain(temporary).filter(|dir| !is_unsafe(dir)).collect();
    dirs.extend(fallbacks.iter().map(PathBuf::from));
    // Another user may have taken the name in the temporary directories.
    dirs.extend(home.map(|home| home.join(".cache")));
    // Queries from outside of a login session find launches of one here. A launch from outside uses it last: systemd
    // removes it at the user's last logout, which does not end services or jobs of cron.
    dirs.push(format!("/run/user/{user}").into());
    let mut registry_dirs: Vec<PathBuf> = Vec::new();
    for registry in dirs.iter().map(|dir| dir.join(&name)) {
        if !registry_dirs.contains(&registry) {
            registry_dirs.push(registry);
        }
    }
    registry_dirs
}

fn registry_name() -> String {
    format!("xlaunch-{}", rustix::process::getuid().as_raw())
}

/// Creates `dir` if it is missing, and ensures that only this user can access it.
pub(crate) fn ensure_private(dir: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if own_dir(dir)?.mode() & 0o077 != 0 {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Returns whether `dir` is a directory that only this user can access.
pub(crate) fn is_private(dir: &Path) -> bool {
    own_dir(dir).is_ok_and(|found| found.mode() & 0o077 == 0)
}

/// Returns the metadata of a directory of this user.
fn own_dir(dir: &Path) -> io::Result<std::fs::Metadata> {
    // Symbolic links are not followed: another user may have created one.
    let found = std::fs::symlink_metadata(dir)?;
    if !found.is_dir() {
        return Err(io::Error::other("not a directory"));
    }
    if found.uid() != rustix::process::getuid().as_raw() {
        return Err(io::Error::other(format!("it belongs to user {}", found.uid())));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(registry: &Path) -> Vec<String> {
        let mut names: Vec<_> = running_in(registry).into_iter().map(|running| running.name).collect();
        names.sort();
        names
    }

    #[test]
    fn launches_are_found_while_they_run() {
        let dir = tempfile::tempdir().unwrap();
        let registry = dir.path().join("registry");
        let (a, b) =
            (Entry::create_in(&registry, "a", "1").unwrap(), Entry::create_in(&registry, "a", "1").unwrap());
        assert_eq!(names(&registry), ["a-1", "a-1-2"]);
        drop(a);
        assert_eq!(names(&registry), ["a-1-2"]);
        let path = b.path().to_path_buf();
        drop(b);
        assert!(names(&registry).is_empty() && !path.exists());
    }

    #[test]
    fn deleted_entry_is_created_again_with_its_lock_and_its_link() {
        let dir = tempfile::tempdir().unwrap();
        let (temporary, run) = (dir.path().join("tmp"), dir.path().join("run"));
        let registry = temporary.join("registry");
        fs_err::create_dir(&temporary).unwrap();
        fs_err::create_dir(&run).unwrap();
        let entry = Entry::create_in(&registry, "a", "1").unwrap();
        entry.link_run_dir(&run).unwrap();
        assert!(!entry.restore().unwrap());
        for dir in [&temporary, &run] {
            fs_err::remove_dir_all(dir).unwrap();
        }
        fs_err::create_dir(&run).unwrap();
        assert!(entry.restore().unwrap() && !entry.restore().unwrap());
        assert_eq!(names(&registry), ["a-1"]);
        assert_eq!(fs_err::read_link(entry.path().join(RUN_LINK)).unwrap(), run);
        entry.restore_link().unwrap();
        assert_eq!(fs_err::read_link(run.join(SOCKET)).unwrap(), entry.socket());
        assert_eq!(fs_err::metadata(&registry).unwrap().permissions().mode() & 0o777, 0o700);
        // Another user takes the name in the meantime.
        fs_err::remove_dir_all(&registry).unwrap();
        fs_err::os::unix::fs::symlink(&run, &registry).unwrap();
        assert!(entry.restore().is_err() && fs_err::read_dir(&run).unwrap().count() == 1);
    }

    #[test]
    fn stale_entries_are_skipped_and_removed_once_old() {
        let dir = tempfile::tempdir().unwrap();
        let registry = dir.path().join("registry");
        let entry = Entry::create_in(&registry, "live", "1").unwrap();
        for (name, age) in [("dead-1", Duration::from_secs(3600)), ("dead-2", Duration::ZERO)] {
            fs_err::create_dir_all(registry.join(name).join("attempt_0")).unwrap();
            let time = std::time::SystemTime::now() - age;
            File::open(registry.join(name)).unwrap().set_modified(time).unwrap();
        }
        assert_eq!(names(&registry), [entry.name()]);
        assert!(!registry.join("dead-1").exists() && registry.join("dead-2").exists());
    }

    #[test]
    fn directories_that_environments_name_are_neither_changed_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let age = |path: &Path| {
            let hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
            File::open(path).unwrap().set_modified(hour_ago).unwrap();
        };
        let (open, registry) = (dir.path().join("open"), dir.path().join(registry_name()));
        let running = Entry::create_in(&registry, "live", "1").unwrap();
        let locked = Entry::create_in(&dir.path().join("private"), "live", "1").unwrap();
        for old in [open.join("old"), registry.join("old")] {
            fs_err::create_dir_all(&old).unwrap();
            age(&old);
        }
        fs_err::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
        let paths = [&*open.join("old"), &registry.join("old"), locked.path(), running.path()];
        let mut processes = paths.map(|path| {
            let mut command = std::process::Command::new("sleep");
            command.arg("1000").env(env::AGENT_SOCKET, path.join(SOCKET)).spawn().unwrap()
        });
        let found = running_elsewhere();
        for process in &mut processes {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        let below = |path: &&PathBuf| path.starts_with(dir.path());
        assert_eq!(found.iter().filter(below).collect::<Vec<_>>(), [running.path()]);
        assert!(paths.iter().all(|path| path.is_dir()));
        assert_eq!(fs_err::metadata(&open).unwrap().mode() & 0o777, 0o755);
    }

    #[test]
    fn pipe_among_the_entries_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let registry = dir.path().join("registry");
        let entry = Entry::create_in(&registry, "live", "1").unwrap();
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
        rustix::fs::mknodat(rustix::fs::CWD, registry.join("pipe"), kind, mode, 0).unwrap();
        assert_eq!(names(&registry), [entry.name()]);
    }

    #[test]
    fn registry_directory_is_private_and_not_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, link) = (dir.path().join("ours"), dir.path().join("link"));
        fs_err::create_dir(&ours).unwrap();
        fs_err::set_permissions(&ours, std::fs::Permissions::from_mode(0o777)).unwrap();
        drop(Entry::create_in(&ours, "n", "1").unwrap());
        assert_eq!(fs_err::metadata(&ours).unwrap().permissions().mode() & 0o777, 0o700);
        fs_err::os::unix::fs::symlink(&ours, &link).unwrap();
        let error = Entry::create_in(&link, "n", "1").unwrap_err();
        assert!(error.to_string().contains("not a directory"), "{error}");
        // Only root owns the root directory.
        if !rustix::process::getuid().is_root() {
            assert!(own_dir(Path::new("/")).unwrap_err().to_string().contains("user 0"));
        }
    }

    /// Simulates a host without a runtime directory on which another user has taken the name in the temporary
    /// directory.
    #[test]
    fn cache_directory_is_used_where_another_user_has_taken_the_others() {
        let dir = tempfile::Builder::new().prefix("x").rand_bytes(4).tempdir_in("/tmp").unwrap();
        let (temporary, home) = (dir.path().join("tmp"), dir.path().join("home"));
        fs_err::create_dir_all(home.join(".cache")).unwrap();
        fs_err::create_dir(&temporary).unwrap();
        let registries =
            registry_dirs_in(Some(dir.path().join("none")), Some(temporary.clone()), &[], Some(home.clone()));
        let user = rustix::process::getuid();
        let name = format!("xlaunch-{}", user.as_raw());
        let none = dir.path().join("none");
        let expected = [none.join(&name), temporary.join(&name), home.join(".cache").join(&name)];
        assert_eq!(registries[..3], expected);
        // Only root can create a directory of another user. A link to a directory is refused as well.
        let (taken, problem) =
            (&registries[1], if user.is_root() { "user 65534" } else { "not a directory" });
        if user.is_root() {
            fs_err::create_dir(taken).unwrap();
            std::os::unix::fs::chown(taken, Some(65_534), None).unwrap();
        } else {
            fs_err::os::unix::fs::symlink(&home, taken).unwrap();
        }
        let entry = Entry::create_in_first(&registries, "n", "1").unwrap();
        assert!(entry.path().starts_with(&registries[2]), "{}", entry.path().display());
        assert_eq!(registries[..3].iter().flat_map(|registry| names(registry)).collect::<Vec<_>>(), ["n-1"]);
        let refused = Entry::create_in_first(&registries[..2], "n", "1").unwrap_err().message;
        assert!(refused.contains(problem) && refused.contains("set XDG_RUNTIME_DIR"), "{refused}");
        let missing = format!("\n  {}: the parent directory does not exist", registries[0].display());
        assert!(refused.contains(&missing), "{refused}");
    }

    #[test]
    fn directories_of_the_user_who_has_become_root_are_not_used() {
        if !rustix::process::getuid().is_root() {
            return;
        }
        let dir = tempfile::Builder::new().prefix("x").rand_bytes(4).tempdir_in("/tmp").unwrap();
        let dir = dir.path().to_owned();
        let first = || registry_dirs_in(Some(dir.clone()), Some(dir.clone()), &["/tmp"], None).swap_remove(0);
        assert_eq!(first().parent(), Some(&*dir));
        std::os::unix::fs::chown(&dir, Some(65_534), None).unwrap();
        assert_eq!(first().parent(), Some(Path::new("/tmp")));
    }

    #[test]
    fn launch_outside_of_a_login_session_does_not_depend_on_one() {
        let user = rustix::process::getuid().as_raw();
        let dirs = |runtime: Option<&str>| registry_dirs_in(runtime.map(Into::into), None, &["/tmp"], None);
        let [of_session, temporary] = [format!("/run/user/{user}"), "/tmp".to_owned()]
            .map(|dir| Path::new(&dir).join(format!("xlaunch-{user}")));
        assert_eq!(dirs(None), [temporary.clone(), of_session.clone()]);
        assert_eq!(dirs(Some(&format!("/run/user/{user}"))), [of_session, temporary]);
    }

    #[test]
    fn empty_or_missing_temporary_directory_falls_back_to_that_of_the_host() {
        let dir = tempfile::Builder::new().prefix("x").rand_bytes(4).tempdir_in("/tmp").unwrap();
        let fallback = dir.path().to_str().unwrap();
        let (runtime, missing) = (dir.path().join("none"), dir.path().join("missing"));
        for temporary in [None, Some(missing)] {
            let registries = registry_dirs_in(Some(runtime.clone()), temporary, &[fallback], None);
            let entry = Entry::create_in_first(&registries, "n", "1").unwrap();
            assert_eq!(entry.path().parent().unwrap().parent(), Some(dir.path()));
        }
    }

    #[test]
    fn socket_path_fits_whatever_the_names_are() {
        let dir = tempfile::tempdir().unwrap();
        let registry = dir.path().join("registry");
        let entry = Entry::create_in(&registry, &"long/name ".repeat(20), &"id".repeat(100)).unwrap();
        std::os::unix::net::UnixListener::bind(entry.socket()).unwrap();
        let deep = dir.path().join("d".repeat(100));
        assert!(Entry::create_in(&deep, "n", "1").unwrap_err().to_string().contains("too long"));
    }

    #[test]
    fn new_agent_replaces_the_link_of_one_that_was_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, run) = (dir.path().join("registry"), dir.path().join("run"));
        fs_err::create_dir(&run).unwrap();
        let entry = || Entry::create_in(&registry, "n", "1").unwrap();
        let (killed, new) = (entry(), entry());
        killed.link_run_dir(&run).unwrap();
        new.link_run_dir(&run).unwrap();
        assert_eq!(fs_err::read_link(run.join(SOCKET)).unwrap(), new.socket());
        assert_eq!(fs_err::read_dir(&run).unwrap().count(), 1);
    }

    #[test]
    fn run_directory_and_entry_link_to_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        fs_err::create_dir(&run).unwrap();
        let entry = Entry::create_in(&dir.path().join("registry"), "n", "1").unwrap();
        entry.link_run_dir(&run).unwrap();
        fs_err::write(entry.socket(), "").unwrap();
        assert!(run.join(SOCKET).exists());
        assert_eq!(
            fs_err::canonicalize(entry.path().join("run")).unwrap(),
            fs_err::canonicalize(run).unwrap()
        );
    }
}
