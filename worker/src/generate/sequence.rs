//! One sequence of a batch: turns its tokens into text, and decides when it ends.

use std::time::Instant;

use xlaunch_data::Decoder as TextDecoder;

use super::sample::Draw;
use super::score::Scored;
use super::text::{Shown, StopText};
use super::{Completion, FinishReason, Options, Request, Settings};
use crate::model::decode::Row;
use crate::random::stream;

/// Result of a batch for one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Scores of the prompt's tokens from the second on, if they were requested.
    Prompt(Vec<Scored>),
    /// A token was generated.
    Token(Token),
    /// More text at the end.
    Text(String),
    /// The text is complete.
    Finished(Completion),
    /// The text cannot be continued: its logits are not finite.
    NotFinite,
}

/// A generated token; with scores, also the one that ended the text.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub id: u32,
    /// Number of characters of generated text before it, including text that a stop string may still remove.
    pub start: usize,
    /// Additional text, which may be empty, or end earlier tokens.
    pub text: String,
    /// Scores, if they were requested.
    pub scored: Option<Scored>,
}

/// Receives results with the number of the request.
pub(super) type Sink<'a> = &'a mut dyn FnMut(usize, Output);

/// A request in a slot of the cache.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) number: usize,
    pub(super) request: Request,
    /// The next row: its token is the last one of the sequence, which is not in the cache yet.
    pub(super) row: Row,
    pub(super) draw: Draw,
    tokens: usize,
    /// Number of characters decoded so far.
    characters: usize,
    decoder: TextDecoder,
    text: StopText,
    started: Instant,
}

/// The next token of a sequence; `None` if its logits are not finite.
pub(super) type Chosen = Option<(u32, Option<Scored>)>;

impl Sequence {
    pub(super) fn new(
        settings: &Settings,
        number: usize,
        slot: usize,
        request: Request,
        started: Instant,
    ) -> Self {
        let Options { sampling, seed, stop, echo, .. } = &*request.options;
        let mut decoder = settings.tokenizer.decoder();
        // The text of a token may depend on earlier tokens.
        if *echo {
            request.tokens.iter().for_each(|id| drop(decoder.push(*id)));
            decoder.end_prompt();
        } else {
            decoder.skip(&request.tokens);
        }
        let row = Row { slot, position: request.tokens.len(), token: 0 };
        // Random numbers do not depend on the prompt, so a prompt gives the same text alone and in a batch.
        let random = stream(*seed, &format!("generate {}", request.sample));
        let (draw, text) = (Draw::new(*sampling, random), StopText::new(stop));
        Self { number, row, draw, tokens: 0, characters: 0, decoder, text, started, request }
    }

    /// Returns whether its logits are needed on the host.
    pub(super) fn reads_logits(&self) -> bool {
        let Options { sampling, scores, .. } = &*self.request.options;
        !sampling.is_greedy() || scores.is_some()
    }

    /// Adds a token. If the text ends with it, returns the reason. `ends`: ids that end a text; `capacity`: maximum
    /// number of tokens that the model reads.
    pub(super) fn push(
        &mut self,
        (id, scored): (u32, Option<Scored>),
        ends: &[u32],
        capacity: usize,
        sink: Sink<'_>,
    ) -> Option<FinishReason> {
        let max_tokens = self.request.options.max_tokens;
        if max_tokens == 0 {
            return Some(FinishReason::Length);
        }
        if ends.contains(&id) {
            // The end has no text and is not counted, but clients that sum scores expect one for each step.
            if scored.is_some() {
                let (start, text) = (self.characters, String::new());
                sink(self.number, Output::Token(Token { id, start, text, scored }));
            }
            return Some(FinishReason::EndOfText);
        }
        self.tokens += 1;
        let earlier = self.decoder.settle(id);
        let start = self.characters + earlier.chars().count();
        let decoded = earlier + &self.decoder.push(id);
        self.characters += decoded.chars().count();
        let Shown { text, stopped } = self.text.push(&decoded);
        sink(self.number, Output::Token(Token { id, start, text, scored }));
        if stopped {
            return Some(FinishReason::Stop);
        }
        if self.tokens >= max_tokens {
            return Some(FinishReason::Length);
        }
        // The next step puts this token into the cache, after the earlier ones.
        self.row.token = id;
        self.row.position = self.request.tokens.len() + self.tokens - 1;
        (self.row.position >= capacity).then_some(FinishReason::Context)
    }

    /// Reports the end of the text.
    pub(super) fn finish(self, mut reason: FinishReason, sink: Sink<'_>) {
        let Self { number, tokens, decoder, mut text, started, .. } = self;
        if reason != FinishReason::Stop {
            // Text of an incomplete character, and text that could have become a stop string.
            let Shown { text: last, stopped } = text.push(&decoder.finish());
            sink(number, Output::Text(last));
            if stopped {
                reason = FinishReason::Stop;
            } else {
                sink(number, Output::Text(text.finish()));
            }
        }
        sink(number, Output::Finished(Completion { tokens, reason, time: started.elapsed() }));
    }
}
