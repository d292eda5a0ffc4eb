//! Samples text from a model with a known tokenizer.
//!
//! Each token takes a forward pass over the whole context, whose activations fit in the memory of a training step. The
//! cache of [`crate::model::decode`] would be faster, but needs memory of its own, and with it a text ends when the
//! context is full.

use xlaunch_data::Tokenizer;
use xlaunch_engine::DType;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Phase, SampleReport};
use xlaunch_spec::job::JobSpec;

use super::trace;
use crate::control::Control;
use crate::data::{DataError, Dataset, Tokens};
use crate::error::Result;
use crate::model::{BackendHandle, Model, Rows};
use crate::phase;
use crate::random::Random;

/// Softmax temperature. Values below 1 favour likely tokens.
const TEMPERATURE: f64 = 0.8;
/// Number of held-out tokens to search for a prompt.
const PROMPT_TOKENS: usize = 4096;
/// Minimum number of characters in a line used as a prompt.
const MIN_PROMPT_CHARS: usize = 12;

/// Continues a prompt. Prompt and random numbers are the same every time, so that samples of a run can be compared.
#[derive(Debug)]
pub struct Sampler {
    tokenizer: Tokenizer,
    prompt: String,
    ids: Vec<u32>,
    /// Number of tokens to sample.
    count: usize,
    seed: u64,
}

impl Sampler {
    /// Creates the sampler of the rank that samples. `None` if the job does not sample, or its tokenizer is unknown.
    pub fn new(spec: &JobSpec, dataset: &Dataset, seq: usize) -> Result<Option<Self>> {
        if spec.train.sample == 0 {
            return Ok(None);
        }
        let Some(tokenizer) = dataset.tokenizer.load()? else { return Ok(None) };
        let mut ids = match spec.train.sample_prompt.as_str() {
            "" => held_out_line(&tokenizer, dataset.val.as_ref().unwrap_or(&dataset.train), seq / 4)?,
            prompt => encoded(&tokenizer, prompt)?,
        };
        if ids.is_empty() {
            ids.push(tokenizer.end_of_text().unwrap_or(0));
        }
        let prompt = printable(&tokenizer.decode(&ids));
        Ok(Some(Self { tokenizer, prompt, ids, count: spec.train.sample, seed: spec.job.seed }))
    }

    /// Samples and reports a text. Returns the text after the prompt; `None` if the job has to stop before its end.
    pub fn report(
        &self,
        backend: &BackendHandle,
        model: &Model,
        control: &Control,
        step: u64,
    ) -> Result<Option<String>> {
        let Some(text) = self.sample(backend, model, || control.stop_requested())? else { return Ok(None) };
        let (prompt, whole) = (self.prompt.clone(), format!("{}{text}", self.prompt));
        control.report(Report::Sample(SampleReport { step, prompt, text }));
        Ok(Some(whole))
    }

    /// Returns the model's continuation of the prompt, up to the end-of-text id. `None` if the job has to stop before
    /// the end.
    fn sample(
        &self,
        backend: &BackendHandle,
        model: &Model,
        stop_requested: impl Fn() -> bool,
    ) -> Result<Option<String>> {
        let _span = trace::span(Phase::Sample);
        let seq = model.shape.seq;
        // A model may have more ids than its tokenizer; the excess ids have no text.
        let vocab = model.shape.vocab.min(self.tokenizer.vocab());
        let rows = Rows { batch: 1, seq };
        let mut random = Random::new(self.seed, "sample");
        let mut ids = self.ids.clone();
        let tokens = backend.alloc(DType::I32, seq)?;
        let mut logits = vec![0.0; vocab];
        for _ in 0..self.count {
            if stop_requested() {
                return Ok(None);
            }
            // Attention is causal: padding after the last token has no effect, so a single shape serves every length.
            let context = &ids[ids.len().saturating_sub(seq)..];
            let mut window: Vec<i32> = context.iter().map(|id| id.cast_signed()).collect();
            window.resize(seq, 0);
            backend.write_i32(tokens.all(), &window)?;
            let acts = model.forward(rows, tokens.all())?;
            let last = model.logits(&acts, context.len() - 1..context.len())?;
            backend.read_f32(last.slice(0..vocab), &mut logits)?;
            phase::advance();
            let next = u32::try_from(draw(&logits, random.uniform())).unwrap_or(0);
            if Some(next) == self.tokenizer.end_of_text() {
                break;
            }
            ids.push(next);
        }
        let mut decoder = self.tokenizer.decoder();
        decoder.skip(&self.ids);
        let mut text: String = ids[self.ids.len()..].iter().map(|id| decoder.push(*id)).collect();
        text += &decoder.finish();
        Ok(Some(printable(&text)))
    }
}

/// Returns the first whole line of `tokens` that is long enough, cut to `max_len` tokens.
fn held_out_line(
    tokenizer: &Tokenizer,
    tokens: &Tokens,
    max_len: usize,
) -> std::result::Result<Vec<u32>, DataError> {
    let mut ids = Vec::new();
    let count = usize::try_from(tokens.len()).unwrap_or(PROMPT_TOKENS).min(PROMPT_TOKENS);
    tokens.read(0, count, &mut ids)?;
    let ids: Vec<u32> = ids.into_iter().map(i32::cast_unsigned).collect();
    let text = tokenizer.decode(&ids);
    // The first line is usually incomplete.
    let mut lines = text.split('\n').skip(1);
    let line = lines.find(|line| line.trim().chars().count() >= MIN_PROMPT_CHARS).unwrap_or("\n");
    let mut prompt = encoded(tokenizer, line)?;
    prompt.truncate(max_len.max(1));
    Ok(prompt)
}

/// Returns the ids of a prompt, which starts like the documents of the data.
fn encoded(tokenizer: &Tokenizer, text: &str) -> std::result::Result<Vec<u32>, DataError> {
    let failed = |error: xlaunch_data::TokenizerError| DataError::Tokenizer { reason: error.to_string() };
    tokenizer.encode_prompt(text, true).map_err(failed)
}

/// Returns the index at which the cumulative softmax reaches `uniform`.
fn draw(logits: &[f32], uniform: f64) -> usize {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> =
        logits.iter().map(|logit| (f64::from(logit - largest) / TEMPERATURE).exp()).collect();
    let mut remaining = uniform * weights.iter().sum::<f64>();
    let index = weights.iter().position(|weight| {
        remaining -= weight;
        remaining <= 0.0
    });
    index.unwrap_or(0)
}

/// Replaces control characters other than newline and tab by `\u{fffd}`, so that a sample cannot send escape sequences
/// to a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draw_favours_likely_tokens_and_covers_the_whole_range() {
        let mut logits = vec![-50.0; 70_000];
        logits[66_000] = 50.0;
        assert_eq!(draw(&logits, 0.5), 66_000);
        let flat = vec![0.0; 256];
        assert_eq!((draw(&flat, 1.0 / 512.0), draw(&flat, 0.999)), (0, 255));
    }

    #[test]
    fn sample_contains_no_control_characters() {
        assert_eq!(printable("a\x1b[2J\n\u{fffd}"), "a\u{fffd}[2J\n\u{fffd}");
    }
}
