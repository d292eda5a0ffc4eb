//! Prints generated text to stdout: streamed for a single prompt, in the order of the prompts for several, or as JSON.

use std::collections::BTreeMap;

use serde_json::json;

use super::label;
use super::prompts::Prompt;
use crate::cli::output::{QueryError, print};
use crate::render::sanitize::LogSanitizer;
use crate::render::text::escape;
use xlaunch_worker::generate::{Completion, Update};

/// Form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The text of one prompt, streamed.
    Stream { is_terminal: bool },
    /// The texts of several prompts, each after a line that names it.
    Texts { is_terminal: bool },
    /// One object per text.
    Json,
}

/// Prints generated text in the chosen form.
pub(super) struct Output {
    form: Form,
    prompts: Vec<Prompt>,
    samples: usize,
    sanitizer: LogSanitizer,
    /// Unfinished texts, by text number: the prompt's index times the number of samples, plus the sample's index.
    texts: BTreeMap<usize, String>,
    /// Output of complete texts that must wait for texts with lower numbers.
    ready: BTreeMap<usize, String>,
    /// Number of texts printed.
    printed: usize,
    line_open: bool,
}

impl Output {
    pub(super) fn new(form: Form, prompts: Vec<Prompt>, samples: usize) -> Self {
        Self {
            form,
            prompts,
            samples,
            sanitizer: LogSanitizer::default(),
            texts: BTreeMap::new(),
            ready: BTreeMap::new(),
            printed: 0,
            line_open: false,
        }
    }

    /// Prints what can be printed now.
    pub(super) fn update(
        &mut self,
        prompt: usize,
        sample: usize,
        update: Update<'_>,
    ) -> Result<(), QueryError> {
        let number = prompt * self.samples + sample;
        match (self.form, update) {
            (_, Update::Text("")) => Ok(()),
            (Form::Stream { is_terminal }, Update::Text(text)) => {
                self.line_open = is_terminal && !text.ends_with('\n');
                print(self.shown(text, is_terminal).as_bytes())
            }
            (Form::Stream { .. }, Update::Finished(_)) => Ok(()),
            (_, Update::Text(text)) => {
                self.texts.entry(number).or_default().push_str(text);
                Ok(())
            }
            (form, Update::Finished(Completion { tokens, reason, time })) => {
                let seconds = time.as_secs_f64();
                let text = self.texts.remove(&number).unwrap_or_default();
                let of = &self.prompts[prompt];
                let ready = match form {
                    Form::Json => {
                        #[expect(clippy::cast_precision_loss, reason = "a count of tokens")]
                        let speed = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
                        let mut object = json!({
                            "prompt": of.messages.clone().unwrap_or_else(|| of.prompt.clone().into()),
                            "sample": sample, "text": text, "tokens": tokens,
                            "finish_reason": reason.name(), "seconds": seconds, "tokens_per_second": speed,
                        });
                        if let Some(id) = &of.id {
                            object["id"] = id.clone();
                        }
                        format!("{object}\n")
                    }
                    Form::Texts { is_terminal } | Form::Stream { is_terminal } => {
                        let sample =
                            if self.samples > 1 { format!(", sample {}", sample + 1) } else { String::new() };
                        let name = escape(&label(of, prompt));
                        format!("== {name}{sample} ==\n{}\n", self.shown(&text, is_terminal))
                    }
                };
                self.ready.insert(number, ready);
                self.print_ready()
            }
        }
    }

    /// Prints complete texts that wait for others, which may have been interrupted. Ends the last line on a terminal.
    pub(super) fn end(self) -> Result<(), QueryError> {
        let mut rest: String = self.ready.into_values().collect();
        if self.line_open {
            rest.push('\n');
        }
        print(rest.as_bytes())
    }

    fn print_ready(&mut self) -> Result<(), QueryError> {
        while let Some(text) = self.ready.remove(&self.printed) {
            self.printed += 1;
            print(text.as_bytes())?;
        }
        Ok(())
    }

    /// Escapes control characters on a terminal: the model may generate any.
    fn shown(&mut self, text: &str, is_terminal: bool) -> String {
        if is_terminal { self.sanitizer.text(text.as_bytes()) } else { text.to_owned() }
    }
}
