//! Files that are worth making once per machine: machine code of kernels, what a device can do at best.
//!
//! A file is written beside its place and renamed: a reader sees all of it or nothing. A cache that cannot be used costs
//! time, nothing else.

use std::path::{Path, PathBuf};

/// Place of the cache, before the places of the XDG base directory specification.
const VARIABLE: &str = "XLAUNCH_CACHE";

/// The cache's directory, made if it is not there; `None` where there is no place for one.
pub fn dir() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path(VARIABLE)
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("xlaunch")))
        .or_else(|| Some(path("HOME")?.join(".cache/xlaunch")))
        .filter(|dir| std::fs::create_dir_all(dir).is_ok())
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
