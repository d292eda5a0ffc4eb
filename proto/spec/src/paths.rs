//! Paths in a job description, for the command line that writes them and workers that read them.

use std::io;
use std::path::{Component, Path, PathBuf};

/// Returns the path without `.` and `..`. Symbolic links are not resolved.
pub fn normalize(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}

/// Creates a directory and those above it.
///
/// # Errors
/// System errors. If something else is in the way, such as a link to a drive that is not mounted, the error names it.
pub fn create_directories(path: &Path) -> io::Result<()> {
    let explained = |error: io::Error| match obstacle(path) {
        Some(what) => io::Error::new(error.kind(), what),
        None => error,
    };
    fs_err::create_dir_all(path).map_err(explained)
}

/// Describes the first part of a path that exists but is not a directory.
pub fn obstacle(path: &Path) -> Option<String> {
    let parts: Vec<&Path> = path.ancestors().filter(|part| !part.as_os_str().is_empty()).collect();
    let first = parts.into_iter().rev().find(|part| !part.is_dir())?;
    match first.read_link() {
        Ok(target) if !first.exists() => {
            Some(format!("`{}` is a link to `{}`, which does not exist", first.display(), target.display()))
        }
        _ if first.exists() => Some(format!("`{}` is not a directory", first.display())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_the_way_of_a_directory_is_named() {
        let dir = tempfile::TempDir::new().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::os::unix::fs::symlink("/nowhere/runs", at("link")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        for (path, expected) in [
            (
                "link/a",
                format!("`{}` is a link to `/nowhere/runs`, which does not exist", at("link").display()),
            ),
            ("file", format!("`{}` is not a directory", at("file").display())),
            ("file/a/b", format!("`{}` is not a directory", at("file").display())),
        ] {
            assert_eq!(create_directories(&at(path)).unwrap_err().to_string(), expected);
        }
        create_directories(&at("a/b")).unwrap();
        assert!(at("a/b").is_dir());
        let error = create_directories(Path::new("/proc/none")).unwrap_err();
        assert!(error.to_string().contains("`/proc/none`"), "{error}");
    }
}
