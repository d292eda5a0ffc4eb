//! Writes the `tokenizer.json` of GPT-2 and of byte models.
//!
//! GPT-2's vocabulary is available as ranks, that is, the bytes of each id. A `tokenizer.json` lists merges instead.
//! The merge that creates a token joins the two parts that remain when all lower ranks have merged its bytes. The order
//! of merges is that of the token ids.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::GPT2_END_OF_TEXT;

/// Returns GPT-2's `tokenizer.json`.
pub(super) fn json() -> String {
    let ranks = ranks();
    let ids: HashMap<&[u8], usize> =
        ranks.iter().enumerate().map(|(id, token)| (token.as_slice(), id)).collect();
    let merges: Vec<Value> = ranks
        .iter()
        .enumerate()
        .filter(|(_, token)| token.len() > 1)
        .map(|(id, token)| {
            let (left, right) = token.split_at(split(token, id, &ids));
            json!([spelled(left), spelled(right)])
        })
        .collect();
    let end_of_text = "<|endoftext|>";
    let mut vocab: Map<String, Value> =
        ranks.iter().enumerate().map(|(id, token)| (spelled(token), json!(id))).collect();
    vocab.insert(end_of_text.into(), json!(GPT2_END_OF_TEXT));
    let added = json!([{
        "id": GPT2_END_OF_TEXT, "content": end_of_text, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    }]);
    file(vocab, &Value::Array(merges), true, &added)
}

/// Returns a `tokenizer.json` with 256 ids, each of which is the byte of its value.
pub(super) fn bytes_json() -> String {
    let vocab = (0..=u8::MAX).map(|byte| (spelled(&[byte]), json!(byte))).collect();
    file(vocab, &json!([]), false, &json!([]))
}

/// Builds a file. `split_words`: split text into words by GPT-2's expression before merging.
fn file(vocab: Map<String, Value>, merges: &Value, split_words: bool, added: &Value) -> String {
    let byte_level = |use_regex: bool| {
        json!({
            "type": "ByteLevel",
            "add_prefix_space": false,
            "trim_offsets": true,
            "use_regex": use_regex,
        })
    };
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level(split_words),
        "post_processor": byte_level(true),
        "decoder": byte_level(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    });
    file.to_string()
}

/// Returns the bytes of each id.
fn ranks() -> Vec<Vec<u8>> {
    let encoding = tiktoken::encoding::r50k_base();
    (0..GPT2_END_OF_TEXT).map(|id| encoding.decode(&[id])).collect()
}

/// Returns the boundary between the two parts of a token that the last merge joins.
fn split(token: &[u8], id: usize, ids: &HashMap<&[u8], usize>) -> usize {
    let mut ends: Vec<usize> = (1..=token.len()).collect();
    while ends.len() > 2 {
        let rank = |index: usize| {
            let start = index.checked_sub(1).map_or(0, |before| ends[before]);
            ids.get(&token[start..ends[index + 1]]).copied().filter(|rank| *rank < id)
        };
        let lowest = (0..ends.len() - 1).filter_map(|index| Some((rank(index)?, index))).min();
        let Some((_, index)) = lowest else { break };
        ends.remove(index);
    }
    ends[0]
}

/// Spells a token's bytes as in a file: a printable character for each byte.
fn spelled(token: &[u8]) -> String {
    token
        .iter()
        .map(|byte| tokenizers_fast::utils::byte_level::BYTES_CHAR_LOOKUP[usize::from(*byte)])
        .collect()
}
