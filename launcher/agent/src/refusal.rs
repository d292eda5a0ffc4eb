//! Why a job cannot start.

use xlaunch_proto::exit::ExitCode;

/// A job that cannot start: what to exit with, and why.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The exit code of the command.
    pub exit: ExitCode,
    /// The reason, for people.
    pub message: String,
}

impl Refusal {
    /// A refusal with this code.
    pub fn new(exit: ExitCode, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }
}
