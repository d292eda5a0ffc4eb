//! Encodes with the crate that Python's `tokenizers` is built from, so that ids are the same for any file.
//!
//! Its errors and panics (mostly caused by expressions that need too many steps) become errors and are not printed.

use std::collections::HashSet;
use std::sync::OnceLock;

use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use super::template;
use crate::quiet;

/// Part of the message with which the crate panics if an expression takes too many steps.
const STEP_LIMIT: &str = "retry-limit-in-match";

/// A file's tokenizers, each opened on first use.
#[derive(Debug, Default)]
pub(super) struct Exact {
    documents: OnceLock<Result<Tokenizer, String>>,
    continued: OnceLock<Result<Tokenizer, String>>,
    prompts: OnceLock<Result<Tokenizer, String>>,
    /// The same tokenizer without the template of the file, which may shorten the ranges of tokens.
    unframed: OnceLock<Result<Tokenizer, String>>,
}

impl Exact {
    /// Returns the ids of a text, in which special tokens count as text. `first`: the text does not continue another
    /// piece.
    pub(super) fn encode(&self, json: &str, text: &str, first: bool) -> Result<Vec<u32>, String> {
        let documents = self.documents.get_or_init(|| open(json, |_| {}, true));
        let tokenizer = if first || !template::has_prefix(json) {
            documents
        } else {
            self.continued.get_or_init(|| open(json, template::remove_prefix, true))
        };
        encode(tokenizer, text, false)
    }

    /// Returns the ids of a prompt as Python encodes it: special tokens within it become ids, and `framed` adds the ids
    /// of the file's template.
    pub(super) fn encode_prompt(&self, json: &str, text: &str, framed: bool) -> Result<Vec<u32>, String> {
        encode(self.prompts.get_or_init(|| open(json, |_| {}, false)), text, framed)
    }

    /// Returns the ids of a prompt without the template of the file, each with its range of characters. `trimmed`: the
    /// ranges are those of Python, which may leave out white space.
    pub(super) fn encode_with_offsets(
        &self,
        json: &str,
        text: &str,
        trimmed: bool,
    ) -> Result<Vec<(u32, usize, usize)>, String> {
        let tokenizer = if trimmed {
            self.prompts.get_or_init(|| open(json, |_| {}, false))
        } else {
            let unframed = |file: &mut Map<String, Value>| {
                file.remove("post_processor");
            };
            self.unframed.get_or_init(|| open(json, unframed, false))
        };
        let tokenizer = tokenizer.as_ref().map_err(Clone::clone)?;
        let encoded = quiet::catch(|| tokenizer.encode_char_offsets(text, false)).map_err(describe)?;
        let encoding = encoded.map_err(|error| error.to_string())?;
        let pieces = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(pieces.map(|(id, (start, end))| (*id, *start, *end)).collect())
    }

    /// Returns the text of ids, including special tokens.
    pub(super) fn decode(&self, json: &str, ids: &[u32]) -> Option<String> {
        let tokenizer = self.prompts.get_or_init(|| open(json, |_| {}, false)).as_ref().ok()?;
        quiet::catch(|| tokenizer.decode(ids, false)).ok()?.ok()
    }

    /// Opens the tokenizer for documents, to check that it works.
    pub(super) fn check(&self, json: &str) -> Result<(), String> {
        // Some errors and panics occur only during encoding.
        self.encode(json, "A b\u{e9}\u{4e16}\n", true).map(|_| ())
    }
}

/// Returns the parts of a file that decide ids, its added tokens separately, in the form in which the crate writes
/// them: files of one tokenizer differ in defaults that they leave out, and in how they write merges.
pub(super) fn parts(json: &str) -> Result<(Value, HashSet<String>), String> {
    let without_text = |file: &mut Map<String, Value>| {
        for part in ["post_processor", "decoder"] {
            file.remove(part);
        }
    };
    let mut file =
        serde_json::to_value(&*open(json, without_text, true)?).map_err(|error| error.to_string())?;
    let added = file["added_tokens"].take();
    Ok((file, added.as_array().into_iter().flatten().map(ToString::to_string).collect()))
}

fn open(
    json: &str,
    change: impl FnOnce(&mut Map<String, Value>),
    special_tokens_are_text: bool,
) -> Result<Tokenizer, String> {
    let mut file: Map<String, Value> = serde_json::from_str(json).map_err(|error| error.to_string())?;
    // Padding and truncation are not wanted: only whole documents are prepared, and callers limit prompts.
    file.remove("padding");
    file.remove("truncation");
    change(&mut file);
    let text = serde_json::to_string(&file).map_err(|error| error.to_string())?;
    drop(file);
    let opened = quiet::catch(|| text.parse::<Tokenizer>())
        .map_err(|panic| format!("not a tokenizer that can be used: {panic}"))?;
    let mut tokenizer = opened.map_err(|error| error.to_string())?;
    tokenizer.set_encode_special_tokens(special_tokens_are_text);
    Ok(tokenizer)
}

fn encode(tokenizer: &Result<Tokenizer, String>, text: &str, framed: bool) -> Result<Vec<u32>, String> {
    let tokenizer = tokenizer.as_ref().map_err(Clone::clone)?;
    let encoded = quiet::catch(|| tokenizer.encode_fast(text, framed)).map_err(describe)?;
    encoded.map(|encoding| encoding.get_ids().to_vec()).map_err(|error| error.to_string())
}

/// Describes a panic during encoding.
fn describe(panic: String) -> String {
    if panic.contains(STEP_LIMIT) {
        "its expressions take too many steps on this text".into()
    } else {
        format!("the library `tokenizers` fails on this text: {panic}")
    }
}
