//! The exit codes of `xlaunch` and of its workers: the one table, also printed by `--help`.

/// Why a process ended, as far as its exit code says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// All work is done.
    Done = 0,
    /// A worker failed.
    WorkerFailed = 1,
    /// Bad usage or configuration.
    Usage = 2,
    /// Bad data or checkpoint.
    Data = 65,
    /// The ranks did not meet.
    Rendezvous = 69,
    /// An error inside xlaunch.
    Internal = 70,
    /// A retryable fault: a peer or the agent was lost.
    Retryable = 75,
    /// A GPU fault.
    Gpu = 76,
    /// Ended at once by a second SIGINT.
    Interrupted = 130,
    /// Stopped cleanly, with a checkpoint where training was under way.
    Stopped = 143,
}

impl ExitCode {
    /// Every code with its meaning, in rising order.
    pub const TABLE: [(Self, &str); 10] = [
        (Self::Done, "done"),
        (Self::WorkerFailed, "a worker failed"),
        (Self::Usage, "bad usage or configuration"),
        (Self::Data, "bad data or checkpoint"),
        (Self::Rendezvous, "rendezvous failed: ranks missing or in disagreement"),
        (Self::Internal, "internal error"),
        (Self::Retryable, "retryable: a peer or the agent was lost"),
        (Self::Gpu, "GPU fault"),
        (Self::Interrupted, "ended at once by a second interrupt"),
        (Self::Stopped, "stopped cleanly, with a checkpoint"),
    ];

    /// The number the process exits with.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The entry of the table with this number; `None` for a number that xlaunch does not use.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::TABLE.iter().map(|(exit, _)| *exit).find(|exit| i32::from(exit.code()) == code)
    }

    /// What the table says of this code.
    pub fn meaning(self) -> &'static str {
        Self::TABLE.iter().find(|(exit, _)| *exit == self).map_or("", |(_, meaning)| meaning)
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(exit: ExitCode) -> Self {
        Self::from(exit.code())
    }
}
