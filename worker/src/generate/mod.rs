//! Text from a trained model.
//!
//! ```text
//! prompts --settings--> requests --batch--> slots of a Decoder: prefill, then steps
//!                                    ids --sample--> next ids --text--> whole characters --> the caller
//! ```
//! - `batch`: runs steps of a batch that requests join and leave, as decided by `schedule` (pure); `sequence`: one of
//!   its texts;
//! - `sample`: draws a token from logits (pure); `score`: log-probabilities (pure); `text`: stop strings (pure);
//! - `settings`: what the files of a model say about prompts, ends of texts and sampling;
//! - `command`: `xlaunch generate`. `xlaunch serve` is in [`crate::serve`].
//!
//! The command runs in the launcher's own process: there is one device, no process to supervise, and the process ends
//! with the text. Training samples with the same [`Decoder`](crate::model::decode::Decoder) and [`Draw`].
//!
//! Invariants: the text of a prompt does not depend on other prompts of the batch; reported text consists of whole
//! characters, and ends before a stop string.

mod batch;
mod command;
mod sample;
mod schedule;
mod score;
mod sequence;
mod settings;
mod text;

use std::sync::Arc;
use std::time::Duration;

use xlaunch_spec::exit::ExitCode;

use xlaunch_spec::refusal::Refusal;

pub use batch::{Batch, Prefill};
pub use command::{Command, run};
pub(crate) use sample::Draw;
pub use sample::Sampling;
pub use score::Scored;
pub use sequence::{Output, Token};
pub use settings::{Prompt, SamplingOverrides, Settings};

/// Settings of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Maximum number of tokens; with 0, only the prompt is computed.
    pub max_tokens: usize,
    /// Settings for choosing tokens.
    pub sampling: Sampling,
    /// Seed of the random numbers.
    pub seed: u64,
    /// The text ends before any of these.
    pub stop: Vec<String>,
    /// Number of most likely tokens whose log-probabilities are reported in addition to that of each token; `None`
    /// reports no log-probabilities.
    pub scores: Option<usize>,
    /// The caller repeats the prompt before the text: the prompt's tokens are scored as well, and a character that the
    /// prompt does not complete is part of the text.
    pub echo: bool,
}

/// The ids that a model may generate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// Only ids below this are drawn.
    pub size: usize,
    /// Ids that end a text.
    pub ends: Vec<u32>,
}

/// A prompt to continue once.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Token ids of the prompt, at least one.
    pub tokens: Arc<[u32]>,
    /// Number of the sample among those of this prompt; selects the random numbers.
    pub sample: usize,
    pub options: Arc<Options>,
}

impl Request {
    fn scores_prompt(&self) -> bool {
        self.options.scores.is_some() && self.options.echo
    }
}

/// Progress of a request.
#[derive(Debug)]
pub enum Update<'a> {
    /// A token was generated. Its additional text may be empty.
    Text(&'a str),
    /// The text is complete.
    Finished(Completion),
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Number of generated tokens, without the end-of-text id.
    pub tokens: usize,
    /// The reason why the text ended.
    pub reason: FinishReason,
    /// Time since the start of its prompt.
    pub time: Duration,
}

/// Reason why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended the document.
    EndOfText,
    /// A stop string was generated.
    Stop,
    /// The requested number of tokens was reached.
    Length,
    /// The model's context is full.
    Context,
    /// The prompt alone is longer than the model's context.
    PromptTooLong,
}

impl FinishReason {
    /// Returns the name in JSON.
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

/// Reason why generation failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages describe the fields")]
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
