//! Turns data files into batches of token ids.
//!
//! ```text
//! globs --files--> paths --source--> Tokens (one logical sequence) --split--> train, val
//! prepared directories --prepared--> shards --source--> train, val; tokenizer
//! sequence number --mixture, row_plan, order, packing--> tokens, targets, documents --loader thread--> Batch
//! ```
//! Invariant: sequence k is a pure function of (seed, k), independent of time and threads. k counts the
//! sequences of all ranks, so any number of ranks with the same global batch uses the same data in each step.

mod batch;
mod files;
mod fingerprint;
mod labels;
mod loader;
mod mixture;
mod open;
mod order;
mod packing;
mod prepared;
mod row_plan;
mod source;
mod turns;

use std::path::{Path, PathBuf};

use xlaunch_data::ManifestError;
use xlaunch_spec::job::{DataSource, DocumentMode, JobSpec, Tokenizer};
use xlaunch_spec::lineage::Fingerprint;
use xlaunch_spec::model::ModelShape;

use crate::random::mix;

pub use batch::{Batch, DocumentBounds, MicroBatch};
pub use fingerprint::fingerprint;
pub(crate) use loader::read;
pub use loader::{Loader, Schedule};
pub use mixture::{Mixture, Source, SourceUse};
pub use order::Order;
pub use packing::{Packing, PackingSummary};
pub use prepared::TokenizerSource;
pub(crate) use prepared::{Mismatch, Prepared, tokenizer_mismatch};
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
    TooShort { key: String, tokens: u64, seq: usize },
    #[error("{}: this is {what}; {remedy}", path.display())]
    Foreign { path: PathBuf, what: &'static str, remedy: &'static str },
    #[error(
        "the training data has changed during the run: it was {before}, is now {now}; restore it, or resume with \
         `--resume-changed`"
    )]
    Changed { before: String, now: String },
    #[error("{key}: {source}; prepare it, or name files, such as `DIR/*.txt`")]
    NotPrepared { key: &'static str, source: ManifestError },
    #[error("{key}: {source}")]
    ReplacementInterrupted { key: &'static str, source: ManifestError },
    #[error("{key}: the directory {} must be the only entry", dir.display())]
    SeveralSources { key: &'static str, dir: PathBuf },
    #[error(
        "model.vocab = {vocab} is below the {needed} token ids of {}; it was prepared again after the job was \
         configured",
        dir.display()
    )]
    SmallModel { dir: PathBuf, needed: usize, vocab: usize },
    #[error("{one} and {other} were prepared with different {what}: {found}")]
    Mismatch { one: String, other: String, what: &'static str, found: String },
    #[error(
        "{key}: {} is not a directory; a mixture needs directories written by `xlaunch data prepare`",
        path.display()
    )]
    NotMixable { key: &'static str, path: PathBuf },
    #[error(
        "{key}: files do not tell where documents begin, as data.documents = \"masked\" and \"packed\" require; \
         prepare them with `xlaunch data prepare`, or set data.documents = \"joined\""
    )]
    NoDocuments { key: String },
    #[error("{key}: no document has a token whose loss counts; prepare the data again")]
    NothingToTrain { key: String },
    #[error(
        "{key}: no pair of answers fits into model.seq = {seq} tokens, which both share; raise model.seq"
    )]
    NoPair { key: String, seq: usize },
    #[error(
        "{key}: {}",
        if *wanted {
            "no pairs of answers, which the job is to compare; prepare them with `xlaunch data prepare --preferences`"
        } else {
            "pairs of answers, but the job is to train on text or chats; it was prepared again after the job was \
             configured"
        }
    )]
    Pairs { key: &'static str, wanted: bool },
    #[error("{reason}")]
    Tokenizer { reason: String },
    #[error("{}: token id {id} at position {position} is not below model.vocab = {vocab}", path.display())]
    Vocabulary { path: PathBuf, id: u32, position: u64, vocab: usize },
}

/// A job's data.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Training data.
    pub train: Mixture,
    /// Evaluation data of each source: held out from the training data, or from `data.val`. Sources with less than one
    /// sequence are left out.
    pub val: Vec<HeldOut>,
    /// Tokenizer of the training data.
    pub tokenizer: TokenizerSource,
}

/// Evaluation data of one source.
#[derive(Clone, Debug)]
pub struct HeldOut {
    /// The data, a single source.
    pub rows: Mixture,
    /// Share of this source in the loss of an evaluation.
    pub share: f64,
    /// Bytes of text per token, if known.
    bytes_per_token: Option<f64>,
}

impl HeldOut {
    /// Returns this source's part of a number of sequences, rounded up.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a part of a count"
    )]
    pub(crate) fn share_of(&self, sequences: u64) -> u64 {
        if self.share < 1.0 { (sequences as f64 * self.share).ceil() as u64 } else { sequences }
    }
}

/// Tokens of a source before their rows are planned.
struct Opened {
    name: String,
    weight: f64,
    tokens: Tokens,
    bytes_per_token: Option<f64>,
}

impl Dataset {
    /// Opens the files of `[data]` and checks that the model can be trained on them.
    pub fn open(spec: &JobSpec, shape: &ModelShape) -> Result<Self, DataError> {
        let data = &spec.data;
        let (train_dirs, val_dirs) =
            (Prepared::all("data.train", &data.train)?, Prepared::all("data.val", &data.val)?);
        if let Some((first, others)) = train_dirs.split_first() {
            others.iter().chain(&val_dirs).try_for_each(|other| first.check_matches(other))?;
        }
        // Models of chats need their template.
        let prepared = train_dirs.iter().find(|dir| dir.has_chats()).or(train_dirs.first());
        let tokenizer = match (prepared, data.tokenizer) {
            (Some(prepared), _) => prepared.tokenizer(),
            (None, Tokenizer::Bytes) => TokenizerSource::Bytes,
            (None, Tokenizer::Bin) => TokenizerSource::Unknown,
        };
        let (train, val) = opened(spec, shape, &train_dirs, &val_dirs)?;
        for (key, sources) in [("data.train", &train), ("data.val", &val)] {
            let pairs = spec.dpo.is_on();
            if sources.iter().any(|source| source.tokens.labels().preferences != pairs) {
                return Err(DataError::Pairs { key, wanted: pairs });
            }
        }
        let train = mixed(spec, shape, train)?;
        let val = held_out(spec, shape, val)?;
        Ok(Self { train, val, tokenizer })
    }

    /// Returns the evaluation data of the first source that has any.
    pub fn held_out(&self) -> Option<&HeldOut> {
        self.val.first()
    }

    /// Describes the evaluation data, if there is any.
    pub fn val_fingerprint(&self) -> Result<Option<Fingerprint>, DataError> {
        let sources = self.val.iter().flat_map(|val| val.rows.sources().iter().map(|it| (it, val.share)));
        if self.val.is_empty() { Ok(None) } else { mixture::fingerprint_of(sources).map(Some) }
    }

    /// Converts a loss on the evaluation data, in nats per token, to bits per byte of its text; `None` if that is
    /// unknown, or if there are several sources.
    pub fn bits_per_byte(&self, loss: f64) -> Option<f64> {
        let [held_out] = &*self.val else { return None };
        Some(loss / std::f64::consts::LN_2 / held_out.bytes_per_token?)
    }
}

/// Opens the tokens of all sources, to train on and to evaluate.
fn opened(
    spec: &JobSpec,
    shape: &ModelShape,
    train_dirs: &[Prepared],
    val_dirs: &[Prepared],
) -> Result<(Vec<Opened>, Vec<Opened>), DataError> {
    let data = &spec.data;
    let bytes_per_token = (data.tokenizer == Tokenizer::Bytes).then_some(1.0);
    let of_files = |tokens| Opened { name: String::new(), weight: 1.0, tokens, bytes_per_token };
    let from = |dirs: &[Prepared], open: &dyn Fn(&Prepared) -> Result<Tokens, DataError>| {
        let names = prepared::names(dirs);
        let opened = dirs.iter().zip(names).map(|(dir, name)| {
            let (tokens, bytes_per_token) = (open(dir)?, dir.val_bytes_per_token());
            Ok(Opened { name, weight: dir.weight(), tokens, bytes_per_token })
        });
        opened.collect::<Result<Vec<_>, DataError>>()
    };
    let val_of = |dirs: &[Prepared]| from(dirs, &|dir| dir.val(shape.vocab));
    let (train, rest) = match train_dirs {
        [] => {
            let files = files(spec, shape, "data.train", &data.train)?;
            if data.val.is_empty() {
                let (train, rest) = files.split(data.val_fraction);
                (vec![of_files(train)], Some(rest))
            } else {
                (vec![of_files(files)], None)
            }
        }
        dirs => (from(dirs, &|dir| dir.train(shape.vocab))?, None),
    };
    let val = match (val_dirs, rest) {
        ([], Some(rest)) => vec![of_files(rest)],
        ([], None) if data.val.is_empty() => val_of(train_dirs)?,
        ([], None) => vec![of_files(files(spec, shape, "data.val", &data.val)?)],
        (dirs, _) => val_of(dirs)?,
    };
    Ok((train, val))
}

/// Returns the number of tokens that rows need.
fn needed(spec: &JobSpec, shape: &ModelShape) -> u64 {
    // Packed rows need at least one document with something to predict.
    if spec.data.documents() == DocumentMode::Packed { 2 } else { shape.seq as u64 + 1 }
}

/// Returns the key of a source for errors, with its name in a mixture.
fn key_of(key: &str, sources: usize, name: &str) -> String {
    if sources > 1 { format!("{key}: {name}") } else { key.into() }
}

/// Plans the rows to train on.
fn mixed(spec: &JobSpec, shape: &ModelShape, opened: Vec<Opened>) -> Result<Mixture, DataError> {
    let (count, weights) = (opened.len(), opened.iter().map(|source| source.weight).collect::<Vec<_>>());
    let sources = (0..).zip(opened).map(|(index, Opened { name, tokens, .. })| {
        let key = key_of("data.train", count, &name);
        if tokens.len() < needed(spec, shape) {
            return Err(DataError::TooShort { key, tokens: tokens.len(), seq: shape.seq });
        }
        // Sources of equal size are in different orders.
        let seed = if index == 0 { spec.job.seed } else { mix(spec.job.seed ^ mix(index)) };
        let seed = spec.data.shuffle.then_some(seed);
        let plan = RowPlan::train(&tokens, &key, spec.data.documents(), shape.seq, seed)?;
        Ok(Source { name, tokens, plan })
    });
    Ok(Mixture::new(sources.collect::<Result<_, _>>()?, &weights))
}

/// Plans the rows to evaluate. Without `data.val`, sources that are too short are left out.
fn held_out(spec: &JobSpec, shape: &ModelShape, opened: Vec<Opened>) -> Result<Vec<HeldOut>, DataError> {
    let (count, mut val, mut total) = (opened.len(), Vec::new(), 0.0);
    for Opened { name, weight, tokens, bytes_per_token } in opened {
        let key = key_of("data.val", count, &name);
        if tokens.len() < needed(spec, shape) {
            if spec.data.val.is_empty() {
                continue;
            }
            return Err(DataError::TooShort { key, tokens: tokens.len(), seq: shape.seq });
        }
        let plan = RowPlan::evaluation(&tokens, &key, spec.data.documents(), shape.seq)?;
        let rows = Mixture::new(vec![Source { name, tokens, plan }], &[weight]);
        val.push(HeldOut { rows, share: weight, bytes_per_token });
        total += weight;
    }
    val.iter_mut().for_each(|held_out| held_out.share /= total);
    Ok(val)
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
    sources: &[DataSource],
) -> Result<Tokens, DataError> {
    let skip = PathBuf::from(&spec.job.output);
    let patterns: Vec<String> = sources.iter().map(|source| source.path.clone()).collect();
    source::open(&files::matching(key, &patterns, &skip)?, spec.data.tokenizer, shape.vocab)
}
