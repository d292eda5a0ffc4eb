//! Checks a `tokenizer.json`, and opens it.
//!
//! The encoding crates renumber added tokens whose ids do not follow the vocabulary, and panic on some contradictions,
//! so all of this is checked first.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::{Map, Value};

use super::METASPACE;
use super::config::{self, AddedToken};
use super::cuts::Cuts;
use super::exact::Exact;
use super::fast::Fast;
use super::{Tokens, template};

/// Maximum number of tokens: more than any vocabulary in use.
const MAX_VOCAB_TOKENS: usize = 1 << 22;
/// Maximum length of a token, which is the crate's own limit.
const MAX_TOKEN_BYTES: usize = 65_535;
/// Maximum number of JSON values, each of which takes 32 bytes: 20 times the number for a vocabulary of 128,256.
const MAX_VALUES: usize = 1 << 24;
/// Added tokens that end or start documents, in order of preference. Used for files without a configuration next to
/// them.
const END_OF_TEXT: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<|eos|>",
    "<|bos|>",
];

/// A usable file.
pub(super) struct Opened {
    /// Its text, with the tokens that were added to it.
    pub(super) json: String,
    pub(super) end_of_text: Option<u32>,
    /// The ids that the file's template puts before a text.
    pub(super) prefix: Vec<u32>,
    pub(super) tokens: Tokens,
    /// Ids of added tokens.
    pub(super) added: HashMap<String, u32>,
    /// Fast encoder, for files of common kinds.
    pub(super) fast: Option<Fast>,
    pub(super) exact: Exact,
    pub(super) cuts: Cuts,
}

/// Opens a file with this text, and adds tokens of its vocabulary. The error is the reason.
pub(super) fn open(mut json: String, declared: &[AddedToken]) -> Result<Opened, String> {
    let mut file = parse(&json)?;
    let vocab = check_model(&file)?;
    if config::add_tokens(&mut file, declared) {
        json = serde_json::to_string(&file).map_err(|error| error.to_string())?;
    }
    let added = added_tokens(&file, &vocab)?;
    let (fast, exact) = (Fast::open(&file), Exact::default());
    if fast.is_none() {
        exact.check(&json)?;
    }
    let tokens = tokens(&file, &vocab, &added);
    let cuts = Cuts::of(&file, vocab.keys().filter_map(|id| tokens.get(*id)));
    let ids: HashMap<String, u32> = added.into_iter().map(|(id, token)| (token.content, id)).collect();
    let end_of_text = END_OF_TEXT.iter().find_map(|name| ids.get(*name).copied());
    let prefix = template::prefix(&file);
    Ok(Opened { json, end_of_text, prefix, tokens, added: ids, fast, exact, cuts })
}

/// Opens another fast encoder for a file of a common kind.
pub(super) fn reopen_fast(json: &str) -> Option<Fast> {
    Fast::open(&parse(json).ok()?)
}

fn parse(json: &str) -> Result<Map<String, Value>, String> {
    let separators = json.bytes().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count();
    if separators > MAX_VALUES {
        return Err(format!("more than {MAX_VALUES} values"));
    }
    match serde_json::from_str(json).map_err(|error| format!("not valid JSON: {error}"))? {
        Value::Object(file) => Ok(file),
        _ => Err("not a JSON object".into()),
    }
}

/// Returns the tokens of the model by id. Checks that their ids are 0, 1, 2 ..., and that merges join tokens to tokens.
fn check_model(file: &Map<String, Value>) -> Result<BTreeMap<u32, String>, String> {
    let model = file.get("model").and_then(Value::as_object).ok_or("it has no `model`")?;
    let is_unigram = match model.get("type").and_then(Value::as_str) {
        None | Some("BPE") => false,
        Some("Unigram") => true,
        Some(kind) => {
            return Err(format!(
                "model type `{}` is not supported; expected `BPE` or `Unigram`",
                shown(kind)
            ));
        }
    };
    for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model.get(affix).and_then(Value::as_str).is_some_and(|affix| !affix.is_empty()) {
            return Err(format!("`model.{affix}` is not supported"));
        }
    }
    if model.get("dropout").is_some_and(|dropout| !dropout.is_null() && *dropout != 0.0) {
        return Err("`model.dropout` is not supported: the same text would have other ids every time".into());
    }
    if is_unigram {
        let list = model.get("vocab").and_then(Value::as_array).ok_or("it has no `model.vocab`")?;
        let pieces: Option<Vec<&str>> = list.iter().map(|piece| piece[0].as_str()).collect();
        let pieces = pieces.ok_or("an entry of `model.vocab` is not a pair of token and score")?;
        return check_vocab(pieces.len(), pieces.into_iter().zip((0..).map(Some)));
    }
    let ids = model.get("vocab").and_then(Value::as_object).ok_or("it has no `model.vocab`")?;
    let entries = ids.iter().map(|(token, id)| (token.as_str(), id.as_u64()));
    let vocab = check_vocab(ids.len(), entries)?;
    check_merges(model.get("merges").unwrap_or(&Value::Null), ids)?;
    Ok(vocab)
}

/// Returns the tokens of a vocabulary of this size by id.
fn check_vocab<'a>(
    size: usize,
    entries: impl Iterator<Item = (&'a str, Option<u64>)>,
) -> Result<BTreeMap<u32, String>, String> {
    if size == 0 || size > MAX_VOCAB_TOKENS {
        return Err(format!("a vocabulary of {size} tokens; expected 1 to {MAX_VOCAB_TOKENS}"));
    }
    let mut vocab = BTreeMap::new();
    for (token, id) in entries {
        let id = id.filter(|id| *id < size as u64).and_then(|id| u32::try_from(id).ok());
        let shown = shown(token);
        let Some(id) = id else {
            return Err(format!(
                "the id of `{shown}` is not below the vocabulary's size, {size}: ids must have no gaps"
            ));
        };
        if token.len() > MAX_TOKEN_BYTES {
            return Err(format!("the token `{shown}` has more than {MAX_TOKEN_BYTES} bytes"));
        }
        if let Some(other) = vocab.insert(id, token.to_owned()) {
            let other = self::shown(&other);
            return Err(format!("`{shown}` and `{other}` have the same id, {id}"));
        }
    }
    Ok(vocab)
}

fn check_merges(merges: &Value, vocab: &Map<String, Value>) -> Result<(), String> {
    let merges = merges.as_array().ok_or("it has no `model.merges`")?;
    if merges.len() > MAX_VOCAB_TOKENS {
        return Err(format!("more than {MAX_VOCAB_TOKENS} merges"));
    }
    let mut joined = String::new();
    for (index, merge) in merges.iter().enumerate() {
        let parts = match merge {
            Value::String(text) if text.starts_with("#version") => continue,
            Value::String(text) => text.split_once(' '),
            Value::Array(pair) if pair.len() == 2 => pair[0].as_str().zip(pair[1].as_str()),
            _ => None,
        };
        let (left, right) = parts.ok_or_else(|| format!("merge {index} is not a pair of tokens"))?;
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        if let Some(unknown) = [left, right, &joined].into_iter().find(|token| !vocab.contains_key(*token)) {
            let unknown = shown(unknown);
            return Err(format!("merge {index} names `{unknown}`, which is not in the vocabulary"));
        }
    }
    Ok(())
}

struct Added {
    content: String,
    special: bool,
}

/// Returns the added tokens by id. Checks that each one is in the vocabulary under its id, or that they follow the
/// vocabulary without gaps.
fn added_tokens(
    file: &Map<String, Value>,
    vocab: &BTreeMap<u32, String>,
) -> Result<BTreeMap<u32, Added>, String> {
    let list = match file.get("added_tokens") {
        None | Some(Value::Null) => return Ok(BTreeMap::new()),
        Some(list) => list.as_array().ok_or("`added_tokens` is not a list")?,
    };
    if list.len() > MAX_VOCAB_TOKENS {
        return Err(format!("more than {MAX_VOCAB_TOKENS} added tokens"));
    }
    let known: HashMap<&str, u32> = vocab.iter().map(|(id, token)| (token.as_str(), *id)).collect();
    let (mut added, mut contents) = (BTreeMap::new(), HashSet::new());
    for (index, token) in list.iter().enumerate() {
        let content = token.get("content").and_then(Value::as_str);
        let id = token.get("id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
        let (Some(content), Some(id)) = (content, id) else {
            return Err(format!("added token {index} has no `content` or no valid `id`"));
        };
        let shown = shown(content);
        let contradicts = match (known.get(content), vocab.get(&id)) {
            (Some(known), _) => *known != id,
            (None, other) => other.is_some(),
        };
        if content.is_empty() || content.len() > MAX_TOKEN_BYTES || contradicts || !contents.insert(content) {
            return Err(format!("the added token `{shown}` (id {id}) contradicts the other tokens"));
        }
        let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
        if added.insert(id, Added { content: content.to_owned(), special }).is_some() {
            return Err(format!("two added tokens have the id {id}"));
        }
    }
    let after = added.keys().filter(|id| !vocab.contains_key(id));
    for (expected, id) in (vocab.len() as u64..).zip(after) {
        if u64::from(*id) != expected {
            return Err(format!("the added token of id {id} leaves a gap: the next id is {expected}"));
        }
    }
    Ok(added)
}

fn tokens(file: &Map<String, Value>, vocab: &BTreeMap<u32, String>, added: &BTreeMap<u32, Added>) -> Tokens {
    let model = file.get("model").unwrap_or(&Value::Null);
    let byte_fallback = model["byte_fallback"] == true;
    let decoders = template::members(file.get("decoder"), "decoders");
    let decoded_by = |kind: &str| decoders.iter().any(|decoder| decoder["type"] == kind);
    let (byte_level, bytes_in_runs) = (decoded_by("ByteLevel"), decoded_by("ByteFallback"));
    let metaspace = file.get("decoder").is_some_and(|decoder| decoder.to_string().contains(METASPACE));
    let mut tokens = Tokens { concatenate: byte_level, ..Tokens::default() };
    let end = vocab.len().max(added.last_key_value().map_or(0, |(id, _)| *id as usize + 1));
    for id in (0..).take(end) {
        let out = &mut tokens.bytes;
        match (added.get(&id), vocab.get(&id)) {
            (Some(added), _) => out.extend(added.content.bytes()),
            (None, Some(token)) if byte_level => out.extend(byte_level_bytes(token)),
            (None, Some(token)) => match fallback_byte(token).filter(|_| byte_fallback) {
                Some(byte) => out.push(byte),
                None if metaspace => out.extend(token.replace(METASPACE, " ").bytes()),
                None => out.extend(token.bytes()),
            },
            (None, None) => {}
        }
        tokens.ends.push(tokens.bytes.len());
    }
    tokens.special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
    if bytes_in_runs {
        let all = vocab.iter().map(|(id, token)| (*id, token.as_str()));
        let all = all.chain(added.iter().map(|(id, token)| (*id, token.content.as_str())));
        tokens.fallback = all.filter(|(_, token)| fallback_byte(token).is_some()).map(|(id, _)| id).collect();
        let has_text = |id: &u32| tokens.get(*id).is_some_and(|bytes| !bytes.is_empty());
        tokens.separator = vocab.keys().copied().find(|id| !tokens.fallback.contains(id) && has_text(id));
    }
    tokens
}

/// Returns the bytes that the characters of a byte-level token stand for. As in the crate, other characters stand for
/// themselves.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for character in token.chars() {
        match tokenizers_fast::utils::byte_level::char_to_byte(character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend(character.encode_utf8(&mut [0; 4]).bytes()),
        }
    }
    bytes
}

/// Returns the start of a token, for messages.
fn shown(token: &str) -> String {
    token.escape_debug().take(40).collect()
}

/// Returns the byte of `<0xNN>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2)
}
