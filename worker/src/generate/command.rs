//! `xlaunch generate`: opens the model at a path, and continues prompts with the settings in the model's files.

use std::path::PathBuf;
use std::time::Duration;

use xlaunch_data::chat::{TEMPLATE_TOKENS, Template};
use xlaunch_data::{Tokenizer, TokenizerError};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::Precision;

use super::{Completion, FinishReason, GenerateError, Options, Request, Sampling, Update, generate};
use crate::inherited::Inherited;
use crate::pretrained::{self, Device, Source};
use xlaunch_spec::refusal::Refusal;

/// Number of tokens to draw from if a directory does not set it; the default of Python's `transformers`.
const DEFAULT_TOP_K: usize = 50;

/// Arguments of the command line.
#[derive(Clone, Debug)]
pub struct Command {
    /// See [`Source::find`].
    pub model: PathBuf,
    /// See [`Source::with_adapter`].
    pub adapter: Option<PathBuf>,
    /// See [`Source::tokenizer`].
    pub tokenizer: Option<String>,
    /// Prompts to continue.
    pub prompts: Vec<Prompt>,
    /// Number of samples per prompt.
    pub samples: usize,
    /// True to take prompts as plain text, and to ignore the generation settings in the model's directory.
    pub raw: bool,
    /// Maximum number of tokens per text.
    pub max_tokens: usize,
    /// Overrides the setting in the model's directory.
    pub temperature: Option<f64>,
    /// See `temperature`.
    pub top_k: Option<usize>,
    /// See `temperature`.
    pub top_p: Option<f64>,
    /// Seed of the random numbers.
    pub seed: u64,
    /// The text ends before any of these.
    pub stop: Vec<String>,
    /// Device to compute on.
    pub device: Device,
    /// Precision on a GPU.
    pub precision: Precision,
}

/// A prompt to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Plain text.
    Text(String),
    /// A list of messages, which the model's chat template turns into a text.
    Chat(serde_json::Value),
}

/// Runs the command. `note` receives lines for the user, `sink` the updates with the numbers of prompt and sample.
pub fn run(
    command: &Command,
    interrupted: &dyn Fn() -> bool,
    note: &mut dyn FnMut(&str),
    sink: &mut dyn FnMut(usize, usize, Update<'_>),
) -> Result<(), Refusal> {
    let source = Source::find(&command.model)?.with_adapter(command.adapter.as_deref())?;
    source.notes.iter().for_each(|line| note(line));
    let tokenizer = source.tokenizer(command.tokenizer.as_deref())?;
    let options = options(command, &source, &tokenizer, note);
    let mut prompts = Vec::new();
    for (index, prompt) in command.prompts.iter().enumerate() {
        prompts.push(tokens(command, &source, &tokenizer, prompt).map_err(|reason| Refusal {
            exit: ExitCode::Data,
            message: format!("prompt {}: {reason}", index + 1),
        })?);
    }
    let fits = skip_long(&prompts, source.shape.seq, note)?;
    let samples = command.samples.max(1);
    let long = (0..prompts.len()).filter(|index| !fits.contains(index));
    for (prompt, sample) in long.flat_map(|prompt| (0..samples).map(move |sample| (prompt, sample))) {
        let (reason, time) = (FinishReason::PromptTooLong, Duration::ZERO);
        sink(prompt, sample, Update::Finished(Completion { tokens: 0, reason, time }));
    }
    let of_prompt = |prompt: &usize| {
        let tokens = &prompts[*prompt];
        (0..samples).map(move |sample| Request { tokens: tokens.clone(), sample })
    };
    let requests: Vec<Request> = fits.iter().flat_map(of_prompt).collect();
    let backend = pretrained::open_device(command.device, command.precision, false)?;
    let model = source.load(&backend, interrupted)?;
    let mut by_sample =
        |request: usize, update: Update<'_>| sink(fits[request / samples], request % samples, update);
    Ok(generate(&model, &tokenizer, &requests, &options, interrupted, &mut by_sample)?)
}

/// Returns the prompts that fit the model's context, and names the others to the user.
///
/// # Errors
/// If no prompt fits.
fn skip_long(prompts: &[Vec<u32>], seq: usize, note: &mut dyn FnMut(&str)) -> Result<Vec<usize>, Refusal> {
    let (fits, long): (Vec<usize>, Vec<usize>) =
        (0..prompts.len()).partition(|index| prompts[*index].len() <= seq);
    let error = |index: usize| GenerateError::PromptTooLong { index, tokens: prompts[index].len(), seq };
    match long.first().filter(|_| fits.is_empty()) {
        Some(index) => Err(error(*index).into()),
        None => {
            long.iter().for_each(|index| note(&format!("warning: skipped: {}", error(*index))));
            Ok(fits)
        }
    }
}

/// Returns the ids of a prompt. An error is the reason.
fn tokens(
    command: &Command,
    source: &Source,
    tokenizer: &Tokenizer,
    prompt: &Prompt,
) -> Result<Vec<u32>, String> {
    let failed = |error: TokenizerError| error.to_string();
    let tokens = match prompt {
        Prompt::Text(text) if command.raw => tokenizer.encode(text).map_err(failed)?,
        Prompt::Text(text) => tokenizer.encode_prompt(text, true).map_err(failed)?,
        Prompt::Chat(messages) => {
            let inherited = source.inherited.as_ref();
            let inherited =
                inherited.ok_or("the model has no chat template, as it was trained from random weights")?;
            // The template writes the beginning of the sequence itself.
            tokenizer.encode_prompt(&chat_prompt(inherited, messages)?, false).map_err(failed)?
        }
    };
    Request::started(tokenizer, tokens).map_err(failed)
}

/// Renders a chat with the model's own template, up to the point where the model answers.
fn chat_prompt(inherited: &Inherited, messages: &serde_json::Value) -> Result<String, String> {
    let template = inherited.chat_template().ok_or("the model has no chat template")?;
    let token = |name: &str| Some((name.to_owned(), inherited.token(name)?.to_owned()));
    Template::new(template, TEMPLATE_TOKENS.into_iter().filter_map(token))?.render_json(messages, true)
}

fn options(command: &Command, source: &Source, tokenizer: &Tokenizer, note: &mut dyn FnMut(&str)) -> Options {
    let own = || tokenizer.end_of_text().into_iter().collect();
    let (ends, vocab) = match &source.inherited {
        Some(inherited) if !command.raw => {
            let says =
                |config: &serde_json::Map<String, serde_json::Value>| config.contains_key("eos_token_id");
            let mut ends = inherited.end_ids();
            if source.is_run || !(says(&inherited.config) || says(&inherited.generation_config)) {
                ends.extend(tokenizer.end_of_text());
            }
            (ends, if source.is_run { tokenizer.vocab() } else { source.shape.vocab })
        }
        _ => (own(), tokenizer.vocab()),
    };
    Options {
        max_tokens: command.max_tokens,
        sampling: sampling(command, source, note),
        seed: command.seed,
        stop: command.stop.clone(),
        ends,
        vocab,
    }
}

/// Returns the sampling settings: from the command line, otherwise from the directory's `generation_config.json`.
fn sampling(command: &Command, source: &Source, note: &mut dyn FnMut(&str)) -> Sampling {
    let Command { temperature, top_k, top_p, raw, .. } = *command;
    let plain = Sampling { temperature: temperature.unwrap_or(1.0), top_k, top_p: top_p.unwrap_or(1.0) };
    let config = source.inherited.as_ref().map(|inherited| &inherited.generation_config);
    let Some(config) = config.filter(|config| !config.is_empty() && !raw && !source.is_run) else {
        return plain;
    };
    let number = |key: &str| config.get(key).and_then(serde_json::Value::as_f64);
    if number("repetition_penalty").is_some_and(|penalty| penalty != 1.0) {
        note("warning: `repetition_penalty` of generation_config.json is not supported and has no effect");
    }
    if config.get("do_sample").and_then(serde_json::Value::as_bool) != Some(true) {
        let any = temperature.is_some() || top_k.is_some() || top_p.is_some();
        return if any { plain } else { Sampling { temperature: 0.0, ..plain } };
    }
    let count = config.get("top_k").map_or(Some(DEFAULT_TOP_K as u64), serde_json::Value::as_u64);
    let count = count.and_then(|count| usize::try_from(count).ok()).filter(|count| *count > 0);
    Sampling {
        temperature: temperature.or(number("temperature")).unwrap_or(1.0),
        top_k: top_k.or(count),
        top_p: top_p.or(number("top_p")).unwrap_or(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_are_skipped_unless_none_is_left() {
        let mut notes = Vec::new();
        let mut note = |line: &str| notes.push(line.to_owned());
        let prompts = [vec![1; 4], vec![1; 9], vec![1; 8]];
        assert_eq!(skip_long(&prompts, 8, &mut note).ok(), Some(vec![0, 2]));
        assert!(notes[0].contains("prompt 2 has 9 tokens"), "{notes:?}");
        let refusal = skip_long(&prompts[1..2], 8, &mut |_| {}).err().unwrap();
        assert!(refusal.message.contains("prompt 1 has 9 tokens"), "{}", refusal.message);
    }
}
