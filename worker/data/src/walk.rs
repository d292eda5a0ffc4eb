//! Finds files below a directory.
//!
//! Directories that cannot be intended as data are skipped: hidden ones, caches (tagged with `CACHEDIR.TAG`, like
//! cargo's target directory), Python's virtual environments, and those selected by the caller. Links to files count as
//! files, because the cache of Hugging Face's hub consists of them; one that leads nowhere is an error, and so is a
//! FIFO, which may contain data but has to be named. Links to directories are followed as in a shell: where a component
//! of the glob matches them, but not below `**`, as they could form a loop or lead anywhere.

use std::collections::HashSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
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

/// A file that was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundFile {
    pub path: PathBuf,
    /// True if the file or a directory that the search has passed is a link.
    pub is_linked: bool,
    pub is_fifo: bool,
}

/// A file that was found, but cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    pub path: PathBuf,
    pub reason: &'static str,
}

/// Adds the files below `base` whose paths relative to it match `glob`, or without a glob all that are not hidden.
/// Leaves out directories for which `skip` is true.
///
/// # Errors
/// If a directory cannot be read; the depth is 0 if that is `base`.
pub fn find(
    base: &Path,
    glob: Option<&str>,
    skip: &dyn Fn(&Path) -> bool,
    found: &mut Vec<FoundFile>,
) -> walkdir::Result<()> {
    Search { glob, skip }.add(base, false, found)
}

struct Search<'a> {
    glob: Option<&'a str>,
    skip: &'a dyn Fn(&Path) -> bool,
}

impl Search<'_> {
    fn add(&self, base: &Path, is_linked: bool, found: &mut Vec<FoundFile>) -> walkdir::Result<()> {
        let wanted = |entry: &DirEntry| {
            entry.depth() == 0 || !entry.file_type().is_dir() || !self.leaves_out(entry.path())
        };
        for entry in WalkDir::new(base).sort_by_file_name().into_iter().filter_entry(wanted) {
            let entry = entry?;
            let path = entry.path();
            let is_link = entry.depth() > 0 && entry.path_is_symlink();
            let relative = path.strip_prefix(base).unwrap_or(path);
            if is_link && path.is_dir() {
                if !self.leaves_out(path) {
                    for rest in self.globs_below(relative) {
                        Search { glob: Some(rest), skip: self.skip }.add(path, true, found)?;
                    }
                }
            } else if self.matches(relative) {
                let kind = if is_link {
                    path.metadata().ok().map(|file| file.file_type())
                } else {
                    Some(entry.file_type())
                };
                // Editors lock files by hidden links that lead nowhere.
                let is_fifo = kind.is_some_and(|kind| kind.is_fifo()) && !is_hidden(path);
                if is_fifo || kind.map_or(!is_hidden(path), |kind| kind.is_file()) {
                    found.push(FoundFile {
                        path: path.to_path_buf(),
                        is_linked: is_linked || is_link,
                        is_fifo,
                    });
                }
            }
        }
        Ok(())
    }

    fn leaves_out(&self, dir: &Path) -> bool {
        is_hidden(dir) || MARKS.iter().any(|mark| dir.join(mark).is_file()) || (self.skip)(dir)
    }

    fn matches(&self, relative: &Path) -> bool {
        match self.glob {
            Some(glob) => fast_glob::glob_match(glob, relative.as_os_str().as_encoded_bytes()),
            None => !is_hidden(relative),
        }
    }

    /// Returns the globs for paths below a directory that components of this glob match.
    fn globs_below(&self, dir: &Path) -> impl Iterator<Item = &str> {
        let glob = self.glob.unwrap_or_default();
        let parts = glob.match_indices('/').map(|(at, _)| (&glob[..at], &glob[at + 1..]));
        parts.filter_map(move |(start, rest)| {
            // A slash may also be within braces.
            let is_glob = !start.ends_with("**") && fast_glob::validate(start).is_ok();
            let matches = is_glob && fast_glob::glob_match(start, dir.as_os_str().as_encoded_bytes());
            matches.then_some(rest)
        })
    }
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

/// Returns paths, sorted, without links to files that are also in the list, or that an earlier link leads to: they
/// would be read twice.
///
/// # Errors
/// A link leads nowhere, so that a file of the data is missing, or a file is a FIFO.
pub fn without_repeated_links(mut files: Vec<FoundFile>) -> Result<Vec<PathBuf>, Unreadable> {
    for FoundFile { path, is_linked, is_fifo } in &files {
        let reason = if *is_fifo {
            "it is a FIFO, which is read only if it is named as an input of `xlaunch data prepare`"
        } else if *is_linked && !path.exists() {
            "it is a link to a file that does not exist"
        } else {
            continue;
        };
        return Err(Unreadable { path: path.clone(), reason });
    }
    files.sort();
    files.dedup_by(|next, kept| next.path == kept.path);
    let identity = |found: &FoundFile| found.path.metadata().ok().map(|file| (file.dev(), file.ino()));
    if files.iter().any(|found| found.is_linked) {
        let mut seen: HashSet<_> = files.iter().filter(|found| !found.is_linked).map(identity).collect();
        files.retain(|found| !found.is_linked || seen.insert(identity(found)));
    }
    Ok(files.into_iter().map(|found| found.path).collect())
}
