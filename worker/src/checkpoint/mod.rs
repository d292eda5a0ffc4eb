//! Checkpoints: complete or invisible.
//!
//! ```text
//! <dir>/step-00001000/
//!   model.safetensors                        parameters by name, F32
//!   optimizer-00000-of-00001.safetensors     AdamW's moments, `m.<name>` and `v.<name>`, F32
//!   state.json                               step, data position, job description
//!   manifest.json                            sizes and hashes of the files above; written last
//! ```
//! Everything is written into `.tmp-step-...`, synced, and renamed. A directory without a manifest that matches its files
//! does not exist for any reader. Rank 0 writes whole tensors for all, collected first where each rank holds a share of
//! them, and a run may resume with any number of ranks: the data position counts sequences, whoever read them.

mod manifest;
mod read;
mod write;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xlaunch_proto::model::ModelShape;
use xlaunch_proto::spec::JobSpec;

pub use read::{Arenas, check_model, load, load_weights, newest};
pub use write::{Snapshot, prune, save};

/// Version of the layout above.
pub(crate) const VERSION: u32 = 1;
pub(crate) const MODEL: &str = "model.safetensors";
pub(crate) const OPTIMIZER: &str = "optimizer-00000-of-00001.safetensors";
pub(crate) const STATE: &str = "state.json";
pub(crate) const MANIFEST: &str = "manifest.json";

/// A checkpoint that cannot be written or used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum CheckpointError {
    #[error("failed to write checkpoint {}: {reason}", path.display())]
    Write { path: PathBuf, reason: String },
    #[error("failed to read checkpoint {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("{} is not a complete checkpoint: {reason}", path.display())]
    Incomplete { path: PathBuf, reason: String },
    #[error("checkpoint {} is of another model: {difference}", path.display())]
    OtherModel { path: PathBuf, difference: String },
    #[error("no valid checkpoint in {}", path.display())]
    None { path: PathBuf },
}

/// What `state.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Version of the checkpoint layout.
    pub version: u32,
    /// Steps completed.
    pub step: u64,
    /// Sequences that all ranks have used.
    pub sequences: u64,
    /// Ranks that ran.
    pub world_size: u32,
    /// Sizes of the model.
    pub model: ModelShape,
    /// The job's seed: data order, with `sequences`, is a function of it.
    pub seed: u64,
    /// The job description, for the reader's information.
    pub spec: JobSpec,
}

/// Name of the directory of step `step`.
pub fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step that a directory name stands for.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-").filter(|digits| digits.len() >= 8)?.parse().ok()
}

/// Checkpoint directories in `dir` by falling step, valid or not. A directory that is not there has none.
fn list(dir: &Path) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> =
        entries.filter_map(|entry| Some((step_of(entry.file_name().to_str()?)?, entry.path()))).collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}
