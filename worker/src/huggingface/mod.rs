//! Models in Hugging Face's layout: `xlaunch export`, and initial weights from the models of others.
//!
//! ```text
//! config.json --config--> ModelShape --names--> tensors and where they are in the arena
//! DIR/*.safetensors --source--> pieces of the arena          (`checkpoint.init`)
//! checkpoint --export--> DIR: config, weights, tokenizer, model card
//! ```
//! - `config`: `config.json` from and to a [`ModelShape`](xlaunch_proto::model::ModelShape), with `keys`; pure;
//! - `names`: names and shapes of tensors; pure;
//! - `source`: reads and checks a directory;
//! - [`export`]: writes one; `destination`: its place, which holds a whole export or none; `writer`: its tensors;
//!   `card`: its texts.
//!
//! Invariants:
//! - what this trainer does not compute is refused by its key in `config.json`, never ignored;
//! - nothing from a file is allocated before its size is checked against the model and the file;
//! - weights that are not finite are neither exported nor accepted.

mod card;
mod config;
mod destination;
pub mod export;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod keys;
mod names;
mod source;
#[cfg(test)]
mod tests;
mod writer;

use std::path::PathBuf;

use xlaunch_proto::exit::ExitCode;

use crate::checkpoint::CheckpointError;

pub use config::TokenIds;
pub use source::Directory;

/// All weights, unless they are in several files.
const WEIGHTS: &str = "model.safetensors";
/// Which of several files has which tensor.
const INDEX: &str = "model.safetensors.index.json";

/// Why a model in Hugging Face's layout cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum ModelError {
    #[error("failed to read {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("{}: `{key}`: {problem}", path.display())]
    Config { path: PathBuf, key: String, problem: String },
    #[error("{}: tensor {name}: {problem}", path.display())]
    Tensor { path: PathBuf, name: String, problem: String },
    #[error("failed to export to {}: {reason}", path.display())]
    Write { path: PathBuf, reason: String },
    #[error("cannot export to {}: {reason}", path.display())]
    Output { path: PathBuf, reason: String },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("tokenizer {name}: {reason}")]
    Tokenizer { name: String, reason: String },
}

impl ModelError {
    /// What a command exits with.
    pub fn exit(&self) -> ExitCode {
        match self {
            Self::Output { .. } | Self::Tokenizer { .. } => ExitCode::Usage,
            _ => ExitCode::Data,
        }
    }
}
