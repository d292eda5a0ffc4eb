//! `xlaunch generate`: opens the model that a path means, and continues prompts.

use std::path::PathBuf;

use xlaunch_proto::spec::Precision;

use super::{Options, Request, Update, generate};
use crate::preflight::Refusal;
use crate::pretrained::{self, Device, Source};

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Command {
    /// See [`Source::find`].
    pub model: PathBuf,
    /// See [`Source::tokenizer`].
    pub tokenizer: Option<String>,
    /// Texts to continue.
    pub prompts: Vec<String>,
    /// How often to continue each.
    pub samples: usize,
    /// How.
    pub options: Options,
    /// Where.
    pub device: Device,
    /// On a GPU.
    pub precision: Precision,
}

/// Runs the command. `note` gets lines for the user, `sink` the updates by the numbers of prompt and sample.
pub fn run(
    command: &Command,
    interrupted: &dyn Fn() -> bool,
    note: &mut dyn FnMut(&str),
    sink: &mut dyn FnMut(usize, usize, Update<'_>),
) -> Result<(), Refusal> {
    let source = Source::find(&command.model)?;
    source.notes.iter().for_each(|line| note(line));
    let tokenizer = source.tokenizer(command.tokenizer.as_deref())?;
    let requests: Vec<Request> = command
        .prompts
        .iter()
        .flat_map(|prompt| {
            let tokens = Request::tokens(&tokenizer, prompt);
            (0..command.samples).map(move |sample| Request { tokens: tokens.clone(), sample })
        })
        .collect();
    let backend = pretrained::open_device(command.device, command.precision, false)?;
    let model = source.load(&backend, interrupted)?;
    let samples = command.samples.max(1);
    let mut by_sample =
        |request: usize, update: Update<'_>| sink(request / samples, request % samples, update);
    Ok(generate(&model, &tokenizer, &requests, &command.options, interrupted, &mut by_sample)?)
}
