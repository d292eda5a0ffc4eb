//! The exit codes of `xlaunch` and its workers. `--help` and the man page print this table.

/// The reason for an exit, as encoded in an exit code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExitCode {
    /// Success.
    Done,
    /// A worker failed.
    WorkerFailed,
    /// Bad command line or configuration.
    Usage,
    /// Bad data or checkpoint.
    Data,
    /// The rendezvous failed: ranks are missing, or disagree.
    Rendezvous,
    /// An error inside xlaunch. The default, because an unknown outcome is never success.
    #[default]
    Internal,
    /// A failure that a retry may fix: a peer or the agent was lost, a rank hung, the job was preempted, the restarts
    /// of a training job were used up by external failures, or it was stopped before it had saved its last step.
    Retryable,
    /// A GPU fault, or not enough memory for the trainer's buffers.
    Gpu,
    /// Killed by a second SIGINT.
    Interrupted,
    /// Stopped cleanly; a training job has saved a checkpoint.
    Stopped,
    /// xlaunch received this signal, and terminated its command.
    Signal(u8),
    /// The exit code of a worker, with `--propagate-exit-code`.
    Worker(u8),
    /// Training diverged, so a restart would diverge again. Only workers of the trainer exit with this code; `xlaunch`
    /// exits with 1.
    Diverged,
    /// The checkpoint to resume from does not match its hashes, and was renamed, so that the next attempt takes another
    /// one. Only workers of the trainer exit with this code.
    DamagedCheckpoint,
    /// A checkpoint could not be saved, and the job must not continue without it. Only workers of the trainer exit with
    /// this code; `xlaunch` exits with 65.
    SaveFailed,
}

impl ExitCode {
    /// Every fixed code and its meaning, in ascending order.
    pub const TABLE: [(Self, &str); 10] = [
        (Self::Done, "done"),
        (Self::WorkerFailed, "a worker failed"),
        (Self::Usage, "bad command line or configuration"),
        (Self::Data, "bad data or checkpoint"),
        (Self::Rendezvous, "rendezvous failed: ranks are missing or disagree"),
        (Self::Internal, "internal error"),
        (
            Self::Retryable,
            "retryable: a peer was lost, a rank hung, preempted, or stopped without a checkpoint",
        ),
        (Self::Gpu, "GPU fault, or out of memory"),
        (Self::Interrupted, "killed by a second interrupt"),
        (Self::Stopped, "stopped cleanly, with a checkpoint"),
    ];

    /// Exit codes that only workers of the trainer use.
    const OF_WORKERS: [(Self, &str); 3] = [
        (Self::Diverged, "training diverged"),
        (Self::DamagedCheckpoint, "damaged checkpoint"),
        (Self::SaveFailed, "checkpoint not saved"),
    ];

    /// Returns the numeric exit code.
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
            Self::Diverged => 77,
            Self::DamagedCheckpoint => 78,
            Self::SaveFailed => 79,
        }
    }

    /// Returns the table entry of a numeric code; `None` if the code is not in the table.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::TABLE.iter().map(|(exit, _)| *exit).find(|exit| i32::from(exit.code()) == code)
    }

    /// Returns the meaning of the numeric code of a trainer's worker, which has additional codes.
    pub fn of_worker(code: i32) -> Option<Self> {
        let mut internal = Self::OF_WORKERS.iter().map(|(exit, _)| *exit);
        Self::from_code(code).or_else(|| internal.find(|exit| i32::from(exit.code()) == code))
    }

    /// Returns the code with which a job or command ends for this reason: codes that only workers use are replaced.
    pub fn of_job(self) -> Self {
        match self {
            Self::Diverged => Self::WorkerFailed,
            Self::DamagedCheckpoint | Self::SaveFailed => Self::Data,
            other => other,
        }
    }

    /// Returns the meaning of this code.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Signal(_) => "terminated by a signal",
            Self::Worker(_) => "exit code of a worker",
            fixed => {
                let mut known = Self::TABLE.iter().chain(&Self::OF_WORKERS);
                known.find(|(exit, _)| *exit == fixed).map_or("", |(_, meaning)| meaning)
            }
        }
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(exit: ExitCode) -> Self {
        Self::from(exit.code())
    }
}
