//! The built-in trainer, as far as the command line needs it. `main.rs` fills this in: no other module knows the worker.

use std::path::{Path, PathBuf};

use xlaunch_agent::Refusal;
use xlaunch_proto::spec::JobSpec;

/// Functions of the worker crate that run in the launcher's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trainer {
    /// Checks data and checkpoint before any worker starts; the path is the job's directory of earlier runs.
    pub(crate) preflight: fn(&JobSpec, &Path) -> Result<Preflight, Refusal>,
    /// The newest complete checkpoint in a directory.
    pub(crate) newest_checkpoint: fn(&Path) -> Option<PathBuf>,
}

/// A job that can start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Preflight {
    /// Checkpoint to resume from.
    pub(crate) resume_from: Option<PathBuf>,
    /// Printed before the workers start.
    pub(crate) warnings: Vec<String>,
}
