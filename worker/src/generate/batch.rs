//! Generates text for many requests at once.
//!
//! ```text
//! submit --> waiting --schedule: free slot, prefill--> active --step, step, ... --> finished: its slot is free again
//! ```
//! Requests join and leave between steps, as decided by [`Schedule`]. A step has one row per active sequence, so a
//! sequence that has ended costs no more time.
//!
//! The next step of greedy decoding on a GPU is enqueued before the host reads the tokens of the current one, so the
//! device never waits for the host. Results of that step for sequences that have ended in the meantime are ignored.

use std::collections::HashMap;
use std::time::Instant;

use super::schedule::{Admitted, Event, Schedule};
use super::score::{Scored, score};
use super::sequence::{Chosen, Output, Sequence, Sink};
use super::{GenerateError, Options, Request, Settings};
use crate::model::Model;
use crate::model::decode::{Decoder, MAX_SLOTS, Row};

type Result<T> = std::result::Result<T, GenerateError>;

/// Maximum size of the cache in bytes, unless one sequence needs more.
const CACHE_BYTES: usize = 8 << 30;

/// How prompts are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// Several prompts in one pass, which is fastest. The last bits of their logits may depend on each other.
    Together,
    /// Each prompt in passes of its own, so that its logits have the same bits in every batch.
    Separate,
}

/// Requests that share the model. Prompts have at least one token, and fit the model.
#[derive(Debug)]
pub struct Batch<'a> {
    decoder: Decoder<'a>,
    settings: &'a Settings,
    prefill: Prefill,
    schedule: Schedule,
    /// Requests that the schedule has not admitted.
    waiting: HashMap<usize, Request>,
    active: Vec<Sequence>,
    /// Maximum number of tokens of a text that the model reads.
    capacity: usize,
    /// Logits of one row.
    logits: Vec<f32>,
}

impl<'a> Batch<'a> {
    /// Creates an empty batch for up to `count` requests at once of up to `capacity` tokens each.
    pub fn new(
        model: &'a Model,
        settings: &'a Settings,
        count: usize,
        capacity: usize,
        prefill: Prefill,
    ) -> Result<Self> {
        let capacity = capacity.min(model.shape.seq);
        let room = CACHE_BYTES / Decoder::slot_bytes(model, capacity).max(1);
        let slots = count.min(MAX_SLOTS).min(room.max(1));
        let decoder = Decoder::new(model, slots, capacity, settings.vocabulary.size)?;
        Ok(Self {
            schedule: Schedule::new(decoder.slots()),
            decoder,
            settings,
            prefill,
            waiting: HashMap::new(),
            active: Vec::new(),
            capacity,
            logits: vec![0.0; model.shape.vocab],
        })
    }

    /// Number of requests that are computed at the same time.
    pub fn slots(&self) -> usize {
        self.decoder.slots()
    }

    /// Adds a request, with a number that no other request has.
    pub fn submit(&mut self, number: usize, request: Request) {
        self.waiting.insert(number, request);
        self.schedule.apply(Event::Arrived(number));
    }

    /// Removes a request that has not finished.
    pub fn cancel(&mut self, number: usize) {
        self.waiting.remove(&number);
        self.active.retain(|sequence| sequence.number != number);
        self.schedule.apply(Event::Ended(number));
    }

    /// Returns whether all requests have ended.
    pub fn is_idle(&self) -> bool {
        self.schedule.is_idle()
    }

    /// Admits requests while slots are free, then runs steps until a sequence ends or `pause` returns true.
    pub fn advance(&mut self, pause: &mut dyn FnMut() -> bool, sink: Sink<'_>) -> Result<()> {
        let admitted = self.schedule.admit();
        let is_scored = |it: &Admitted| self.waiting.get(&it.request).is_some_and(Request::scores_prompt);
        let separate = self.prefill == Prefill::Separate || admitted.iter().any(is_scored);
        let size = if separate { 1 } else { admitted.len() };
        for group in admitted.chunks(size.max(1)) {
            self.start(group, sink)?;
        }
        self.decode(pause, sink)
    }

    /// Computes the prompts of these requests in the same passes, and generates their first tokens.
    fn start(&mut self, group: &[Admitted], sink: Sink<'_>) -> Result<()> {
        let started = Instant::now();
        let mut new = Vec::with_capacity(group.len());
        for Admitted { request: number, slot } in group {
            if let Some(request) = self.waiting.remove(number) {
                new.push(Sequence::new(self.settings, *number, *slot, request, started));
            }
        }
        match &new[..] {
            [only] if only.request.scores_prompt() => {
                let scores = self.score_prompt(only.row.slot, &only.request)?;
                let Some(scores) = scores else {
                    self.schedule.apply(Event::Ended(only.number));
                    sink(only.number, Output::NotFinite);
                    return Ok(());
                };
                sink(only.number, Output::Prompt(scores));
            }
            _ => {
                let prompts: Vec<(usize, &[u32])> =
                    new.iter().map(|sequence| (sequence.row.slot, &sequence.request.tokens[..])).collect();
                self.decoder.prefill(&prompts)?;
            }
        }
        let chosen = self.choose(&mut new)?;
        let mut going_on = self.accept(new, chosen, sink);
        self.active.append(&mut going_on);
        Ok(())
    }

    /// Computes a prompt, and scores its tokens; `None` if logits are not finite.
    fn score_prompt(&mut self, slot: usize, request: &Request) -> Result<Option<Vec<Scored>>> {
        let top = request.options.scores.unwrap_or(0);
        let mut next = request.tokens.iter().skip(1);
        let mut scores = Vec::with_capacity(request.tokens.len());
        self.decoder.prefill_with_logits(slot, &request.tokens, &mut |logits| {
            scores.extend(next.next().map(|token| score(logits, *token, top)));
        })?;
        Ok(scores.into_iter().collect())
    }

    /// Runs steps until a sequence ends.
    fn decode(&mut self, pause: &mut dyn FnMut() -> bool, sink: Sink<'_>) -> Result<()> {
        let count = self.active.len();
        if count == 0 {
            return Ok(());
        }
        let run_ahead =
            self.decoder.is_asynchronous() && !self.active.iter().any(|sequence| sequence.reads_logits());
        if run_ahead {
            self.set_rows()?;
            self.decoder.step()?;
        }
        loop {
            let chosen = if run_ahead {
                let pending = self.decoder.begin_ids()?;
                self.decoder.step()?;
                ids(pending, count)?.into_iter().map(|id| Some((id?, None))).collect()
            } else {
                self.set_rows()?;
                self.decoder.step()?;
                let mut active = std::mem::take(&mut self.active);
                let chosen = self.choose(&mut active);
                self.active = active;
                chosen?
            };
            let active = std::mem::take(&mut self.active);
            self.active = self.accept(active, chosen, sink);
            if self.active.len() != count || pause() {
                return Ok(());
            }
        }
    }

    fn set_rows(&mut self) -> Result<()> {
        let rows: Vec<Row> = self.active.iter().map(|sequence| sequence.row).collect();
        Ok(self.decoder.set_rows(&rows)?)
    }

    /// Returns the next token of each sequence, from the rows that the decoder has just computed.
    fn choose(&mut self, sequences: &mut [Sequence]) -> Result<Vec<Chosen>> {
        let greedy = if sequences.iter().any(|sequence| sequence.request.options.sampling.is_greedy()) {
            ids(self.decoder.begin_ids()?, sequences.len())?
        } else {
            vec![None; sequences.len()]
        };
        let mut all = Vec::with_capacity(sequences.len());
        for (row, (sequence, most_likely)) in sequences.iter_mut().zip(greedy).enumerate() {
            let Options { sampling, scores, .. } = &*sequence.request.options;
            if sequence.reads_logits() {
                self.decoder.read_logits(row, &mut self.logits)?;
            }
            let id = if sampling.is_greedy() {
                most_likely
            } else {
                sequence.draw.next(&self.logits[..self.decoder.vocab()])
            };
            let scored = |id: u32| match scores {
                None => Some((id, None)),
                Some(top) => Some((id, Some(score(&self.logits, id, *top)?))),
            };
            all.push(id.and_then(scored));
        }
        Ok(all)
    }

    /// Adds a token to each sequence. Returns the sequences that continue; the slots of the others are free.
    fn accept(&mut self, sequences: Vec<Sequence>, chosen: Vec<Chosen>, sink: Sink<'_>) -> Vec<Sequence> {
        let mut going_on = Vec::with_capacity(sequences.len());
        for (mut sequence, chosen) in sequences.into_iter().zip(chosen) {
            let number = sequence.number;
            let Some(chosen) = chosen else {
                self.schedule.apply(Event::Ended(number));
                sink(number, Output::NotFinite);
                continue;
            };
            match sequence.push(chosen, &self.settings.vocabulary.ends, self.capacity, sink) {
                None => going_on.push(sequence),
                Some(reason) => {
                    self.schedule.apply(Event::Ended(number));
                    sequence.finish(reason, sink);
                }
            }
        }
        going_on
    }
}

/// Waits for the most likely tokens of `count` rows: `None` if no logit is a number.
fn ids(pending: xlaunch_engine::PendingRead, count: usize) -> Result<Vec<Option<u32>>> {
    let mut ids = vec![0.0; count];
    pending.wait(&mut ids)?;
    // The conversion is exact: ids are whole numbers below 2^24.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number")]
    let id = |id: f32| (id >= 0.0).then_some(id as u32);
    Ok(ids.into_iter().map(id).collect())
}

#[cfg(test)]
mod tests;
