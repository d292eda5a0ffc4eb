//! From data files to batches of token ids.
//!
//! ```text
//! globs --files--> paths --source--> Tokens (one logical sequence) --split--> train, val
//! sequence number --order--> window of the tokens --loader thread--> Batch, read ahead
//! ```
//! Invariant: the window of sequence k is a pure function of (seed, k), independent of time and threads. k counts the
//! sequences of all ranks, so any number of ranks with the same global batch sees the same data in each step.

mod files;
mod fingerprint;
mod loader;
mod order;
mod source;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xlaunch_proto::model::ModelShape;
use xlaunch_proto::spec::{JobSpec, Tokenizer};

pub use fingerprint::Fingerprint;
pub(crate) use loader::read;
pub use loader::{Batch, Loader, Schedule};
pub use order::Order;
pub use source::Tokens;
pub(crate) use source::open as open_tokens;

/// Why data cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum DataError {
    #[error("{key}: no file matches `{patterns}`")]
    NoFiles { key: &'static str, patterns: String },
    #[error("{key}: `{pattern}` is not a valid glob: {reason}")]
    Glob { key: &'static str, pattern: String, reason: String },
    #[error("failed to read {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("{}: {problem}", path.display())]
    Format { path: PathBuf, problem: String },
    #[error(
        "{key}: {tokens} tokens, but model.seq = {seq} needs at least {}; add data or lower model.seq",
        seq + 1
    )]
    TooShort { key: &'static str, tokens: u64, seq: usize },
    #[error("{}: token id {id} at position {position} is not below model.vocab = {vocab}", path.display())]
    Vocabulary { path: PathBuf, id: u32, position: u64, vocab: usize },
}

/// A job's data.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Training data.
    pub train: Arc<Tokens>,
    /// Evaluation data: held out of the training data, or from `data.val`. `None` if it is shorter than one sequence.
    pub val: Option<Arc<Tokens>>,
}

impl Dataset {
    /// Opens the files of `[data]` and checks that the model can be trained on them.
    pub fn open(spec: &JobSpec, shape: &ModelShape) -> Result<Self, DataError> {
        let data = &spec.data;
        let skip = PathBuf::from(&spec.job.output);
        let open = |key, patterns: &[String]| {
            let files = files::matching(key, patterns, &skip)?;
            source::open(&files, data.tokenizer, shape.vocab)
        };
        let all = open("data.train", &data.train)?;
        let (train, val) = if data.val.is_empty() {
            all.split(data.val_fraction)
        } else {
            (all, open("data.val", &data.val)?)
        };
        let needed = shape.seq as u64 + 1;
        if train.len() < needed {
            return Err(DataError::TooShort { key: "data.train", tokens: train.len(), seq: shape.seq });
        }
        if !data.val.is_empty() && val.len() < needed {
            return Err(DataError::TooShort { key: "data.val", tokens: val.len(), seq: shape.seq });
        }
        let val = (val.len() >= needed).then(|| Arc::new(val));
        Ok(Self { train: Arc::new(train), val })
    }
}

/// Opens the files that match a glob, relative to the working directory, outside of a job.
pub(crate) fn open_files(
    key: &'static str,
    pattern: &str,
    tokenizer: Tokenizer,
    vocab: usize,
) -> Result<Tokens, DataError> {
    let absolute = std::path::absolute(pattern)
        .map_err(|error| DataError::Read { path: pattern.into(), reason: error.to_string() })?;
    let files = files::matching(key, &[absolute.to_string_lossy().into_owned()], Path::new(""))?;
    source::open(&files, tokenizer, vocab)
}
