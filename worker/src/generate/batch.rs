//! Generates text for many requests at once.
//!
//! ```text
//! waiting --free slot, prefill--> active --step, step, ... --> finished: its slot is free again
//! ```
//! Waiting prompts are admitted as soon as slots are free. A step has one row per active sequence, so a sequence that
//! has ended costs nothing more.
//!
//! The next step of greedy decoding on a GPU is enqueued before the host reads the tokens of the current one, so the
//! device never waits for the host. Results of that step for sequences that have ended in the meantime are ignored.

use std::collections::VecDeque;
use std::time::Instant;

use xlaunch_data::{Decoder as TextDecoder, Tokenizer};

use super::sample::Draw;
use super::text::{Shown, StopText};
use super::{Completion, FinishReason, GenerateError, Options, Request, Update};
use crate::model::Model;
use crate::model::decode::{Decoder, MAX_SLOTS, Row};
use crate::random::Random;

type Result<T> = std::result::Result<T, GenerateError>;

/// Maximum size of the cache in bytes, unless one sequence needs more.
const CACHE_BYTES: usize = 8 << 30;

/// Receives updates with the number of the request.
type Sink<'a> = &'a mut dyn FnMut(usize, Update<'_>);

/// Continues all requests. `interrupted` is polled between steps.
///
/// # Errors
/// If a prompt does not fit the model, which is found before anything is generated; if logits are not finite; or if the
/// device fails.
pub fn generate(
    model: &Model,
    tokenizer: &Tokenizer,
    requests: &[Request],
    options: &Options,
    interrupted: &dyn Fn() -> bool,
    sink: &mut dyn FnMut(usize, Update<'_>),
) -> Result<()> {
    check(model, requests)?;
    let seq = model.shape.seq;
    let longest = requests.iter().map(|request| request.tokens.len()).max().unwrap_or(1);
    let capacity = longest.saturating_add(options.max_tokens).min(seq);
    let room = CACHE_BYTES / Decoder::slot_bytes(model, capacity).max(1);
    let slots = requests.len().min(MAX_SLOTS).min(room.max(1));
    let decoder = Decoder::new(model, slots, capacity, options.vocab)?;
    let mut batch = Batch {
        tokenizer,
        requests,
        options,
        interrupted,
        waiting: (0..requests.len()).collect(),
        free: (0..decoder.slots()).rev().collect(),
        active: Vec::new(),
        seq,
        logits: vec![0.0; if options.sampling.is_greedy() { 0 } else { decoder.vocab() }],
        decoder,
    };
    while !batch.waiting.is_empty() || !batch.active.is_empty() {
        batch.admit(sink)?;
        batch.decode(sink)?;
    }
    Ok(())
}

/// Checks that all prompts fit the model.
fn check(model: &Model, requests: &[Request]) -> Result<()> {
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

struct Batch<'a> {
    decoder: Decoder<'a>,
    tokenizer: &'a Tokenizer,
    requests: &'a [Request],
    options: &'a Options,
    interrupted: &'a dyn Fn() -> bool,
    waiting: VecDeque<usize>,
    free: Vec<usize>,
    active: Vec<Sequence>,
    /// Context length of the model.
    seq: usize,
    /// Logits of one row; empty with greedy decoding.
    logits: Vec<f32>,
}

/// A request in a slot of the cache.
struct Sequence {
    request: usize,
    /// The next row: its token is the last one of the sequence, which is not in the cache yet.
    row: Row,
    tokens: usize,
    decoder: TextDecoder,
    text: StopText,
    draw: Draw,
    started: Instant,
}

impl Batch<'_> {
    /// Starts waiting requests in free slots, and generates their first tokens.
    fn admit(&mut self, sink: Sink<'_>) -> Result<()> {
        if self.free.is_empty() || self.waiting.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let mut new = Vec::new();
        while let Some(slot) = self.free.pop() {
            let Some(request) = self.waiting.pop_front() else {
                self.free.push(slot);
                break;
            };
            let Request { tokens, sample } = &self.requests[request];
            let mut decoder = self.tokenizer.decoder();
            // The text of a token may depend on earlier tokens.
            decoder.skip(tokens);
            let row = Row { slot, position: tokens.len(), token: 0 };
            // Random numbers do not depend on the prompt, so a prompt gives the same text alone and in a batch.
            let random = Random::new(self.options.seed, &format!("generate {sample}"));
            let draw = Draw::new(self.options.sampling, random);
            let text = StopText::new(&self.options.stop);
            new.push(Sequence { request, row, tokens: 0, decoder, text, draw, started });
        }
        let prompts: Vec<(usize, &[u32])> = new
            .iter()
            .map(|sequence| (sequence.row.slot, &self.requests[sequence.request].tokens[..]))
            .collect();
        self.decoder.prefill(&prompts)?;
        let ids = self.choose(&mut new)?;
        let mut going_on = self.accept(new, &ids, sink);
        self.active.append(&mut going_on);
        Ok(())
    }

    /// Runs steps until a sequence ends.
    fn decode(&mut self, sink: Sink<'_>) -> Result<()> {
        let count = self.active.len();
        if count == 0 {
            return Ok(());
        }
        let run_ahead = self.options.sampling.is_greedy() && self.decoder.is_asynchronous();
        self.set_rows()?;
        self.decoder.step()?;
        while self.active.len() == count {
            if (self.interrupted)() {
                return Err(GenerateError::Interrupted);
            }
            let mut active = std::mem::take(&mut self.active);
            let ids = if run_ahead {
                let pending = self.decoder.begin_ids()?;
                self.decoder.step()?;
                self.ids(pending, &active)?
            } else {
                self.choose(&mut active)?
            };
            self.active = self.accept(active, &ids, sink);
            if !run_ahead && self.active.len() == count {
                self.set_rows()?;
                self.decoder.step()?;
            }
        }
        Ok(())
    }

    fn set_rows(&mut self) -> Result<()> {
        let rows: Vec<Row> = self.active.iter().map(|sequence| sequence.row).collect();
        Ok(self.decoder.set_rows(&rows)?)
    }

    /// Returns the next token of each sequence, from the rows that the decoder has just computed.
    fn choose(&mut self, sequences: &mut [Sequence]) -> Result<Vec<u32>> {
        if self.options.sampling.is_greedy() {
            let pending = self.decoder.begin_ids()?;
            return self.ids(pending, sequences);
        }
        let mut ids = Vec::with_capacity(sequences.len());
        for (row, sequence) in sequences.iter_mut().enumerate() {
            self.decoder.read_logits(row, &mut self.logits)?;
            let drawn = sequence.draw.next(&self.logits);
            ids.push(drawn.ok_or(GenerateError::NotFinite { index: sequence.request })?);
        }
        Ok(ids)
    }

    /// Waits for the most likely tokens.
    fn ids(&self, pending: xlaunch_engine::PendingRead, sequences: &[Sequence]) -> Result<Vec<u32>> {
        let mut ids = vec![0.0; sequences.len()];
        pending.wait(&mut ids)?;
        let id = |(id, sequence): (f32, &Sequence)| {
            // The conversion is exact: ids are whole numbers below 2^24.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number")]
            let token = (id >= 0.0).then_some(id as u32);
            token.ok_or(GenerateError::NotFinite { index: sequence.request })
        };
        ids.into_iter().zip(sequences).map(id).collect()
    }

    /// Adds a token to each sequence. Returns the sequences that continue; the slots of the others are free.
    fn accept(&mut self, sequences: Vec<Sequence>, ids: &[u32], sink: Sink<'_>) -> Vec<Sequence> {
        let mut going_on = Vec::with_capacity(sequences.len());
        for (mut sequence, id) in sequences.into_iter().zip(ids) {
            match self.next(&mut sequence, *id, sink) {
                None => going_on.push(sequence),
                Some(mut reason) => {
                    self.free.push(sequence.row.slot);
                    let Sequence { request, tokens, decoder, mut text, started, .. } = sequence;
                    if reason != FinishReason::Stop {
                        // Text of an incomplete character, and text that could have become a stop string.
                        let Shown { text: last, stopped } = text.push(&decoder.finish());
                        sink(request, Update::Text(&last));
                        if stopped {
                            reason = FinishReason::Stop;
                        } else {
                            sink(request, Update::Text(&text.finish()));
                        }
                    }
                    let time = started.elapsed();
                    sink(request, Update::Finished(Completion { tokens, reason, time }));
                }
            }
        }
        going_on
    }

    /// Adds a token. If the text ends with it, returns the reason.
    fn next(&self, sequence: &mut Sequence, id: u32, sink: Sink<'_>) -> Option<FinishReason> {
        if self.options.ends.contains(&id) {
            return Some(FinishReason::EndOfText);
        }
        sequence.tokens += 1;
        let Shown { text, stopped } = sequence.text.push(&sequence.decoder.push(id));
        sink(sequence.request, Update::Text(&text));
        if stopped {
            return Some(FinishReason::Stop);
        }
        if sequence.tokens >= self.options.max_tokens {
            return Some(FinishReason::Length);
        }
        // The next step puts this token into the cache, after the earlier ones.
        sequence.row.token = id;
        let position = self.requests[sequence.request].tokens.len() + sequence.tokens - 1;
        sequence.row.position = position;
        (position >= self.seq).then_some(FinishReason::Context)
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_engine::{Backend, PoolMode};
    use xlaunch_spec::model::{Arch, ModelSection};

    use super::*;
    use crate::generate::Sampling;
    use crate::model::BackendHandle;

    /// Width of the model; the position after which it ends the document follows.
    const DIM: usize = 8;
    const END_POSITION: usize = 5;

    /// A model whose next token depends on the position alone: `a`, then end of text from [`END_POSITION`] on.
    fn model(tokenizer: &Tokenizer) -> Model {
        let section = ModelSection {
            arch: Some(Arch::Gpt2),
            layers: Some(1),
            heads: Some(1),
            dim: Some(DIM),
            ffn: Some(8),
            seq: Some(16),
            vocab: Some(tokenizer.vocab()),
            tied: Some(false),
            ..ModelSection::default()
        };
        let backend = BackendHandle::new(Backend::cpu(1, PoolMode::On));
        let model = Model::zeroed(&backend, &section.resolve().unwrap()).unwrap();
        let (before, after) = ([1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]);
        let write = |at: usize, half: [f32; 4]| model.write_weights(at, &[half, half].concat()).unwrap();
        let positions = model.layout.wpe.clone().unwrap().start;
        for position in 0..16 {
            write(positions + position * DIM, if position < END_POSITION { before } else { after });
        }
        model.write_weights(model.layout.lnf.weight.start, &[1.0; DIM]).unwrap();
        let row = |id: u32| model.layout.head.start + id as usize * DIM;
        write(row(tokenizer.encode("a").unwrap()[0]), before);
        write(row(tokenizer.end_of_text().unwrap()), after);
        model
    }

    #[test]
    fn end_of_text_ends_each_sequence_of_a_batch_at_its_position() {
        let tokenizer = Tokenizer::gpt2();
        let model = model(&tokenizer);
        for temperature in [0.0, 0.01] {
            let sampling = Sampling { temperature, top_k: None, top_p: 1.0 };
            let options = Options {
                max_tokens: 12,
                sampling,
                seed: 1,
                stop: Vec::new(),
                ends: vec![50_256],
                vocab: 50_257,
            };
            let prompts = [vec![1], vec![2, 3, 4], vec![5; END_POSITION + 1]];
            let requests = prompts.map(|tokens| Request { tokens, sample: 0 });
            let mut texts = vec![String::new(); 3];
            let mut ends = vec![None; 3];
            let mut sink = |request: usize, update: Update<'_>| match update {
                Update::Text(text) => texts[request] += text,
                Update::Finished(completion) => ends[request] = Some((completion.tokens, completion.reason)),
            };
            generate(&model, &tokenizer, &requests, &options, &|| false, &mut sink).unwrap();
            assert_eq!(texts, ["aaaaa", "aaa", ""]);
            assert_eq!(ends, [5, 3, 0].map(|tokens| Some((tokens, FinishReason::EndOfText))));
        }
    }
}
