//! Cache of files that one process on a host writes and later ones read: machine code, selected algorithms, peak rates
//! of devices.
//!
//! A file's name contains a hash of everything that its content depends on, so a file is never stale. It is written
//! under a temporary name and then renamed, so a reader sees all of it or nothing. With a lock file, one of several
//! ranks computes the result while the others wait for it. An unusable cache only costs time.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

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

/// Returns the result of `load` for the file `name`. `compute` creates the file if it is missing or `load` rejects it.
pub(crate) fn cached<T>(
    name: &str,
    load: impl Fn(Vec<u8>) -> Result<T>,
    compute: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<T> {
    let Some(dir) = dir() else {
        return load(compute()?);
    };
    let path = dir.join(name);
    if let Ok(value) = read(&path, &load) {
        return Ok(value);
    }
    // The lock is released with the last handle of the file, even if this process is killed.
    let lock = options().open(path.with_extension("lock")).and_then(|file| file.lock().map(|()| file));
    if lock.is_ok()
        && let Ok(value) = read(&path, &load)
    {
        return Ok(value);
    }
    let bytes = compute()?;
    // On a full or read-only disk, the next process computes the result again.
    let _ = write(&path, &bytes);
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
    use super::*;

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
