//! `xlaunch eval`: opens the model at a path and evaluates it.

use std::path::PathBuf;

use xlaunch_data::Tokenizer;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::model::Positions;

use super::hellaswag::{self, Score};
use super::{Held, Loss, loss};
use crate::pretrained::{Source, Target};
use xlaunch_spec::refusal::Refusal;

/// Arguments of the command line.
#[derive(Clone, Debug)]
pub struct Command {
    /// See [`Source::find`].
    pub model: PathBuf,
    /// See [`Source::with_adapter`].
    pub adapter: Option<PathBuf>,
    /// See [`Held::open`].
    pub data: Option<String>,
    /// Minimum number of tokens to evaluate; `None` evaluates all.
    pub tokens: Option<u64>,
    /// Tokens per window of the data; `None`: as many as the model's context has.
    pub seq: Option<usize>,
    /// HellaSwag questions.
    pub hellaswag: Option<PathBuf>,
    /// Device and precision.
    pub target: Target,
}

/// Results of the requested evaluations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Results {
    /// Loss on the data.
    pub loss: Option<Loss>,
    /// Score on the questions.
    pub hellaswag: Option<Score>,
}

/// Runs the command. `note` receives lines for the user; `interrupted` is polled between batches.
pub fn run(
    command: &Command,
    note: &mut dyn FnMut(&str),
    interrupted: &dyn Fn() -> bool,
) -> Result<Results, Refusal> {
    let mut source = Source::find(&command.model)?.with_adapter(command.adapter.as_deref())?;
    source.notes.iter().for_each(|line| note(line));
    let context = source.shape.seq;
    let seq = command.seq.unwrap_or(context);
    if seq > context {
        let message = format!("--seq {seq} is longer than the model's context of {context} tokens");
        return Err(Refusal::new(ExitCode::Usage, message));
    }
    // Some rotary embeddings depend on the length.
    if command.hellaswag.is_none() && source.shape.positions == Positions::Rotary {
        source.shape.seq = seq;
    }
    // Open both before reading the weights.
    let open = |data: &String| Held::open(data, &source.shape, seq, source.tokenizer.as_ref());
    let held = command.data.as_ref().map(open).transpose()?;
    let questions = command.hellaswag.as_deref().map(hellaswag::read).transpose()?;
    if questions.is_some()
        && let Some(other) = source.tokenizer.as_ref().filter(|tokenizer| !has_tokens_of_gpt2(tokenizer))
    {
        note(&format!(
            "warning: llm.c's HellaSwag files have tokens of GPT-2, and this model was trained with tokenizer `{}`",
            other.name()
        ));
    }
    // Batches of questions have several shapes; timing kernels for each shape would take longer than it saves.
    let (backend, model) = source.load_on(command.target, questions.is_none(), note, interrupted)?;
    let mut results = Results::default();
    if let Some(held) = held {
        results.loss = Some(loss(&backend, &model, &held, command.tokens, interrupted)?);
    }
    if let Some(questions) = questions {
        results.hellaswag = Some(hellaswag::score(&backend, &model, &questions, interrupted)?);
    }
    Ok(results)
}

/// Compares the ids of a sample text, as the same tokenizer may have several names.
fn has_tokens_of_gpt2(tokenizer: &Tokenizer) -> bool {
    const TEXT: &str = "A man is sitting on a roof. He's ripping up 12 of its shingles.";
    tokenizer.encode(TEXT).ok() == Tokenizer::gpt2().encode(TEXT).ok()
}
