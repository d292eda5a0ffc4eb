//! What ends a worker, and the exit code that says so.

use xlaunch_comm::CommError;
use xlaunch_engine::EngineError;
use xlaunch_proto::exit::ExitCode;

/// Result of a worker's work.
pub type Result<T> = std::result::Result<T, WorkerError>;

/// Why a worker cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Started by something else than an agent.
    #[error("environment variable {0}: `xlaunch worker` is started by an xlaunch agent, not by hand")]
    Environment(String),
    /// A variable of the user's that cannot be used.
    #[error("environment variable {0}")]
    Setting(String),
    /// Training or evaluation data cannot be used.
    #[error(transparent)]
    Data(#[from] crate::data::DataError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
    /// The device failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A step could not be captured.
    #[error("{0}; with engine.exec = \"stream\" nothing is captured")]
    Capture(EngineError),
    /// A peer is gone or NCCL failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The agent refused this worker at the rendezvous.
    #[error("rendezvous failed: {0}")]
    Rendezvous(String),
    /// The agent is gone.
    #[error("lost the agent: {0}")]
    AgentLost(String),
    /// The job description is not usable.
    #[error(transparent)]
    Spec(#[from] xlaunch_proto::spec::SpecError),
    /// Training diverged.
    #[error(
        "loss is {loss} at step {step}: training diverged; a lower train.lr, a longer train.warmup or train.clip may help"
    )]
    Diverged {
        /// The step.
        step: u64,
        /// What it is.
        loss: f32,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Its answer.
        source: std::io::Error,
    },
}

impl WorkerError {
    /// What the process exits with.
    pub fn exit(&self) -> ExitCode {
        match self {
            Self::Data(_) => ExitCode::Data,
            Self::Checkpoint(_) => ExitCode::Data,
            Self::Engine(EngineError::Cuda { .. }) | Self::Capture(_) => ExitCode::Gpu,
            Self::Engine(EngineError::Pool(_)) => ExitCode::Gpu,
            Self::Engine(EngineError::Device { .. }) => ExitCode::Gpu,
            Self::Comm(CommError::Cuda { .. }) => ExitCode::Gpu,
            Self::Comm(CommError::Library { .. }) | Self::Engine(_) => ExitCode::Internal,
            Self::Comm(_) | Self::AgentLost(_) => ExitCode::Retryable,
            Self::Rendezvous(_) => ExitCode::Rendezvous,
            Self::Diverged { .. } => ExitCode::WorkerFailed,
            Self::Environment(_) | Self::Setting(_) | Self::Spec(_) => ExitCode::Usage,
            Self::Io { .. } => ExitCode::Internal,
        }
    }
}
