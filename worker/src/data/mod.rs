//! Turns data files into batches of token ids.
//!
//! ```text
//! globs --files--> paths --source--> Tokens (one logical sequence) --split--> train, val
//! prepared directory --prepared--> shards --source--> train, val; tokenizer
//! sequence number --row_plan, order, packing--> tokens, targets, documents --loader thread--> Batch, read ahead
//! ```
//! Invariant: sequence k is a pure function of (seed, k), independent of time and threads. k counts the
//! sequences of all ranks, so any number of ranks with the same global batch uses the same data in each step.

mod batch;
mod files;
mod fingerprint;
mod foreign;
mod labels;
mod loader;
mod open;
mod order;
mod packing;
mod prepared;
mod row_plan;
mod source;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xlaunch_data::ManifestError;
use xlaunch_spec::job::{DocumentMode, JobSpec, Tokenizer};
use xlaunch_spec::model::ModelShape;

pub use batch::{Batch, DocumentBounds, MicroBatch};
pub use fingerprint::fingerprint;
pub(crate) use loader::read;
pub use loader::{Loader, Schedule};
pub use order::Order;
pub use packing::{Packing, PackingSummary};
pub use prepared::TokenizerSource;
pub(crate) use prepared::{MAX_TOKENIZER_BYTES, Prepared};
pub use row_plan::{RowPlan, Starts};
pub use source::Tokens;
#[cfg(feature = "fuzzing")]
pub(crate) use source::open as open_tokens;

/// Reason why data cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages describe the fields")]
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
    #[error("{}: this is {what}; {remedy}", path.display())]
    Foreign { path: PathBuf, what: &'static str, remedy: &'static str },
    #[error(
        "the training data has changed during the run: it was {before}, is now {now}; restore it, or resume with \
         `--resume-changed`"
    )]
    Changed { before: String, now: String },
    #[error("{key}: {source}; run it, or name files, such as `DIR/*.txt`")]
    NotPrepared { key: &'static str, source: ManifestError },
    #[error("{key}: the directory {} must be the only entry", dir.display())]
    SeveralSources { key: &'static str, dir: PathBuf },
    #[error(
        "model.vocab = {vocab} is below the {needed} token ids of {}; it was prepared again after the job was \
         configured",
        dir.display()
    )]
    SmallModel { dir: PathBuf, needed: usize, vocab: usize },
    #[error(
        "data.train {} and data.val {} were prepared with different tokenizers: {tokenizers}",
        train.display(), val.display()
    )]
    Tokenizers { train: PathBuf, val: PathBuf, tokenizers: String },
    #[error(
        "{key}: files do not tell where documents begin, as data.documents = \"masked\" and \"packed\" require; \
         prepare them with `xlaunch data prepare`, or set data.documents = \"joined\""
    )]
    NoDocuments { key: &'static str },
    #[error("{key}: no document has a token whose loss counts; prepare the data again")]
    NothingToTrain { key: &'static str },
    #[error("{reason}")]
    Tokenizer { reason: String },
    #[error("{}: token id {id} at position {position} is not below model.vocab = {vocab}", path.display())]
    Vocabulary { path: PathBuf, id: u32, position: u64, vocab: usize },
}

/// A job's data.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Training data.
    pub train: Arc<Tokens>,
    /// Evaluation data: held out from the training data, or from `data.val`. `None` if it is shorter than one sequence.
    pub val: Option<Arc<Tokens>>,
    /// Rows of the training data.
    pub train_rows: RowPlan,
    /// Rows of the evaluation data, if there is any.
    pub val_rows: Option<RowPlan>,
    /// Tokenizer of the training data.
    pub tokenizer: TokenizerSource,
    /// Bytes of text per token of the evaluation data, if known.
    val_bytes_per_token: Option<f64>,
}

impl Dataset {
    /// Opens the files of `[data]` and checks that the model can be trained on them.
    pub fn open(spec: &JobSpec, shape: &ModelShape) -> Result<Self, DataError> {
        let data = &spec.data;
        let prepared = Prepared::of("data.train", &data.train)?;
        let tokenizer = match (&prepared, data.tokenizer) {
            (Some(prepared), _) => prepared.tokenizer(),
            (None, Tokenizer::Bytes) => TokenizerSource::Bytes,
            (None, Tokenizer::Bin) => TokenizerSource::Unknown,
        };
        let train = match &prepared {
            Some(prepared) => prepared.train(shape.vocab)?,
            None => files(spec, shape, "data.train", &data.train)?,
        };
        let in_files = (data.tokenizer == Tokenizer::Bytes).then_some(1.0);
        let (train, val, val_bytes_per_token) = match (&prepared, Prepared::of("data.val", &data.val)?) {
            (of_train, Some(val)) => {
                of_train.as_ref().map_or(Ok(()), |train| train.check_same_tokenizer(&val))?;
                (train, val.val(shape.vocab)?, val.val_bytes_per_token())
            }
            (Some(of_train), None) if data.val.is_empty() => {
                (train, of_train.val(shape.vocab)?, of_train.val_bytes_per_token())
            }
            (None, None) if data.val.is_empty() => {
                let (train, val) = train.split(data.val_fraction);
                (train, val, in_files)
            }
            (_, None) => (train, files(spec, shape, "data.val", &data.val)?, in_files),
        };
        let mode = data.documents();
        // Packed rows need at least one document with something to predict.
        let needed = if mode == DocumentMode::Packed { 2 } else { shape.seq as u64 + 1 };
        if train.len() < needed {
            return Err(DataError::TooShort { key: "data.train", tokens: train.len(), seq: shape.seq });
        }
        if !data.val.is_empty() && val.len() < needed {
            return Err(DataError::TooShort { key: "data.val", tokens: val.len(), seq: shape.seq });
        }
        let seed = data.shuffle.then_some(spec.job.seed);
        let train_rows = RowPlan::train(&train, mode, shape.seq, seed)?;
        let val = (val.len() >= needed).then(|| Arc::new(val));
        let val_rows = val.as_ref().map(|val| RowPlan::evaluation(val, mode, shape.seq)).transpose()?;
        Ok(Self { train: Arc::new(train), val, train_rows, val_rows, tokenizer, val_bytes_per_token })
    }

    /// Returns the number of positions of an epoch in rows of `seq` tokens, padding included.
    pub fn epoch_tokens(&self, seq: usize) -> u64 {
        match self.train_rows {
            RowPlan::Packed(_) => self.train_rows.rows() * seq as u64,
            RowPlan::Joined(_) | RowPlan::Masked(..) => self.train.len(),
        }
    }

    /// Returns the evaluation data and its rows, if there is any.
    pub fn held_out(&self) -> Option<(&Tokens, &RowPlan)> {
        self.val.as_deref().zip(self.val_rows.as_ref())
    }

    /// Converts a loss on the evaluation data, in nats per token, to bits per byte of its text; `None` if that is
    /// unknown.
    pub fn bits_per_byte(&self, loss: f64) -> Option<f64> {
        Some(loss / std::f64::consts::LN_2 / self.val_bytes_per_token?)
    }
}

/// Opens the files that match a glob relative to the working directory, independently of a job.
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

/// Opens the tokens of files.
fn files(
    spec: &JobSpec,
    shape: &ModelShape,
    key: &'static str,
    patterns: &[String],
) -> Result<Tokens, DataError> {
    let skip = PathBuf::from(&spec.job.output);
    source::open(&files::matching(key, patterns, &skip)?, spec.data.tokenizer, shape.vocab)
}
