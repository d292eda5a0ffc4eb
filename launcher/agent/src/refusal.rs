//! The error of all steps before a job starts.

use xlaunch_proto::exit::ExitCode;

/// The reason why a job cannot start.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Exit code of `xlaunch`.
    pub exit: ExitCode,
    /// Message for the user.
    pub message: String,
}

impl Refusal {
    pub fn new(exit: ExitCode, message: impl Into<String>) -> Self {
        Self { exit: exit.of_job(), message: message.into() }
    }
}
