//! Samples text from a model with a known tokenizer.
//!
//! The cache of keys and values is allocated for each text and fits in the memory that the activations of a training
//! step leave free. Once a text is longer than the model's context, every token moves all others to the previous
//! position, so the cache is filled anew for each of them.

use xlaunch_data::Tokenizer;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Phase, SampleReport};
use xlaunch_spec::job::JobSpec;

use super::trace;
use crate::control::Control;
use crate::data::{DataError, Dataset, Tokens};
use crate::error::Result;
use crate::generate::{Draw, Sampling};
use crate::model::Model;
use crate::model::decode::{Decoder, Row};
use crate::phase;
use crate::random::stream;

/// Temperatures below 1 favour likely tokens.
const SAMPLING: Sampling = Sampling { temperature: 0.8, top_k: None, top_p: 1.0 };
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
            "" => {
                let rows = dataset.held_out().map_or(&dataset.train, |held_out| &held_out.rows);
                held_out_line(&tokenizer, &rows.sources()[0].tokens, seq / 4)?
            }
            prompt => encoded(&tokenizer, prompt)?,
        };
        if ids.is_empty() {
            ids.push(tokenizer.end_of_text().unwrap_or(0));
        }
        let prompt = printable(&tokenizer.decode(&ids));
        Ok(Some(Self { tokenizer, prompt, ids, count: spec.train.sample, seed: spec.job.seed }))
    }

    /// Samples and reports a text. Returns the text after the prompt; `None` if the job has to stop before its end.
    pub fn report(&self, model: &Model, control: &Control, step: u64) -> Result<Option<String>> {
        let Some(text) = self.sample(model, || control.stop_requested())? else { return Ok(None) };
        let (prompt, whole) = (self.prompt.clone(), format!("{}{text}", self.prompt));
        control.report(Report::Sample(SampleReport { step, prompt, text }));
        Ok(Some(whole))
    }

    /// Returns the model's continuation of the prompt, up to the end-of-text id, or to logits that are not finite.
    /// `None` if the job has to stop before the end.
    fn sample(&self, model: &Model, stop_requested: impl Fn() -> bool) -> Result<Option<String>> {
        let _span = trace::span(Phase::Sample);
        let seq = model.shape.seq;
        let capacity = self.ids.len().saturating_add(self.count).min(seq);
        // A model may have more ids than its tokenizer; the excess ids have no text.
        let mut cache = Decoder::new(model, 1, capacity, self.tokenizer.vocab())?;
        let mut logits = vec![0.0; cache.vocab()];
        let mut draw = Draw::new(SAMPLING, stream(self.seed, "sample"));
        let mut ids = self.ids.clone();
        for index in 0..self.count {
            if stop_requested() {
                return Ok(None);
            }
            if index == 0 || ids.len() > seq {
                cache.prefill(&[(0, &ids[ids.len().saturating_sub(seq)..])])?;
            } else {
                let position = ids.len() - 1;
                cache.set_rows(&[Row { slot: 0, position, token: ids[position] }])?;
                cache.step()?;
            }
            cache.read_logits(0, &mut logits)?;
            phase::advance();
            let Some(next) = draw.next(&logits) else { break };
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

/// Replaces control characters other than newline and tab by `\u{fffd}`, so that a sample cannot send escape sequences
/// to a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_contains_no_control_characters() {
        assert_eq!(printable("a\x1b[2J\n\u{fffd}"), "a\u{fffd}[2J\n\u{fffd}");
    }
}
