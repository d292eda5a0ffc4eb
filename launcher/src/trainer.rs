//! The functions of the worker crate that the command line needs. `main.rs` fills them in, so that no other module
//! depends on the worker.

use std::path::{Path, PathBuf};

use xlaunch_agent::Refusal;
use xlaunch_proto::spec::JobSpec;

/// These run in the launcher's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trainer {
    /// Validates data and checkpoint before any worker starts. The path is the directory of the job's earlier runs.
    pub(crate) preflight: fn(&JobSpec, &Path) -> Result<Preflight, Refusal>,
    /// The newest complete checkpoint in a directory.
    pub(crate) newest_checkpoint: fn(&Path) -> Option<PathBuf>,
}

/// The result of a successful preflight check.
#[derive(Clone, Debug, Default)]
pub(crate) struct Preflight {
    /// Checkpoint to resume from.
    pub(crate) resume_from: Option<PathBuf>,
    /// Printed before the workers start.
    pub(crate) warnings: Vec<String>,
}
