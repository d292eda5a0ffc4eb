//! The error of a job or command that is refused.

use crate::exit::ExitCode;

/// The reason why a job or command was refused, or failed before it started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Exit code of `xlaunch`.
    pub exit: ExitCode,
    /// Message for the user.
    pub message: String,
}

impl Refusal {
    /// Creates a refusal with this exit code. Codes that only workers use are replaced by those of jobs.
    pub fn new(exit: ExitCode, message: impl Into<String>) -> Self {
        Self { exit: exit.of_job(), message: message.into() }
    }

    /// Creates the refusal after the user has pressed Ctrl-C.
    pub fn interrupted() -> Self {
        Self { exit: ExitCode::Signal(2), message: "interrupted".into() }
    }
}
