//! Cache of files that one process on a host writes and later ones read: machine code, selected algorithms, peak rates
//! of devices.
//!
//! A file's name contains a hash of everything that its content depends on, so a file is never stale. It is written
//! under a temporary name and then renamed, so a reader sees all of it or nothing. With a lock file, one of several
//! ranks computes the result while the others wait for it. What cannot be written, because the home directory is
//! read-only or the disk is full, is kept in memory, so that threads of a process still compute for each other.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use rustix::fs::OFlags;

use crate::error::Result;

/// Overrides the directories of the XDG base directory specification.
const CACHE_VARIABLE: &str = "XLAUNCH_CACHE";

/// Returns the directory of the cache, creating it if it is missing. `None` if that is impossible.
pub fn dir() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path(CACHE_VARIABLE)
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("xlaunch")))
        .or_else(|| Some(path("HOME")?.join(".cache/xlaunch")))
        .filter(|dir| std::fs::create_dir_all(dir).is_ok())
}

/// Contents of files that could not be written, by name. The entry of a file is locked while its content is computed.
type Unwritten = HashMap<String, Arc<Mutex<Option<Vec<u8>>>>>;

static UNWRITTEN: LazyLock<Mutex<Unwritten>> = LazyLock::new(Mutex::default);

/// Returns the result of `load` for the file `name`. `compute` creates the file if it is missing or `load` rejects it.
pub(crate) fn cached<T>(
    name: &str,
    load: impl Fn(Vec<u8>) -> Result<T>,
    compute: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<T> {
    cached_in(dir().as_deref(), name, load, compute)
}

fn cached_in<T>(
    dir: Option<&Path>,
    name: &str,
    load: impl Fn(Vec<u8>) -> Result<T>,
    compute: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<T> {
    let path = dir.map(|dir| dir.join(name));
    let read = || path.as_deref().map_or(Err(()), |path| read(path, &load));
    if let Ok(value) = read() {
        return Ok(value);
    }
    let entry =
        UNWRITTEN.lock().unwrap_or_else(PoisonError::into_inner).entry(name.into()).or_default().clone();
    let mut unwritten = entry.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(bytes) = &*unwritten {
        return load(bytes.clone());
    }
    // The lock is released with the last handle of the file, even if this process is killed.
    let lock = path.as_deref().map(|path| options().open(path.with_extension("lock")));
    let lock = lock.and_then(|file| file.and_then(|file| file.lock().map(|()| file)).ok());
    if lock.is_some()
        && let Ok(value) = read()
    {
        return Ok(value);
    }
    let bytes = compute()?;
    if path.is_none_or(|path| write(&path, &bytes).is_err()) {
        *unwritten = Some(bytes.clone());
    }
    load(bytes)
}

fn read<T>(path: &Path, load: &impl Fn(Vec<u8>) -> Result<T>) -> std::result::Result<T, ()> {
    load(std::fs::read(path).map_err(drop)?).map_err(drop)
}

/// Writes a file atomically.
///
/// # Errors
/// If the file system fails.
pub fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    options().truncate(true).open(&part)?.write_all(bytes)?;
    std::fs::rename(&part, path)
}

/// Links are not followed: after `sudo`, the cache of root may be a directory of another user.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn what_cannot_be_written_is_computed_once_in_a_process() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // No file can be created below a file.
        for (dir, name) in [(None, "none.bin"), (Some(file.path()), "read-only.bin")] {
            let computed = AtomicUsize::new(0);
            let compute = || {
                computed.fetch_add(1, Ordering::Relaxed);
                Ok(b"result".to_vec())
            };
            let get = || cached_in(dir, name, Ok, compute).unwrap();
            std::thread::scope(|scope| {
                for thread in [0; 4].map(|_| scope.spawn(get)) {
                    assert_eq!(thread.join().unwrap(), b"result");
                }
            });
            assert_eq!(computed.into_inner(), 1, "{name}");
        }
    }

    #[test]
    fn links_in_place_of_temporary_files_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("file.bin"), dir.path().join("other"));
        std::fs::write(&other, "kept").unwrap();
        let part = path.with_extension(format!("part-{}", std::process::id()));
        for link in [&part, &path.with_extension("lock")] {
            std::os::unix::fs::symlink(&other, link).unwrap();
            assert!(options().open(link).is_err());
        }
        assert!(write(&path, b"new").is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"kept");
        std::fs::remove_file(part).unwrap();
        write(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }
}
