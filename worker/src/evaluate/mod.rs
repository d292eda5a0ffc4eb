//! `xlaunch eval`: measures how well a trained model predicts text that it has not seen.
//!
//! The loss is the mean over consecutive windows, by default of the length of the model's context, from the start of
//! the data, as during training. Bits per byte of text make models with different tokenizers comparable.
//!
//! It runs in the launcher's own process, like [`crate::generate`].

mod command;
pub mod hellaswag;

use std::path::Path;

use xlaunch_data::Tokenizer;
use xlaunch_engine::{DType, Documents, EngineError, IGNORED};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::{DocumentMode, Tokenizer as Format};
use xlaunch_spec::model::ModelShape;

use crate::data::{self, Batch, DataError, Mismatch, Mixture, Order, Prepared, RowPlan, Schedule, Tokens};
use crate::error::WorkerError;
use crate::model::{BackendHandle, Model, Rows};
use xlaunch_spec::refusal::Refusal;

pub use command::{Command, Results, run};

/// Maximum number of tokens per batch.
const BATCH_TOKENS: usize = 8192;

/// Held-out data.
#[derive(Debug)]
pub struct Held {
    rows: Mixture,
    /// Tokens per window.
    seq: usize,
    /// Bytes of text per token, if known.
    bytes_per_token: Option<f64>,
}

/// The loss on held-out data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// Mean loss per token, in nats.
    pub loss: f64,
    /// Number of predicted tokens.
    pub tokens: u64,
    /// Loss in bits per byte of text; `None` if the data has no text.
    pub bits_per_byte: Option<f64>,
}

impl Held {
    /// Opens the validation split of a prepared directory, or files: text for a byte-level model, otherwise token
    /// files. Windows have `seq` tokens.
    pub fn open(
        data: &str,
        shape: &ModelShape,
        seq: usize,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Self, Refusal> {
        let held = if Path::new(data).is_dir() {
            Self::prepared(data, shape, seq, tokenizer)?
        } else {
            let is_bytes = tokenizer.is_some_and(|tokenizer| tokenizer.name() == Tokenizer::bytes().name());
            let format = if is_bytes { Format::Bytes } else { Format::Bin };
            let remedy = if is_bytes {
                "this model reads text, byte by byte"
            } else {
                "prepare text with `xlaunch data prepare --tokenizer MODEL`, and name the directory it writes"
            };
            let tokens =
                data::open_files("--data", data, format, shape.vocab).map_err(|error| match error {
                    // Other remedies are keys of a job.
                    DataError::Foreign { path, what, .. } => {
                        WorkerError::from(DataError::Foreign { path, what, remedy })
                    }
                    other => other.into(),
                })?;
            check_length(&tokens, seq)?;
            let order = Order::new(tokens.len(), seq, None);
            Self { rows: (tokens, order).into(), seq, bytes_per_token: is_bytes.then_some(1.0) }
        };
        Ok(held)
    }

    fn prepared(
        dir: &str,
        shape: &ModelShape,
        seq: usize,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Self, Refusal> {
        let refused = |message: String| Refusal { exit: ExitCode::Data, message };
        let data = |error: DataError| Refusal::from(WorkerError::from(error));
        let prepared = Prepared::open("--data", dir, 1.0).map_err(data)?;
        if prepared.has_preferences() {
            return Err(refused(format!(
                "{dir} has pairs of answers, which only training on preferences compares: name text or chats"
            )));
        }
        if let (Some(theirs), Some(own)) = (prepared.tokenizer().load().map_err(data)?, tokenizer) {
            let mismatch = data::tokenizer_mismatch(&format!("{dir} was prepared with"), &theirs, own);
            if let Some(Mismatch::Rules(message) | Mismatch::Ids(message)) = mismatch {
                return Err(refused(message));
            }
        }
        let tokens = prepared.val(shape.vocab).map_err(data)?;
        if tokens.is_empty() {
            return Err(refused(format!("{dir} has no validation data: prepare it with `--val`")));
        }
        let mode = prepared.default_documents();
        if mode != DocumentMode::Packed {
            check_length(&tokens, seq)?;
        }
        let plan = RowPlan::evaluation(&tokens, "--data", mode, seq).map_err(data)?;
        Ok(Self { rows: (tokens, plan).into(), seq, bytes_per_token: prepared.val_bytes_per_token() })
    }
}

/// Checks that there is a window of `seq` tokens and a target.
fn check_length(tokens: &Tokens, seq: usize) -> Result<(), Refusal> {
    let tokens = tokens.len();
    if tokens > seq as u64 {
        return Ok(());
    }
    let message = format!(
        "--data has {tokens} tokens, fewer than a window of {seq} and the token after it: set a lower `--seq`"
    );
    Err(Refusal { exit: ExitCode::Data, message })
}

/// Computes the loss over all windows or, with `limit`, over as many of the first windows as are needed for that number
/// of tokens.
pub fn loss(
    backend: &BackendHandle,
    model: &Model,
    held: &Held,
    limit: Option<u64>,
    interrupted: &dyn Fn() -> bool,
) -> Result<Loss, Refusal> {
    let seq = held.seq;
    let wanted = limit.map_or(u64::MAX, |tokens| tokens.div_ceil(seq as u64));
    let windows = held.rows.rows().min(wanted);
    let batch = (BATCH_TOKENS / seq).clamp(1, usize::try_from(windows).unwrap_or(usize::MAX));
    let schedule = Schedule { first: 0, rank: 0, world: 1, batch, accumulate: 1, seq };
    let (mut total, mut tokens, mut done) = (0.0, 0, 0);
    for round in 0..windows.div_ceil(batch as u64) {
        if interrupted() {
            return Err(Refusal::interrupted());
        }
        let read = data::read(&held.rows, schedule, round).map_err(WorkerError::from)?;
        let losses = losses(backend, model, [batch, seq], &read).map_err(WorkerError::from)?;
        // Windows past the end repeat others; this occurs only in the last batch.
        let count = (windows - done).min(batch as u64);
        let counted = usize::try_from(count).unwrap_or(usize::MAX) * seq;
        total += losses[..counted].iter().copied().map(f64::from).sum::<f64>();
        tokens += read.targets[..counted].iter().filter(|target| **target != IGNORED).count() as u64;
        done += count;
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of tokens")]
    let loss = total / tokens as f64;
    if !loss.is_finite() {
        let message = format!("the loss is {loss}: the weights are damaged or the model has diverged");
        return Err(Refusal { exit: ExitCode::Data, message });
    }
    let bits_per_byte = held.bytes_per_token.map(|bytes| loss / std::f64::consts::LN_2 / bytes);
    Ok(Loss { loss, tokens, bits_per_byte })
}

/// Computes the loss of every token of a batch.
fn losses(
    backend: &BackendHandle,
    model: &Model,
    [batch, seq]: [usize; 2],
    Batch { tokens, targets, documents }: &Batch,
) -> Result<Vec<f32>, EngineError> {
    let write = |values: &[i32]| {
        let tensor = backend.alloc(DType::I32, values.len())?;
        backend.write_i32(tensor.all(), values)?;
        Ok::<_, EngineError>(tensor)
    };
    let (tokens, targets) = (write(tokens)?, write(targets)?);
    let bounds = documents.as_ref().map(|it| Ok::<_, EngineError>([write(&it.first)?, write(&it.last)?]));
    let bounds = bounds.transpose()?;
    let documents = bounds.as_ref().map(|[first, last]| Documents { first: first.all(), last: last.all() });
    let rows = Rows { batch, seq, documents };
    let losses = backend.alloc(DType::F32, rows.count())?;
    let output = model.output(rows, tokens.all())?;
    model.loss(&output, targets.all(), losses.all())?;
    let mut values = vec![0.0; losses.len()];
    backend.read_f32(losses.all(), &mut values)?;
    Ok(values)
}
