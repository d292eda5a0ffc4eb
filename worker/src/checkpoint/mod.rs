//! Checkpoints, which are either complete or invisible.
//!
//! ```text
//! <dir>/step-00001000/
//!   model.safetensors                        parameters by name, F32
//!   optimizer-00000-of-00001.safetensors     AdamW's moments, `m.<name>` and `v.<name>`, F32
//!   state.json                               step, data position, job description
//!   manifest.json                            sizes and hashes of the files above; written last
//! ```
//! Everything is written to `.tmp-step-...`, synced, and renamed. Readers ignore a directory without a manifest that
//! matches its files. Rank 0 writes whole tensors, gathered first if they are sharded. So a run may resume with any
//! number of ranks: the data position counts the sequences of all ranks.

mod manifest;
mod read;
mod write;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xlaunch_proto::model::ModelShape;
use xlaunch_proto::spec::JobSpec;

pub use read::{Arenas, check_model, load, load_weights, newest};
pub use write::{Snapshot, prune, save};

/// Version of the directory layout above.
pub(crate) const VERSION: u32 = 1;
pub(crate) const MODEL: &str = "model.safetensors";
pub(crate) const OPTIMIZER: &str = "optimizer-00000-of-00001.safetensors";
pub(crate) const STATE: &str = "state.json";
pub(crate) const MANIFEST: &str = "manifest.json";

/// Why a checkpoint cannot be written or used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum CheckpointError {
    #[error("failed to write checkpoint {}: {reason}", path.display())]
    Write { path: PathBuf, reason: String },
    #[error("failed to read checkpoint {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("{} is not a complete checkpoint: {reason}", path.display())]
    Incomplete { path: PathBuf, reason: String },
    #[error("checkpoint {} was written by another model: {difference}", path.display())]
    OtherModel { path: PathBuf, difference: String },
    #[error("no valid checkpoint in {}", path.display())]
    None { path: PathBuf },
}

/// The contents of `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Version of the checkpoint layout.
    pub version: u32,
    /// Steps completed.
    pub step: u64,
    /// Sequences that all ranks have used.
    pub sequences: u64,
    /// World size of the run that wrote it.
    pub world_size: u32,
    /// The model's shape.
    pub model: ModelShape,
    /// The job's seed. Together with `sequences` it determines the data order.
    pub seed: u64,
    /// The job description, for information only.
    pub spec: JobSpec,
}

/// The directory name of step `step`.
pub fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a directory name.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-").filter(|digits| digits.len() >= 8)?.parse().ok()
}

/// Checkpoint directories in `dir`, newest step first, valid or not. None if `dir` does not exist.
fn list(dir: &Path) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> =
        entries.filter_map(|entry| Some((step_of(entry.file_name().to_str()?)?, entry.path()))).collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}
