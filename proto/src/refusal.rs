//! The error of a job or command that is not carried out.

use crate::exit::ExitCode;

/// Why a job or command was refused, or failed before it started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Exit code of `xlaunch`.
    pub exit: ExitCode,
    /// Message for the user.
    pub message: String,
}

impl Refusal {
    /// A refusal with this exit code; codes that only workers have are replaced by those of jobs.
    pub fn new(exit: ExitCode, message: impl Into<String>) -> Self {
        Self { exit: exit.of_job(), message: message.into() }
    }

    /// The user pressed Ctrl-C.
    pub fn interrupted() -> Self {
        Self { exit: ExitCode::Signal(2), message: "interrupted".into() }
    }
}
