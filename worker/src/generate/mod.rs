//! Text from a trained model.
//!
//! ```text
//! prompts --tokenizer--> requests --batch--> slots of a Decoder: prefill, then steps
//!                                              ids --sample--> next ids --text--> whole characters --> the caller
//! ```
//! - `batch`: which requests are in the cache, and the steps until each has ended;
//! - `sample`: draws a token from logits (pure); `text`: stop strings (pure); `command`: `xlaunch generate`.
//!
//! The command runs in the launcher's own process: there is one device, no process to supervise, and it ends with the
//! text. [`generate`] itself takes an open model, so that training can use it too.
//!
//! Invariants: the text of a prompt does not depend on other prompts of the batch; what is reported is whole
//! characters, and ends before a stop string.

mod batch;
mod chat;
mod command;
mod sample;
mod text;

use std::time::Duration;

use xlaunch_data::{Tokenizer, TokenizerError};
use xlaunch_proto::exit::ExitCode;

use crate::preflight::Refusal;

pub use batch::generate;
pub use command::{Command, Prompt, run};
pub use sample::Sampling;

/// How to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Most tokens per request, at least 1.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Of the random numbers.
    pub seed: u64,
    /// The text ends before any of these.
    pub stop: Vec<String>,
    /// Ids that end a text.
    pub ends: Vec<u32>,
    /// Ids that are drawn: those below.
    pub vocab: usize,
}

/// A prompt to continue once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its ids, at least one.
    pub tokens: Vec<u32>,
    /// Number of the sample of this prompt, which selects the random numbers.
    pub sample: usize,
}

impl Request {
    /// The ids of a prompt or, if it has none, the end-of-text id, as documents start with it, or a line feed.
    ///
    /// # Errors
    /// The tokenizer cannot encode a line feed.
    pub fn started(tokenizer: &Tokenizer, tokens: Vec<u32>) -> Result<Vec<u32>, TokenizerError> {
        match tokenizer.end_of_text() {
            _ if !tokens.is_empty() => Ok(tokens),
            Some(id) => Ok(vec![id]),
            None => Ok(vec![tokenizer.encode("\n")?.first().copied().unwrap_or(0)]),
        }
    }
}

/// What happens to a request.
#[derive(Debug)]
pub enum Update<'a> {
    /// A token was generated: more text, which may be empty.
    Text(&'a str),
    /// The text is complete.
    Finished(Completion),
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Number of tokens that were generated, without the end-of-text id.
    pub tokens: usize,
    /// Why it ended.
    pub reason: FinishReason,
    /// From the start of its prompt.
    pub time: Duration,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended the document.
    EndOfText,
    /// A stop string.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The model's context is full.
    Context,
    /// The prompt alone is longer than the model's context.
    PromptTooLong,
}

impl FinishReason {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::EndOfText => "end_of_text",
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Context => "context",
            Self::PromptTooLong => "prompt_too_long",
        }
    }
}

/// Why nothing more is generated.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum GenerateError {
    #[error(transparent)]
    Engine(#[from] xlaunch_engine::EngineError),
    #[error(
        "prompt {} has {tokens} tokens, but the model's context has {seq} (model.seq); shorten the prompt",
        index + 1
    )]
    PromptTooLong { index: usize, tokens: usize, seq: usize },
    #[error(
        "prompt {} contains token id {id}, but the model's vocabulary has {vocab} ids; use the tokenizer that the \
         model was trained with",
        index + 1
    )]
    Vocabulary { index: usize, id: u32, vocab: usize },
    #[error("the logits after prompt {} are not finite: the weights are damaged or the model has diverged", index + 1)]
    NotFinite { index: usize },
    #[error("interrupted")]
    Interrupted,
}

impl From<GenerateError> for Refusal {
    fn from(error: GenerateError) -> Self {
        match error {
            GenerateError::Engine(error) => crate::error::WorkerError::from(error).into(),
            GenerateError::Interrupted => Self::interrupted(),
            _ => Self { exit: ExitCode::Data, message: error.to_string() },
        }
    }
}
