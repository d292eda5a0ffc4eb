//! The error of everything that happens before a job starts.

use xlaunch_proto::exit::ExitCode;

/// Why a job cannot start.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// What `xlaunch` exits with.
    pub exit: ExitCode,
    /// For the user.
    pub message: String,
}

impl Refusal {
    /// A refusal with this exit code.
    pub fn new(exit: ExitCode, message: impl Into<String>) -> Self {
        Self { exit: exit.of_job(), message: message.into() }
    }
}
