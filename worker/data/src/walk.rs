//! Finds files below a directory.
//!
//! Directories that cannot be meant as data are left out: hidden ones, caches (tagged with `CACHEDIR.TAG`, like cargo's
//! target directory), Python's virtual environments and those of the caller's choice.

use std::path::{Component, Path, PathBuf};

use walkdir::{DirEntry, WalkDir};

/// Characters that make a glob of a path.
pub const WILDCARDS: [char; 4] = ['*', '?', '[', '{'];

/// Files that mark a directory as a cache or a virtual environment.
const MARKS: [&str; 2] = ["CACHEDIR.TAG", "pyvenv.cfg"];

/// The leading components of a glob, up to the first with a wildcard.
pub fn literal_base(glob: &Path) -> PathBuf {
    let wild = |part: &Component<'_>| part.as_os_str().to_string_lossy().contains(WILDCARDS);
    glob.components().take_while(|part| !wild(part)).collect()
}

/// The files below `base`, each directory's sorted by name, without those in directories for which `skip` is true.
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
