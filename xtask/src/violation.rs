//! Result of a check.

use std::path::{Path, PathBuf};

/// A place where a rule is broken.
#[derive(Debug, PartialEq)]
pub(crate) struct Violation {
    pub(crate) file: PathBuf,
    /// Line number, starting at 1; 0 means the whole file.
    pub(crate) line: usize,
    pub(crate) message: String,
}

impl Violation {
    pub(crate) fn new(file: &Path, line: usize, message: impl Into<String>) -> Self {
        Self { file: file.to_path_buf(), line, message: message.into() }
    }
}
