//! What a check reports.

use std::path::{Path, PathBuf};

/// A place where a rule is broken.
#[derive(Debug, PartialEq)]
pub(crate) struct Violation {
    pub(crate) file: PathBuf,
    /// From 1; 0 stands for the whole file.
    pub(crate) line: usize,
    pub(crate) message: String,
}

impl Violation {
    pub(crate) fn new(file: &Path, line: usize, message: impl Into<String>) -> Self {
        Self { file: file.to_path_buf(), line, message: message.into() }
    }
}
