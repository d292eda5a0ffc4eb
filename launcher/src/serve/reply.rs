//! Texts in OpenAI's form: whole, or in pieces of a stream. Pure.

use serde_json::{Map, Value, json};
use xlaunch_worker::serve::{FinishReason, Output, Scored, Service, Token, token_name};

use super::plan::Plan;
use super::request::Endpoint;

/// Fields that all parts of a reply have in common.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    pub(super) endpoint: Endpoint,
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
    /// True if log-probabilities were requested.
    pub(super) logprobs: bool,
}

/// Part of a text, or all of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    tokens: Vec<Place>,
    pub(super) finish: Option<FinishReason>,
    /// Number of generated tokens, once the text is complete.
    pub(super) generated: usize,
}

/// A token, and where it begins.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    id: u32,
    start: usize,
    /// `None` for the first token of a prompt.
    scored: Option<Scored>,
}

impl Piece {
    /// Returns the beginning of a text: its prompt, if it repeats it.
    pub(super) fn beginning(plan: &Plan, index: usize) -> Self {
        let echo = plan.prompt(index).and_then(|prompt| prompt.echo.as_ref());
        Self { text: echo.map(|echo| echo.text.clone()).unwrap_or_default(), ..Self::default() }
    }

    /// Returns what an output adds to a text; `None` if it cannot be continued.
    pub(super) fn of(output: Output, plan: &Plan, index: usize) -> Option<Self> {
        let prompt = plan.prompt(index);
        let echo = prompt.and_then(|prompt| prompt.echo.as_ref());
        let mut piece = Self::default();
        match output {
            Output::Prompt(scores) => {
                let (ids, starts) = (prompt?.tokens.iter(), &echo?.starts);
                let scores = std::iter::once(None).chain(scores.into_iter().map(Some));
                let place =
                    |((id, start), scored): ((&u32, &usize), _)| Place { id: *id, start: *start, scored };
                piece.tokens = ids.zip(starts).zip(scores).map(place).collect();
            }
            Output::Token(Token { id, start, text, scored }) => {
                let before = echo.map_or(0, |echo| echo.text.chars().count());
                piece.text = text;
                piece.tokens.push(Place { id, start: before + start, scored });
            }
            Output::Text(text) => piece.text = text,
            Output::Finished(completion) => {
                (piece.finish, piece.generated) = (Some(completion.reason), completion.tokens);
            }
            Output::NotFinite => return None,
        }
        Some(piece)
    }

    /// Adds what follows.
    pub(super) fn append(&mut self, next: Self) {
        self.text += &next.text;
        self.tokens.extend(next.tokens);
        self.finish = next.finish.or(self.finish);
        self.generated += next.generated;
    }

    /// Returns whether it tells a client anything.
    pub(super) fn is_empty(&self, envelope: &Envelope) -> bool {
        self.text.is_empty() && self.finish.is_none() && (self.tokens.is_empty() || !envelope.logprobs)
    }
}

impl Envelope {
    /// Returns the reply with whole texts.
    pub(super) fn whole(&self, texts: &[Piece], prompt_tokens: usize, service: &Service) -> Value {
        let choices = texts.iter().enumerate().map(|(index, text)| {
            let mut choice = self.choice(index, text, service);
            match self.endpoint {
                Endpoint::Completions => choice["text"] = json!(text.text),
                Endpoint::Chat => choice["message"] = json!({"role": "assistant", "content": text.text}),
            }
            choice
        });
        let generated = texts.iter().map(|text| text.generated).sum();
        let mut reply = self.reply(choices.collect(), false);
        reply["usage"] = usage(prompt_tokens, generated);
        reply
    }

    /// Returns a part of a stream. `first` is set once for each text.
    pub(super) fn part(&self, index: usize, piece: &Piece, first: bool, service: &Service) -> Value {
        let mut choice = self.choice(index, piece, service);
        match self.endpoint {
            Endpoint::Completions => choice["text"] = json!(piece.text),
            Endpoint::Chat => {
                let mut delta = Map::new();
                if first {
                    delta.insert("role".into(), json!("assistant"));
                }
                if first || !piece.text.is_empty() {
                    delta.insert("content".into(), json!(piece.text));
                }
                choice["delta"] = Value::Object(delta);
            }
        }
        self.reply(vec![choice], true)
    }

    /// Returns the last part of a stream, with the numbers of tokens.
    pub(super) fn usage_part(&self, prompt_tokens: usize, generated: usize) -> Value {
        let mut reply = self.reply(Vec::new(), true);
        reply["usage"] = usage(prompt_tokens, generated);
        reply
    }

    fn reply(&self, choices: Vec<Value>, is_part: bool) -> Value {
        let object = match (self.endpoint, is_part) {
            (Endpoint::Completions, _) => "text_completion",
            (Endpoint::Chat, false) => "chat.completion",
            (Endpoint::Chat, true) => "chat.completion.chunk",
        };
        let Self { id, created, model, .. } = self;
        json!({ "id": id, "object": object, "created": created, "model": model, "choices": choices })
    }

    fn choice(&self, index: usize, piece: &Piece, service: &Service) -> Value {
        let logprobs = match self.endpoint {
            _ if !self.logprobs => Value::Null,
            Endpoint::Completions => completion_logprobs(&piece.tokens, service),
            Endpoint::Chat => chat_logprobs(&piece.tokens, service),
        };
        let finish = piece.finish.map(|reason| match reason {
            FinishReason::EndOfText | FinishReason::Stop => "stop",
            FinishReason::Length | FinishReason::Context | FinishReason::PromptTooLong => "length",
        });
        json!({ "index": index, "logprobs": logprobs, "finish_reason": finish })
    }
}

fn usage(prompt: usize, generated: usize) -> Value {
    json!({ "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated })
}

/// Parallel lists. The alternatives of a token are an object with the token itself, whether or not it is among the most
/// likely ones.
fn completion_logprobs(tokens: &[Place], service: &Service) -> Value {
    let text = |id: u32| service.token_text(id);
    let top = |place: &Place| Some(alternatives(place.scored.as_ref()?, text));
    json!({
        "tokens": tokens.iter().map(|place| text(place.id)).collect::<Vec<_>>(),
        "token_logprobs":
            tokens.iter().map(|place| place.scored.as_ref().map(|it| it.logprob)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|place| place.start).collect::<Vec<_>>(),
    })
}

/// Returns log-probabilities by text. Of tokens with the same text, such as a byte and its character, the token itself
/// has the text, otherwise the most likely one; the others have their ids.
fn alternatives(scored: &Scored, text: impl Fn(u32) -> String) -> Map<String, Value> {
    let others = scored.top.iter().copied().filter(|(id, _)| *id != scored.token);
    let mut found = Map::new();
    for (id, logprob) in std::iter::once((scored.token, scored.logprob)).chain(others) {
        let text = text(id);
        let key = if found.contains_key(&text) { token_name(id) } else { text };
        found.insert(key, json!(logprob));
    }
    found
}

fn chat_logprobs(tokens: &[Place], service: &Service) -> Value {
    let entry = |id: u32, logprob: f64| {
        let (token, bytes) = (service.token_text(id), service.token_bytes(id));
        json!({ "token": token, "logprob": logprob, "bytes": bytes })
    };
    let content = tokens.iter().filter_map(|place| {
        let scored = place.scored.as_ref()?;
        let mut value = entry(scored.token, scored.logprob);
        value["top_logprobs"] = scored.top.iter().map(|(id, logprob)| entry(*id, *logprob)).collect();
        Some(value)
    });
    json!({ "content": content.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_with_the_same_text_are_alternatives_of_their_own() {
        let text = |id: u32| ["A", "A", "B", "A"][id as usize].to_owned();
        let found = |token, logprob, top: &[(u32, f64)]| {
            Value::Object(alternatives(&Scored { token, logprob, top: top.to_vec() }, text))
        };
        assert_eq!(
            found(1, -2.0, &[(0, -1.0), (1, -2.0), (2, -3.0)]),
            json!({"A": -2.0, "token_id:0": -1.0, "B": -3.0})
        );
        assert_eq!(
            found(2, -9.0, &[(0, -1.0), (3, -2.0), (1, -3.0)]),
            json!({"B": -9.0, "A": -1.0, "token_id:3": -2.0, "token_id:1": -3.0})
        );
    }
}
