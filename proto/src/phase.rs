//! What phases of a training step are called, on the wire as on a timeline and in messages.

use crate::v1::Phase;

impl Phase {
    /// Its name.
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
        }
    }
}
