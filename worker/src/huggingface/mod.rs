//! Models in Hugging Face's layout, for `xlaunch export` and for initial weights from existing models.
//!
//! ```text
//! config.json --config--> ModelShape --tensor_names--> tensors and where they are in the arena
//! DIR/*.safetensors --source--> pieces of the arena          (`checkpoint.init`)
//! checkpoint --export--> DIR: config, weights, tokenizer, model card
//! ```
//! - `families`: one table per family of the keys of `config.json`; `tensor_names`: one of the tensors; pure;
//! - `config` converts `config.json` from and to a [`ModelShape`](xlaunch_spec::model::ModelShape) by these tables:
//!   `key` and `keys` read and write single keys, `rope`, `scaling` and `layers` those that depend on each other;
//!   `unsupported` explains refused types, `without_effect` lists ignored keys; pure;
//! - `source`: reads and checks a directory; `mxfp4` decodes quantized weights, pure;
//! - for `export`: `destination` puts a whole export into place, or nothing; `writer` writes the tensors; `card` writes
//!   the text files.
//!
//! Invariants:
//! - anything that this trainer does not compute is refused by its key in `config.json`, never ignored;
//! - nothing from a file is allocated before its size is checked against the model and the file;
//! - weights that are not finite are neither exported nor accepted.

pub(crate) mod card;
pub(crate) mod config;
pub(crate) mod destination;
pub(crate) mod families;
#[cfg(test)]
mod fixtures;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzz;
mod key;
mod keys;
mod layers;
mod mxfp4;
mod rope;
mod scaling;
pub(crate) mod source;
pub(crate) mod tensor_names;
#[cfg(test)]
mod tests;
mod unsupported;
mod without_effect;
pub(crate) mod writer;

use std::path::PathBuf;

use xlaunch_spec::exit::ExitCode;

use crate::checkpoint::CheckpointError;

pub use config::TokenIds;
pub use source::Directory;
pub(crate) use source::refuse_other_weights;

/// File with all weights, unless they are split into several files.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// Index that maps tensors to files if there are several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Names in a directory with an adapter in PEFT's layout.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(crate) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Reason why a model in Hugging Face's layout cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages describe the fields")]
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
    #[error("cannot export {}: {reason}", path.display())]
    Content { path: PathBuf, reason: String },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("tokenizer {name}: {reason}")]
    Tokenizer { name: String, reason: String },
}

impl ModelError {
    /// Returns the exit code of a command that fails with this error.
    pub fn exit(&self) -> ExitCode {
        match self {
            Self::Output { .. } | Self::Content { .. } | Self::Tokenizer { .. } => ExitCode::Usage,
            _ => ExitCode::Data,
        }
    }
}
