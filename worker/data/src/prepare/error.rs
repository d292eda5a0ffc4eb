//! Errors of preparing and inspecting data.

use std::io;
use std::path::Path;

/// Messages for users. The variant determines the exit code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    /// The arguments, or files named by them, cannot be used.
    #[error("{0}")]
    Usage(String),
    /// The contents of an input, or of prepared data, are wrong.
    #[error("{0}")]
    Data(String),
    /// A bug.
    #[error("{0}")]
    Internal(String),
}

impl PrepareError {
    pub(crate) fn read(what: impl std::fmt::Display, error: &io::Error) -> Self {
        Self::Usage(format!("failed to read {what}: {error}"))
    }

    pub(crate) fn no_thread(error: &io::Error) -> Self {
        Self::Usage(format!(
            "failed to start a thread: {error}\nhelp: raise the limit on processes (ulimit -u, the container's pids \
             limit) or on memory (ulimit -v)"
        ))
    }

    pub(crate) fn write(path: &Path, error: &io::Error) -> Self {
        let help = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "\nhelp: free space, or name another directory with --output"
            }
            _ => "",
        };
        Self::Usage(format!("failed to write {}: {error}{help}", path.display()))
    }
}
