//! Errors that end a worker, and their exit codes.

use xlaunch_comm::CommError;
use xlaunch_engine::EngineError;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::quantities::ranks_text;

use crate::checkpoint::CheckpointError;
use crate::huggingface::ModelError;

/// Result with a [`WorkerError`].
pub type Result<T> = std::result::Result<T, WorkerError>;

/// Reason why a worker cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// A variable that the agent sets is missing or malformed: the worker was not started by an agent.
    #[error("environment variable {0}: `xlaunch worker` is started by an xlaunch agent, not by hand")]
    Environment(String),
    /// A variable that users set has an invalid value.
    #[error("environment variable {0}")]
    Setting(String),
    /// Training or evaluation data cannot be used.
    #[error(transparent)]
    Data(#[from] crate::data::DataError),
    /// The checkpoint to resume from is damaged and was renamed. Another attempt uses another checkpoint.
    #[error("{0}")]
    SetAside(String),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A model in Hugging Face's layout cannot be read or written.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A step could not be captured.
    #[error("{0}; set engine.exec = \"stream\" to train without graph capture")]
    Capture(EngineError),
    /// A peer was lost or NCCL failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The agent refused this worker at the rendezvous.
    #[error("rendezvous failed: {0}")]
    Rendezvous(String),
    /// The connection to the agent broke, or the agent stopped answering.
    #[error("lost the agent: {0}")]
    AgentLost(String),
    /// The job description is invalid.
    #[error(transparent)]
    Spec(#[from] xlaunch_spec::job::SpecError),
    /// Ranks have shards of the state that they cannot save.
    #[error(
        "`comm.shard` and `comm.experts` divide the state of a job, so all nodes have to share a directory of \
         checkpoints: {} cannot save in that of rank 0; set `job.output` to a shared directory, or \
         `comm.shard = \"none\"` and `comm.experts = 1`",
        ranks_text(*writers..*world)
    )]
    NotShared {
        /// Ranks below this one can save their shards.
        writers: u32,
        /// Number of ranks.
        world: u32,
    },
    /// The ranks that divide experts among themselves are not on one node.
    #[error(
        "`comm.experts = {0}` needs groups of {0} consecutive ranks on one node; set it to a divisor of the number of \
         ranks of every node"
    )]
    SplitGroup(usize),
    /// The GPU cannot multiply FP8.
    #[error(
        "`engine.precision = \"fp8\"` needs compute capability {needed}, which {device} does not have; \
         set it to \"bf16\""
    )]
    NoFp8 { needed: &'static str, device: String },
    /// Training diverged.
    #[error(
        "training diverged at step {step}: {what}; \
         lower `train.lr` or `train.clip`, raise `train.warmup`, or resume from an earlier checkpoint"
    )]
    Diverged {
        /// Number of the step, from 1.
        step: u64,
        /// The value that was not finite.
        what: crate::divergence::Divergence,
    },
    /// Ranks have different parameters: memory was corrupted, or a collective is faulty.
    #[error(
        "replicas differ after step {step}: {}; check the memory of their devices, and resume from the last checkpoint",
        ranks_text(.ranks)
    )]
    ReplicasDiffer {
        /// Number of the step, from 1.
        step: u64,
        /// Ranks that differ from the majority; all ranks if there is no majority.
        ranks: Vec<u32>,
    },
    /// One of several ranks of this process cannot continue.
    #[error("rank {rank}: {error}")]
    OfRank {
        /// The rank.
        rank: u32,
        /// Error of that rank.
        error: Box<WorkerError>,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation that failed.
        what: String,
        /// The operating system's error.
        source: std::io::Error,
    },
}

impl WorkerError {
    /// Returns the exit code of the process.
    pub fn exit(&self) -> ExitCode {
        match self {
            Self::Data(_) => ExitCode::Data,
            Self::Checkpoint(CheckpointError::Write { .. }) => ExitCode::SaveFailed,
            // There is not enough memory.
            Self::Checkpoint(CheckpointError::Memory { .. }) => ExitCode::Gpu,
            Self::Checkpoint(_) => ExitCode::Data,
            Self::Model(error) => error.exit(),
            Self::SetAside(_) => ExitCode::DamagedCheckpoint,
            Self::Engine(EngineError::Cuda { .. }) | Self::Capture(_) => ExitCode::Gpu,
            Self::Engine(EngineError::Pool(_)) => ExitCode::Gpu,
            Self::Engine(EngineError::Device { .. }) => ExitCode::Gpu,
            Self::Comm(CommError::Cuda { .. }) => ExitCode::Gpu,
            Self::Comm(CommError::Library { .. } | CommError::Disagree { .. }) | Self::Engine(_) => {
                ExitCode::Internal
            }
            Self::Comm(_) | Self::AgentLost(_) => ExitCode::Retryable,
            Self::Rendezvous(_) => ExitCode::Rendezvous,
            Self::Diverged { .. } => ExitCode::Diverged,
            Self::ReplicasDiffer { .. } => ExitCode::Gpu,
            Self::Environment(_)
            | Self::Setting(_)
            | Self::Spec(_)
            | Self::NotShared { .. }
            | Self::SplitGroup(_)
            | Self::NoFp8 { .. } => ExitCode::Usage,
            Self::OfRank { error, .. } => error.exit(),
            Self::Io { .. } => ExitCode::Internal,
        }
    }

    /// Returns the ranks to blame for this error. Every rank reports it, so the agent attributes it to these ranks
    /// instead of the reporting one.
    pub fn differing_ranks(&self) -> Vec<u32> {
        if let Self::ReplicasDiffer { ranks, .. } = self { ranks.clone() } else { Vec::new() }
    }
}
