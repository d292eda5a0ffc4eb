//! The model of `xlaunch serve`: continues the prompts of many clients at once.
//!
//! ```text
//! client --HTTP--> launcher --Job--> engine, the thread that owns the model: Batch --Output--> launcher --> client
//! ```
//! [`Service`] is what the launcher needs to know about the model: it encodes prompts and checks them, so that the
//! engine only receives requests that fit. A client that goes away drops its receiver, and the engine removes its
//! requests from the batch before the next step.
//!
//! Invariant: what a client receives depends on the model and its own request alone, not on the other clients. On a CPU
//! that holds for every bit.

mod engine;

use std::path::PathBuf;

use xlaunch_data::chat;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use crate::generate::{Prompt, SamplingOverrides, Settings};
use crate::pretrained::{Source, Target};

pub use crate::generate::{FinishReason, Options, Output, Request, Sampling, Scored, Token};
pub use engine::{Job, run};

/// Arguments of the command line.
#[derive(Clone, Debug)]
pub struct Command {
    /// See [`Source::find`].
    pub model: PathBuf,
    /// See [`Source::with_adapter`].
    pub adapter: Option<PathBuf>,
    /// See [`Source::tokenizer`].
    pub tokenizer: Option<String>,
    /// Maximum number of tokens of a text; `None` for the model's context.
    pub context: Option<usize>,
    /// Device and precision.
    pub target: Target,
}

impl Command {
    /// Finds the model, without reading its weights. `note` receives lines for the user.
    pub fn open(&self, note: &mut dyn FnMut(&str)) -> Result<(Source, Service), Refusal> {
        let Self { model, adapter, tokenizer, .. } = self;
        let user = SamplingOverrides::default();
        let (source, settings) =
            Settings::open(model, adapter.as_deref(), tokenizer.as_deref(), false, user, note)?;
        let (seq, vocab) = (source.shape.seq, source.shape.vocab);
        let context = self.context.unwrap_or(seq);
        if !(1..=seq).contains(&context) {
            let message =
                format!("--context {context} is out of range: expected 1 to {seq}, the model's own");
            return Err(Refusal::new(ExitCode::Usage, message));
        }
        Ok((source, Service { settings, context, vocab }))
    }
}

/// A model as its clients see it.
#[derive(Clone, Debug)]
pub struct Service {
    settings: Settings,
    /// Maximum number of tokens of a text that the model reads.
    pub context: usize,
    /// Number of ids that the model reads.
    pub vocab: usize,
}

impl Service {
    /// Returns the ids of a text, with those that the tokenizer puts before it. An error is the reason.
    pub fn text_prompt(&self, text: String) -> Result<Vec<u32>, String> {
        self.settings.tokens(&Prompt::Text(text))
    }

    /// Returns the ids of a chat, up to the point where the model answers. `variables` are further ones of the chat
    /// template by name, or none. An error is the reason.
    pub fn chat_prompt(&self, messages: chat::Value, variables: chat::Value) -> Result<Vec<u32>, String> {
        self.settings.tokens(&Prompt::Chat { messages, variables })
    }

    /// Returns the settings of a request, with the defaults of `xlaunch generate`.
    pub fn sampling(&self, user: SamplingOverrides) -> Sampling {
        self.settings.sampling(user)
    }

    /// Returns the text of a prompt that later ids do not change, and the number of characters before each id. `sent`
    /// is a prompt that was sent as text: its ids may have another text, for example around special tokens.
    pub fn echo(&self, ids: &[u32], sent: Option<&str>) -> (String, Vec<usize>) {
        let mut decoder = self.settings.tokenizer.decoder();
        let (mut text, mut length) = (String::new(), 0);
        let mut append = |part: &str| {
            text += part;
            length += part.chars().count();
            length
        };
        let start = |id: &u32| {
            let start = append(&decoder.settle(*id));
            append(&decoder.push(*id));
            start
        };
        let starts = ids.iter().map(start).collect();
        text += &decoder.end_prompt();
        let sent = sent.and_then(|sent| self.echo_sent(ids, sent, &decoder.finish()));
        sent.unwrap_or((text, starts))
    }

    /// Returns the part of a text before `held`, which the generated text repeats, and the number of characters before
    /// each of its ids. `None` if the ids or the end of the text are others.
    fn echo_sent(&self, ids: &[u32], sent: &str, held: &str) -> Option<(String, Vec<usize>)> {
        let text = sent.strip_suffix(held)?;
        let length = text.chars().count();
        let pieces = self.settings.tokenizer.encode_with_offsets(sent, false).ok()?;
        let own: Vec<u32> = pieces.iter().map(|(id, ..)| *id).collect();
        // The tokenizer's template may have put ids before and after those of the text.
        let before = (0..=ids.len()).find(|at| ids[*at..].starts_with(&own))?;
        let starts = pieces.iter().map(|(_, start, _)| (*start).min(length));
        let all = std::iter::repeat_n(0, before).chain(starts).chain(std::iter::repeat(length));
        Some((text.into(), all.take(ids.len()).collect()))
    }

    /// Returns the bytes of a token. A special token is written as in the tokenizer's file.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let tokenizer = &self.settings.tokenizer;
        match tokenizer.bytes_of(id) {
            Some(bytes) => bytes.to_vec(),
            None => tokenizer.added_token(id).unwrap_or_default().into(),
        }
    }

    /// Returns the text of a token. Bytes that are not whole characters are written as `bytes:\xe2\x82`, so that tokens
    /// with different bytes have different texts, and ids without text as [`token_name`].
    pub fn token_text(&self, id: u32) -> String {
        let bytes = self.token_bytes(id);
        if bytes.is_empty() {
            return token_name(id);
        }
        String::from_utf8(bytes).unwrap_or_else(|error| {
            let bytes = error.into_bytes();
            bytes.iter().fold("bytes:".into(), |text, byte| format!("{text}\\x{byte:02x}"))
        })
    }
}

/// Returns the name of a token that its text does not tell from others: `token_id:7`, as in vLLM.
pub fn token_name(id: u32) -> String {
    format!("token_id:{id}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use xlaunch_data::Tokenizer;

    use super::*;
    use crate::generate::Vocabulary;

    #[test]
    fn tokens_are_texts_or_bytes_and_begin_where_their_text_does() {
        let vocabulary = Vocabulary { size: 50_257, ends: Vec::new() };
        let settings = Settings::for_test(Tokenizer::gpt2(), vocabulary);
        let service = Service { settings, context: 8, vocab: 50_257 };
        let ids = service.text_prompt("I say \u{1f980}.".into()).unwrap();
        let texts: Vec<String> = ids.iter().map(|id| service.token_text(*id)).collect();
        assert_eq!(texts, ["I", " say", "bytes:\\x20\\xf0\\x9f", "bytes:\\xa6", "bytes:\\x80", "."]);
        let text = "I say \u{1f980}.";
        for sent in [None, Some(text)] {
            assert_eq!(service.echo(&ids, sent), (text.into(), vec![0, 1, 5, 6, 6, 7]));
        }
        let incomplete = [ids[0], ids[2], ids[5], ids[2]];
        assert_eq!(service.echo(&incomplete, None), ("I \u{fffd}. ".into(), vec![0, 1, 3, 4]));
        assert_eq!(service.token_text(50_256), "<|endoftext|>");
        assert_eq!(
            (service.token_text(50_257).as_str(), service.token_bytes(50_257)),
            ("token_id:50257", vec![])
        );
        assert_eq!(service.token_bytes(ids[3]), [0xa6]);
    }

    #[test]
    fn text_is_repeated_as_it_was_sent() {
        let bytes = (0..=u8::MAX).map(|byte| (format!("<0x{byte:02X}>"), usize::from(byte)));
        let pieces = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "\u{2581}a", "\u{2581}b"];
        let pieces = pieces.into_iter().zip(256..).map(|(piece, id)| (piece.to_owned(), id));
        let special = |id: usize, content: &str| {
            json!({
                "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false,
            })
        };
        let file = json!({
            "added_tokens": [special(257, "<s>"), special(258, "</s>")],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u{2581}"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
            ]},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}},
            },
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
            "model": {
                "type": "BPE", "unk_token": "<unk>", "byte_fallback": true,
                "vocab": bytes.chain(pieces).collect::<BTreeMap<String, usize>>(),
                "merges": ["\u{2581} a", "\u{2581} b"],
            },
        });
        let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
        let settings = Settings::for_test(tokenizer, Vocabulary { size: 264, ends: Vec::new() });
        let service = Service { settings, context: 8, vocab: 264 };
        let ids = service.text_prompt("a</s>b".into()).unwrap();
        assert_eq!(ids, [257, 262, 258, 263]);
        assert_eq!(service.echo(&ids, Some("a</s>b")), ("a</s>b".into(), vec![0, 0, 1, 5]));
        assert_eq!(service.echo(&ids, None).0, "<s> a</s> b");
        assert_eq!(service.echo(&[257], Some("")), (String::new(), vec![0]));
        // Bytes that are generated after it change no character of it.
        let ids = service.text_prompt("b\u{e9}".into()).unwrap();
        assert_eq!(ids, [257, 263, 0xc3, 0xa9]);
        assert_eq!(service.echo(&ids, Some("b\u{e9}")), ("b\u{e9}".into(), vec![0, 0, 1, 1]));
        assert_eq!(service.echo(&ids, None).0, "<s> b\u{e9}");
        // The generated text begins with a character that the prompt begins.
        assert_eq!(service.echo(&[&ids[..], &[0xe4]].concat(), None).0, "<s> b\u{e9}");
    }
}
