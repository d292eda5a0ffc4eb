//! The exit codes of `xlaunch` and of its workers: the one table, also printed by `--help`.

/// Why a process ended, as far as its exit code says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitCode {
    /// All work is done.
    Done,
    /// A worker failed.
    WorkerFailed,
    /// Bad usage or configuration.
    Usage,
    /// Bad data or checkpoint.
    Data,
    /// The ranks did not meet.
    Rendezvous,
    /// An error inside xlaunch.
    Internal,
    /// A retryable fault: a peer or the agent was lost.
    Retryable,
    /// A GPU fault.
    Gpu,
    /// Ended at once by a second SIGINT.
    Interrupted,
    /// Stopped cleanly, with a checkpoint where training was under way.
    Stopped,
    /// A command was ended by this signal to xlaunch.
    Signal(u8),
    /// A worker's own code, where `--propagate-exit-code` asks for it.
    Worker(u8),
}

impl ExitCode {
    /// Every fixed code with its meaning, in rising order.
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
        match self {
            Self::Done => 0,
            Self::WorkerFailed => 1,
            Self::Usage => 2,
            Self::Data => 65,
            Self::Rendezvous => 69,
            Self::Internal => 70,
            Self::Retryable => 75,
            Self::Gpu => 76,
            Self::Interrupted => 130,
            Self::Stopped => 143,
            Self::Signal(signal) => 128 | signal,
            Self::Worker(code) => code,
        }
    }

    /// The entry of the table with this number; `None` for a number that xlaunch does not use.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::TABLE.iter().map(|(exit, _)| *exit).find(|exit| i32::from(exit.code()) == code)
    }

    /// What the table says of this code, or what it is.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Signal(_) => "ended by a signal",
            Self::Worker(_) => "the worker's own",
            fixed => Self::TABLE.iter().find(|(exit, _)| *exit == fixed).map_or("", |(_, meaning)| meaning),
        }
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(exit: ExitCode) -> Self {
        Self::from(exit.code())
    }
}
