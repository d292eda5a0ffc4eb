//! Normalisation of the paths in a job description, for the command line that writes them and workers that read them.

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
