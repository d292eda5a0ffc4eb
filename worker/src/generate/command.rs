//! `xlaunch generate`: opens the model at a path, and continues prompts with the settings in the model's files.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use xlaunch_spec::exit::ExitCode;

use super::{
    Batch, Completion, FinishReason, GenerateError, Options, Output, Prefill, Prompt, Request,
    SamplingOverrides, Settings, Token, Update,
};
use crate::model::Model;
use crate::model::decode::Decoder;
use crate::pretrained::Target;
use xlaunch_spec::refusal::Refusal;

/// Arguments of the command line.
#[derive(Clone, Debug)]
pub struct Command {
    /// See [`Source::find`](crate::pretrained::Source::find).
    pub model: PathBuf,
    /// See [`Source::with_adapter`](crate::pretrained::Source::with_adapter).
    pub adapter: Option<PathBuf>,
    /// See [`Source::tokenizer`](crate::pretrained::Source::tokenizer).
    pub tokenizer: Option<String>,
    /// Prompts to continue.
    pub prompts: Vec<Prompt>,
    /// Number of samples per prompt.
    pub samples: usize,
    /// True to take prompts as plain text, and to ignore the generation settings in the model's directory.
    pub raw: bool,
    /// Maximum number of tokens per text; `None` for [`Settings::max_tokens`].
    pub max_tokens: Option<usize>,
    /// Settings for choosing tokens.
    pub sampling: SamplingOverrides,
    /// Seed of the random numbers.
    pub seed: u64,
    /// The text ends before any of these.
    pub stop: Vec<String>,
    /// Device and precision.
    pub target: Target,
}

/// Runs the command. `note` receives lines for the user, `sink` the updates with the numbers of prompt and sample.
pub fn run(
    command: &Command,
    interrupted: &dyn Fn() -> bool,
    note: &mut dyn FnMut(&str),
    sink: &mut dyn FnMut(usize, usize, Update<'_>),
) -> Result<(), Refusal> {
    let Command { model, adapter, tokenizer, raw, .. } = command;
    let (source, settings) =
        Settings::open(model, adapter.as_deref(), tokenizer.as_deref(), *raw, command.sampling, note)?;
    let options = |prompt: &[u32]| Options {
        max_tokens: command.max_tokens.unwrap_or_else(|| settings.max_tokens(prompt.len())),
        sampling: settings.sampling(command.sampling),
        seed: command.seed,
        stop: command.stop.clone(),
        scores: None,
        echo: false,
    };
    let mut prompts = Vec::new();
    for (index, prompt) in command.prompts.iter().enumerate() {
        prompts.push(settings.tokens(prompt).map_err(|reason| Refusal {
            exit: ExitCode::Data,
            message: format!("prompt {}: {reason}", index + 1),
        })?);
    }
    let fits = skip_long(&prompts, source.shape.seq, note)?;
    let lengths = fits.iter().map(|index| prompts[*index].len()).filter(|_| command.max_tokens.is_none());
    settings.no_room(lengths).iter().for_each(|line| note(line));
    let samples = command.samples.max(1);
    let long = (0..prompts.len()).filter(|index| !fits.contains(index));
    for (prompt, sample) in long.flat_map(|prompt| (0..samples).map(move |sample| (prompt, sample))) {
        let (reason, time) = (FinishReason::PromptTooLong, Duration::ZERO);
        sink(prompt, sample, Update::Finished(Completion { tokens: 0, reason, time }));
    }
    let of_prompt = |prompt: &usize| {
        let tokens: Arc<[u32]> = prompts[*prompt].as_slice().into();
        let options = Arc::new(options(&tokens));
        (0..samples).map(move |sample| Request { tokens: tokens.clone(), sample, options: options.clone() })
    };
    let requests: Vec<Request> = fits.iter().flat_map(of_prompt).collect();
    let (_, model) = source.load_on(command.target, false, note, interrupted)?;
    let mut by_sample =
        |request: usize, update: Update<'_>| sink(fits[request / samples], request % samples, update);
    Ok(generate(&model, &settings, &requests, interrupted, &mut by_sample)?)
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

/// Continues all requests. `interrupted` is polled between steps.
///
/// # Errors
/// If a prompt does not fit the model, which is found before anything is generated; if logits are not finite; or if the
/// device fails.
pub(super) fn generate(
    model: &Model,
    settings: &Settings,
    requests: &[Request],
    interrupted: &dyn Fn() -> bool,
    sink: &mut dyn FnMut(usize, Update<'_>),
) -> Result<(), GenerateError> {
    check(model, requests)?;
    let length = |request: &Request| request.tokens.len().saturating_add(request.options.max_tokens);
    // All texts of a batch have the same rotary table.
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (index, request) in requests.iter().enumerate() {
        groups.entry(Decoder::rotation_length(model, length(request))).or_default().push(index);
    }
    for group in groups.values() {
        let capacity = group.iter().map(|index| length(&requests[*index])).max().unwrap_or(1);
        let mut batch = Batch::new(model, settings, group.len(), capacity, Prefill::Together)?;
        group.iter().for_each(|index| batch.submit(*index, requests[*index].clone()));
        let mut not_finite = None;
        while !batch.is_idle() {
            if interrupted() {
                return Err(GenerateError::Interrupted);
            }
            batch.advance(&mut || interrupted(), &mut |index, output| match output {
                Output::Token(Token { text, .. }) | Output::Text(text) => sink(index, Update::Text(&text)),
                Output::Finished(completion) => sink(index, Update::Finished(completion)),
                Output::NotFinite => not_finite = not_finite.or(Some(index)),
                Output::Prompt(_) => {}
            })?;
            if let Some(index) = not_finite {
                return Err(GenerateError::NotFinite { index });
            }
        }
    }
    Ok(())
}

/// Checks that all prompts fit the model.
fn check(model: &Model, requests: &[Request]) -> Result<(), GenerateError> {
    let (seq, vocab) = (model.shape.seq, model.shape.vocab);
    for (index, request) in requests.iter().enumerate() {
        let tokens = request.tokens.len();
        if tokens > seq {
            return Err(GenerateError::PromptTooLong { index, tokens, seq });
        }
        let outside = request.tokens.iter().find(|id| usize::try_from(**id).is_ok_and(|id| id >= vocab));
        if let Some(id) = outside {
            return Err(GenerateError::Vocabulary { index, id: *id, vocab });
        }
    }
    Ok(())
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
