//! Files that one process of a host makes, and all later ones read: machine code, choices of algorithms, what a device can
//! do at best.
//!
//! A file's name holds a hash of all that its content depends on, so that it is never stale. It is written beside its place
//! and renamed: a reader sees all of it or nothing. A lock file makes one of several ranks work while the others wait for its
//! result. A cache that cannot be used costs time, nothing else.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::backend::Result;

/// Place of the cache, before the places of the XDG base directory specification.
const CACHE_VARIABLE: &str = "XLAUNCH_CACHE";

/// Where the files lie; the directory is made if it is not there. `None` where there is no place for it.
pub fn dir() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path(CACHE_VARIABLE)
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("xlaunch")))
        .or_else(|| Some(path("HOME")?.join(".cache/xlaunch")))
        .filter(|dir| std::fs::create_dir_all(dir).is_ok())
}

/// What `usable` makes of the file `name`, which `make` makes if it is not there, or not usable.
pub(crate) fn cached<T>(
    name: &str,
    usable: impl Fn(Vec<u8>) -> Result<T>,
    make: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<T> {
    let Some(dir) = dir() else {
        return usable(make()?);
    };
    let path = dir.join(name);
    if let Ok(value) = read(&path, &usable) {
        return Ok(value);
    }
    // The lock goes with the file's last handle, also when this process is killed.
    let lock = File::create(path.with_extension("lock")).and_then(|file| file.lock().map(|()| file));
    if lock.is_ok()
        && let Ok(value) = read(&path, &usable)
    {
        return Ok(value);
    }
    let bytes = make()?;
    // A full or read-only disk: the next process makes it again.
    let _ = write(&path, &bytes);
    usable(bytes)
}

fn read<T>(path: &Path, usable: &impl Fn(Vec<u8>) -> Result<T>) -> std::result::Result<T, ()> {
    usable(std::fs::read(path).map_err(drop)?).map_err(drop)
}

/// Puts a whole file into its place.
///
/// # Errors
/// Those of the file system.
pub fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    std::fs::write(&part, bytes)?;
    std::fs::rename(&part, path)
}
