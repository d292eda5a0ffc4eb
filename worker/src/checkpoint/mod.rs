//! Checkpoints. A checkpoint is either complete or invisible.
//!
//! ```text
//! <dir>/step-00001000/
//!   model.safetensors                        parameters by name, F32
//!   optimizer-00001-of-00002.safetensors     one per rank: AdamW's moments, `m.<name>[first:end]` and `v.<name>[..]`
//!   state.json                               step, position in the data, run, fingerprint of the data, batch
//!   tokenizer.json                           the data's tokenizer, if there is one
//!   manifest.json                            exactly the files above, their sizes and hashes; written last
//! ```
//! If adapters are trained, parameters and moments are those of the adapters alone, and `state.json` has the path and
//! the hash of the weights that they adapt.
//!
//! Saving (`saver`): at a step boundary every rank copies its [`Portion`] of the state to host memory and continues
//! training. A thread of each rank writes the copy to `.tmp-step-...`: its byte ranges of `model.safetensors`, and a
//! file of moments. Once the agent knows that all ranks are done, rank 0 adds the manifest and renames the directory.
//!
//! Reading (`read`): blocks are hashed as they are read, and passed on one by one. A run may resume with any number of
//! ranks: each rank takes its share from all files.
//!
//! - `manifest`, `state`, `tensors`: the formats of the files; `portion`: the part that a rank saves; `tokenizer`:
//!   reads the tokenizer of a checkpoint;
//! - `directory`: the contents of a directory of checkpoints; `lock`: one job per directory; `retention`: selects the
//!   checkpoints to delete;
//! - `write`: writes a rank's files, and commits;
//! - `memory`: snapshots in memory, from which an attempt resumes without reading files.
//!
//! Invariants: a directory without a manifest that matches its files is not a checkpoint; a failed save leaves the
//! directory unchanged; only checkpoints of this run and of the runs that it continues are deleted, but never the
//! newest checkpoint or the one that the run was resumed from.

pub mod directory;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod lock;
mod manifest;
mod memory;
mod portion;
mod read;
mod retention;
pub mod runs;
pub mod saver;
mod state;
mod tensors;
mod write;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use xlaunch_spec::job::{JobSpec, Optimizer};
use xlaunch_spec::model::ModelShape;

pub(crate) use lock::has_no_locks;
pub use lock::{Lock, LockError};
pub use manifest::{Chunk, parse_hash};
pub use memory::{Memory, Slot, Snapshot};
pub use portion::Portion;
pub use read::{Abandoned, Arena, Piece, Sink, check_weights, read, read_weights, tokenizer};
pub use retention::Retention;
pub use state::{Adapted, Batch, Changes, Frozen, Parent, State};
pub(crate) use tensors::read_header;

/// Newest version of the directory layout above, for models and optimizers that builds before 0.4 do not know and would
/// take for others. The oldest version that suits a checkpoint is written: 2, or 3 with a tokenizer. Version 1 can
/// still be read: it has a single file of whole moments, `m.<name>` and `v.<name>`, and one hash per file.
pub const VERSION: u32 = 4;
const VERSION_WITH_TOKENIZER: u32 = 3;
const VERSION_WITHOUT_TOKENIZER: u32 = 2;
const MODEL: &str = "model.safetensors";
const STATE: &str = "state.json";
const TOKENIZER: &str = xlaunch_data::TOKENIZER_FILE;
const MANIFEST: &str = "manifest.json";

/// Reason why a checkpoint cannot be written or used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages describe the fields")]
pub enum CheckpointError {
    #[error("failed to write checkpoint {}: {reason}", path.display())]
    Write { path: PathBuf, reason: String },
    #[error("failed to read {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("{} is not a complete checkpoint: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("the checkpoint of step {step} is not complete: {reason}: {}", path.display())]
    Unfinished { path: PathBuf, step: u64, reason: String },
    #[error("{} has format version {version}, but this build reads versions 1 to {VERSION}", path.display())]
    Version { path: PathBuf, version: u32 },
    #[error("checkpoint {} was written by another model: {difference}", path.display())]
    OtherModel { path: PathBuf, difference: String },
    #[error("checkpoint {} does not fit this job: {difference}", path.display())]
    OtherTraining { path: PathBuf, difference: String },
    #[error(
        "checkpoint {} was trained with other weights in `checkpoint.init`: {difference}; set `checkpoint.init` to the \
         weights that the run began with",
        path.display()
    )]
    OtherWeights { path: PathBuf, difference: String },
    #[error(
        "failed to get {mib} MiB of memory for the snapshots of rank {rank}: {reason}; set `checkpoint.memory` to off"
    )]
    Memory { rank: u32, mib: u64, reason: String },
    #[error("the memory snapshot of step {step} is damaged on rank {rank}: {reason}")]
    DamagedMemory { step: u64, rank: u32, reason: String },
    #[error("no checkpoint in {}{}", path.display(), directory::newest_run(path))]
    None { path: PathBuf },
    #[error("no valid checkpoint in {}: {}", path.display(), reasons.join("; "))]
    NoneValid { path: PathBuf, reasons: Vec<String> },
}

impl CheckpointError {
    /// Returns whether an older checkpoint may be usable in place of `checkpoint`.
    pub(crate) fn rejects(&self, checkpoint: &Path) -> bool {
        matches!(self, Self::Damaged { path, .. } | Self::Read { path, .. } | Self::OtherModel { path, .. }
            if path.starts_with(checkpoint))
    }
}

/// Returns the format version of a job's checkpoints.
pub fn version(spec: &JobSpec, model: &ModelShape, has_tokenizer: bool) -> u32 {
    if spec.train.optimizer != Optimizer::AdamW || spec.lora.is_on() || !model.is_known_before_0_4() {
        VERSION
    } else if has_tokenizer {
        VERSION_WITH_TOKENIZER
    } else {
        VERSION_WITHOUT_TOKENIZER
    }
}

/// Returns the directory name of a checkpoint after `step` steps.
pub fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Returns the name of the file with the moments of rank `rank`.
fn optimizer_name(rank: usize, world: usize) -> String {
    format!("optimizer-{rank:05}-of-{world:05}.safetensors")
}

/// Parses rank and world size from the name of a file of moments.
fn parse_optimizer_name(name: &str) -> Option<(usize, usize)> {
    let (rank, world) = name.strip_prefix("optimizer-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    let parsed = (rank.parse().ok()?, world.parse().ok()?);
    (optimizer_name(parsed.0, parsed.1) == name).then_some(parsed)
}
