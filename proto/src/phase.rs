//! Names of training phases, used on timelines, in status and in messages.

use crate::v1::Phase;

impl Phase {
    /// Returns the name of the phase.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unspecified => "between phases",
            Self::WaitForData => "wait for data",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::AllReduce => "all-reduce",
            Self::Optimizer => "optimizer",
            Self::ReadBack => "read back",
            Self::Evaluation => "evaluation",
            Self::Checkpoint => "checkpoint",
            Self::Sample => "sample",
            Self::StartUp => "start-up",
            Self::OpenCommunicator => "open communicator",
            Self::Initialize => "initialize",
        }
    }
}
