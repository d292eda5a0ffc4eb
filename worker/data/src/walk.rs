//! Finds files below a directory.
//!
//! Directories that cannot be intended as data are skipped: hidden ones, caches (tagged with `CACHEDIR.TAG`, like
//! cargo's target directory), Python's virtual environments, and those selected by the caller.

use std::path::{Component, Path, PathBuf};

use walkdir::{DirEntry, WalkDir};

/// Characters that turn a path into a glob.
pub const WILDCARDS: [char; 4] = ['*', '?', '[', '{'];

/// Files that mark a directory as a cache or a virtual environment.
const MARKS: [&str; 2] = ["CACHEDIR.TAG", "pyvenv.cfg"];

/// Returns the leading components of a glob, up to the first one with a wildcard.
pub fn literal_base(glob: &Path) -> PathBuf {
    let wild = |part: &Component<'_>| part.as_os_str().to_string_lossy().contains(WILDCARDS);
    glob.components().take_while(|part| !wild(part)).collect()
}

/// Returns the files below `base`, sorted by name within each directory. Leaves out directories for which `skip` is
/// true.
pub fn files_below(
    base: &Path,
    skip: impl Fn(&Path) -> bool,
) -> impl Iterator<Item = walkdir::Result<DirEntry>> {
    let wanted = move |entry: &DirEntry| {
        let leaves_out = || {
            entry.file_name().to_string_lossy().starts_with('.')
                || MARKS.iter().any(|mark| entry.path().join(mark).is_file())
                || skip(entry.path())
        };
        entry.depth() == 0 || !entry.file_type().is_dir() || !leaves_out()
    };
    let entries = WalkDir::new(base).sort_by_file_name().into_iter().filter_entry(wanted);
    entries.filter(|entry| entry.as_ref().map_or(true, |entry| entry.file_type().is_file()))
}
