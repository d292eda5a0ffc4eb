//! The functions of the worker crate that the command line needs. `main.rs` fills them in, so that no other module
//! depends on the worker.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use xlaunch_agent::Refusal;
use xlaunch_agent::environment::{DataSet, Parent};
use xlaunch_agent::workload::trainer::Recover;
use xlaunch_proto::spec::{Invalid, JobSpec};

/// These run in the launcher's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trainer {
    /// Takes what a configuration leaves open from the weights and data that it names.
    pub(crate) fill_in: FillIn,
    /// Validates data and checkpoints before any worker starts. The path is the directory of the job's earlier runs,
    /// the number that of ranks.
    pub(crate) preflight: fn(&JobSpec, &Path, u32) -> Result<Preflight, Refusal>,
    /// The newest complete checkpoint in a directory.
    pub(crate) newest_checkpoint: fn(&Path) -> Option<PathBuf>,
    /// The newest complete checkpoint of a run in a directory.
    pub(crate) recover: Recover,
    /// Writes a checkpoint in Hugging Face's layout.
    pub(crate) export: fn(ExportRequest) -> Result<Exported, Refusal>,
}

/// What to export, and where to.
#[derive(Clone, Debug)]
pub(crate) struct ExportRequest {
    pub(crate) checkpoint: PathBuf,
    pub(crate) output: PathBuf,
    /// Round the weights to bf16.
    pub(crate) bf16: bool,
    pub(crate) tokenizer: Option<String>,
    pub(crate) overwrite: bool,
}

/// A finished export.
#[derive(Clone, Debug)]
pub(crate) struct Exported {
    pub(crate) checkpoint: PathBuf,
    pub(crate) step: u64,
    pub(crate) output: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) tokenizer: Option<String>,
    /// For the user.
    pub(crate) notes: Vec<String>,
}

/// Completes a configuration from the files that it names.
pub(crate) type FillIn = fn(&mut JobSpec) -> Result<(), FillInError>;

/// Why a configuration cannot be completed.
#[derive(Debug)]
pub(crate) enum FillInError {
    /// A key contradicts the files.
    Invalid(Invalid),
    /// The files cannot be used.
    Refused(Refusal),
}

/// The result of a successful preflight check.
#[derive(Debug, Default)]
pub(crate) struct Preflight {
    /// Checkpoint to resume from.
    pub(crate) resume_from: Option<PathBuf>,
    /// The run that wrote it.
    pub(crate) parent: Option<Parent>,
    /// It has all steps of the job: this many.
    pub(crate) complete: Option<u64>,
    /// The data, by split.
    pub(crate) data: BTreeMap<&'static str, DataSet>,
    /// Steps of warm-up of the run that is resumed.
    pub(crate) warmup: Option<u64>,
    /// Bytes of the state that checkpoints contain.
    pub(crate) state_bytes: u64,
    /// Printed before the workers start.
    pub(crate) warnings: Vec<String>,
    /// Held until the job has ended.
    pub(crate) lock: Option<Box<dyn Any + Send>>,
}
