//! Expands globs to a sorted list of files.
//!
//! Skips directories that cannot be intended as training data ([`walk`]), and the job's own output.

use std::path::{Path, PathBuf};

use xlaunch_data::walk::{self, FoundFile};
use xlaunch_spec::paths::normalize;

use super::DataError;

/// Returns the files that match any of the absolute `patterns`, sorted by path, without duplicates and files in `skip`.
/// One of several globs may match nothing, but a path without wildcards must exist.
pub(super) fn matching(
    key: &'static str,
    patterns: &[String],
    skip: &Path,
) -> Result<Vec<PathBuf>, DataError> {
    let mut found = Vec::new();
    for pattern in patterns {
        if pattern.contains("://") {
            let reason = "it is not on this host; download it first".into();
            return Err(DataError::Read { path: pattern.into(), reason });
        }
        // Remove `.` and `..`: the paths from walkdir have none.
        let (base, rest) = walk::split(&normalize(Path::new(pattern)));
        if !rest.as_os_str().is_empty() {
            search(&base, &glob(key, pattern, &rest)?, skip, &mut found)?;
        } else if base.is_file() {
            found.push(FoundFile { is_linked: base.is_symlink(), is_fifo: false, path: base });
        } else if base.is_dir() {
            let reason = "it is a directory, but not one of prepared data; name its files by a glob".into();
            return Err(DataError::Read { path: base, reason });
        } else {
            return Err(DataError::NoFiles { key, patterns: pattern.clone() });
        }
    }
    let files = walk::without_repeated_links(found)
        .map_err(|file| DataError::Read { path: file.path, reason: file.reason.into() })?;
    if files.is_empty() {
        return Err(DataError::NoFiles { key, patterns: patterns.join(", ") });
    }
    Ok(files)
}

fn glob(key: &'static str, pattern: &str, rest: &Path) -> Result<String, DataError> {
    let glob = rest.to_string_lossy().into_owned();
    match fast_glob::validate(&glob) {
        Ok(()) => Ok(glob),
        Err(error) => Err(DataError::Glob { key, pattern: pattern.into(), reason: error.to_string() }),
    }
}

fn search(base: &Path, glob: &str, skip: &Path, found: &mut Vec<FoundFile>) -> Result<(), DataError> {
    // Links may lead to it as well.
    let output = skip.canonicalize().unwrap_or_else(|_| skip.into());
    let is_output = |path: &Path| path.canonicalize().is_ok_and(|path| path == output);
    match walk::find(base, Some(glob), &is_output, found) {
        // A base that does not exist matches no file, like any glob without matches.
        Err(error) if error.depth() > 0 => {
            let path = error.path().unwrap_or(base).to_path_buf();
            Err(DataError::Read { path, reason: error.to_string() })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_on_the_network_is_refused_by_its_name() {
        let error = matching("data.train", &["s3://bucket/*.txt".into()], Path::new("/none")).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("s3://bucket/*.txt: it is not on this host; download it"), "{error}");
    }

    #[test]
    fn globs_skip_caches_environments_hidden_directories_and_output() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let skipped = [".git/e.md", "target/f.md", "runs/g.md", "sub/venv/lib/h.md", "sub/venv/pyvenv.cfg"];
        for file in ["b.md", "a.md", "sub/c.md", "sub/d.txt"].iter().chain(&skipped) {
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
        // Names that look like globs.
        fs_err::create_dir(root.join("run[1]")).unwrap();
        fs_err::write(root.join("run[1]/a{b}.md"), "x").unwrap();
        for text in ["run[1]/*.md", "run[1]/a{b}.md", "run*/a*.md", "[r-z]un*/?{[{]b}}.md"] {
            assert_eq!(names(&pattern(text)), ["run[1]/a{b}.md"], "{text}");
        }
        std::os::unix::fs::symlink("../.git/e.md", root.join("sub/link.bin")).unwrap();
        assert_eq!(names(&pattern("sub/*.bin")), ["sub/link.bin"]);
        std::os::unix::fs::symlink("nowhere", root.join("sub/link.gone")).unwrap();
        let error = matching("data.train", &pattern("sub/*.gone"), &root).unwrap_err().to_string();
        assert!(error.contains("link.gone: it is a link to a file that does not exist"), "{error}");
        // As in a shell, a component follows links to directories, but `**` does not, so loops do not matter.
        for (target, link) in
            [("../sub", "linked"), (".", "loop"), ("../runs", "output"), ("../.git", ".hidden")]
        {
            std::os::unix::fs::symlink(target, root.join("sub").join(link)).unwrap();
        }
        fs_err::create_dir(root.join("other")).unwrap();
        std::os::unix::fs::symlink("../sub", root.join("other/all")).unwrap();
        assert_eq!(names(&pattern("other/*/*.{md,bin}")), ["other/all/c.md", "other/all/link.bin"]);
        assert_eq!(names(&pattern("*/a*/**/c.md")), ["other/all/c.md"]);
        assert_eq!(names(&pattern("**/all/c.md")), ["other/all/c.md"]);
        assert_eq!(names(&pattern("*/*/*/c.md")), ["other/all/linked/c.md"], "each file once");
        assert_eq!(names(&pattern("**/*.md")), ["a.md", "b.md", "run[1]/a{b}.md", "sub/c.md"]);
        assert_eq!(names(&pattern("{sub,sub/*}/*.md")), ["sub/c.md"], "other than through a link");
        let left_out = pattern("sub/{output,.hidden}/?.md");
        assert!(matching("data.train", &left_out, &root.join("runs")).is_err());
        let error = matching("data.train", &pattern("*.bin"), &root).unwrap_err().to_string();
        assert!(error.contains("data.train") && error.contains("*.bin"), "{error}");
        for (other, problem) in [("sub/e.md", "no file matches `"), ("sub", "it is a directory")] {
            let patterns = [pattern("**/*.md"), pattern(other)].concat();
            let error = matching("data.train", &patterns, &root).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains(other) && !error.contains('*'), "{error}");
        }
        assert_eq!(names(&[pattern("*.none"), pattern("*.md")].concat()), ["a.md", "b.md"]);
        let error = matching("data.train", &pattern("*.{md"), &root).unwrap_err().to_string();
        assert!(error.contains("*.{md` is not a valid glob"), "{error}");
    }
}
