//! A directory with links to NVRTC and cuBLASLt, under the names by which workers load them.
//!
//! It is in the user's cache, named after a hash of the linked paths, so launches share it and never change it.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::{Kind, Selected};

/// Creates the directory. `None` if there is nothing to link, or no cache: then the loader decides.
pub(super) fn create(selected: &[Selected], variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let by_name = selected.iter().filter(|it| matches!(it.kind, Kind::Nvrtc | Kind::CublasLt));
    let links = by_name.filter_map(|it| Some((it.kind.file(), it.file.as_ref()?.path.clone())));
    let links: Vec<(&str, PathBuf)> = links.collect();
    if links.is_empty() {
        return None;
    }
    let mut hash = DefaultHasher::new();
    links.hash(&mut hash);
    let dir = cache(variable)?.join(format!("libraries-{:016x}", hash.finish()));
    std::fs::create_dir_all(&dir).ok()?;
    for (name, target) in links {
        link(&target, &dir.join(name)).ok()?;
    }
    Some(dir)
}

/// Creates a link unless it is there already: another launch may be creating the same one.
fn link(target: &Path, path: &Path) -> std::io::Result<()> {
    match symlink(target, path) {
        Err(_) if std::fs::read_link(path).is_ok_and(|found| found == target) => Ok(()),
        result => result,
    }
}

/// Returns the directory of xlaunch's cache, which the worker also uses for compiled kernels.
fn cache(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("XLAUNCH_CACHE")
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("xlaunch")))
        .or_else(|| Some(path("HOME")?.join(".cache/xlaunch")))
}
