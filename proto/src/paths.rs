//! Paths of a job description, as the command line writes them and workers read them.

use std::path::{Component, Path, PathBuf};

/// The path without `.` and `..`. Symbolic links are not resolved.
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
