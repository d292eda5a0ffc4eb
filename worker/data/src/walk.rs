//! Finds files below a directory.
//!
//! Directories that cannot be intended as data are skipped: hidden ones, caches (tagged with `CACHEDIR.TAG`, like
//! cargo's target directory), Python's virtual environments, and those selected by the caller. Links to files count as
//! files, because the cache of Hugging Face's hub consists of them; links to directories are skipped, as they could
//! form a loop.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use walkdir::{DirEntry, WalkDir};

/// Characters that turn a path into a glob.
pub const WILDCARDS: [char; 4] = ['*', '?', '[', '{'];

/// Files that mark a directory as a cache or a virtual environment.
const MARKS: [&str; 2] = ["CACHEDIR.TAG", "pyvenv.cfg"];

/// Splits a glob into its leading components without wildcards, and the rest, which is matched by paths relative to
/// them. Directories whose names look like globs, such as `run[1]`, belong to the former if they exist.
pub fn split(glob: &Path) -> (PathBuf, PathBuf) {
    let wild = |part: &Component<'_>| part.as_os_str().to_string_lossy().contains(WILDCARDS);
    let mut base = PathBuf::new();
    for part in glob.components() {
        let next = base.join(part);
        if wild(&part) && !next.exists() {
            break;
        }
        base = next;
    }
    let rest = glob.strip_prefix(&base).unwrap_or(glob).to_path_buf();
    (base, rest)
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
    let is_file =
        |entry: &DirEntry| entry.file_type().is_file() || entry.path_is_symlink() && entry.path().is_file();
    entries.filter(move |entry| entry.as_ref().map_or(true, is_file))
}

/// Removes links to files that are also in the list, or that an earlier link leads to: they would be read twice.
pub fn remove_repeated_links(files: &mut Vec<PathBuf>) {
    let is_link = |path: &PathBuf| path.is_symlink();
    let identity = |path: &PathBuf| path.metadata().ok().map(|file| (file.dev(), file.ino()));
    if !files.iter().any(is_link) {
        return;
    }
    let mut seen: HashSet<_> = files.iter().filter(|path| !is_link(path)).map(identity).collect();
    files.retain(|path| !is_link(path) || seen.insert(identity(path)));
}
