//! Expands globs to a sorted list of files.
//!
//! Directories that cannot be meant as training data are skipped: hidden ones, caches (tagged with `CACHEDIR.TAG`, like
//! cargo's target directory) and the job's own output.

use std::path::{Component, Path, PathBuf};

use walkdir::{DirEntry, WalkDir};
use xlaunch_proto::paths::normalize;

use super::DataError;

/// The files that match any of `patterns` (absolute), sorted by path, without duplicates and without those in `skip`.
pub(super) fn matching(
    key: &'static str,
    patterns: &[String],
    skip: &Path,
) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for pattern in patterns {
        // Without `.` and `..`, as walkdir yields paths.
        let (base, rest) = split(&normalize(Path::new(pattern)));
        match rest {
            None if base.is_file() => files.push(base),
            None => {}
            Some(rest) => walk(&base, &glob(key, pattern, &base.join(rest))?, skip, &mut files)?,
        }
    }
    files.sort();
    files.dedup();
    if files.is_empty() {
        return Err(DataError::NoFiles { key, patterns: patterns.join(", ") });
    }
    Ok(files)
}

/// The leading components without wildcards, and the rest, if any.
fn split(pattern: &Path) -> (PathBuf, Option<PathBuf>) {
    let wild =
        |component: &Component<'_>| component.as_os_str().to_string_lossy().contains(['*', '?', '[', '{']);
    let base: PathBuf = pattern.components().take_while(|component| !wild(component)).collect();
    let rest: PathBuf = pattern.components().skip_while(|component| !wild(component)).collect();
    (base, (!rest.as_os_str().is_empty()).then_some(rest))
}

fn glob(key: &'static str, pattern: &str, full: &Path) -> Result<String, DataError> {
    let glob = full.to_string_lossy().into_owned();
    match fast_glob::validate(&glob) {
        Ok(()) => Ok(glob),
        Err(error) => Err(DataError::Glob { key, pattern: pattern.into(), reason: error.to_string() }),
    }
}

fn walk(base: &Path, glob: &str, skip: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let matches = |path: &Path| fast_glob::glob_match(glob, path.as_os_str().as_encoded_bytes());
    let wanted =
        |entry: &DirEntry| entry.depth() == 0 || !entry.file_type().is_dir() || !skipped(entry, skip);
    for entry in WalkDir::new(base).sort_by_file_name().into_iter().filter_entry(wanted) {
        match entry {
            Ok(entry) if entry.file_type().is_file() && matches(entry.path()) => {
                files.push(entry.into_path());
            }
            Ok(_) => {}
            // A base that does not exist matches no file, like any glob.
            Err(error) if error.depth() == 0 => {}
            Err(error) => {
                let path = error.path().unwrap_or(base).to_path_buf();
                return Err(DataError::Read { path, reason: error.to_string() });
            }
        }
    }
    Ok(())
}

fn skipped(entry: &DirEntry, skip: &Path) -> bool {
    entry.file_name().to_string_lossy().starts_with('.')
        || entry.path() == skip
        || entry.path().join("CACHEDIR.TAG").is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_skip_caches_hidden_directories_and_output() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        for file in ["b.md", "a.md", "sub/c.md", "sub/d.txt", ".git/e.md", "target/f.md", "runs/g.md"] {
            let path = root.join(file);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(path, "x").unwrap();
        }
        fs_err::write(root.join("target/CACHEDIR.TAG"), "").unwrap();
        let pattern = |text: &str| vec![format!("{}/sub/../{text}", root.display())];
        let names = |patterns: &[String]| -> Vec<String> {
            let files = matching("data.train", patterns, &root.join("runs")).unwrap();
            files.iter().map(|file| file.strip_prefix(&root).unwrap().display().to_string()).collect()
        };
        assert_eq!(names(&pattern("**/*.md")), ["a.md", "b.md", "sub/c.md"]);
        assert_eq!(names(&pattern("*.md")), ["a.md", "b.md"]);
        assert_eq!(names(&pattern("{a,sub/?}.{md,txt}")), ["a.md", "sub/c.md", "sub/d.txt"]);
        assert_eq!(names(&pattern(".git/e.md")), [".git/e.md"]);
        let error = matching("data.train", &pattern("*.bin"), &root).unwrap_err().to_string();
        assert!(error.contains("data.train") && error.contains("*.bin"), "{error}");
        let error = matching("data.train", &pattern("*.{md"), &root).unwrap_err().to_string();
        assert!(error.contains("*.{md` is not a valid glob"), "{error}");
    }
}
