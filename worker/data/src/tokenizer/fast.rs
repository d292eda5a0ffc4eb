//! Encodes with files of common kinds several times faster than [`Exact`](super::exact::Exact), with the same ids.
//!
//! The accepted kinds have been compared with `Exact` for all characters: see the tests. All other kinds, and text that
//! a normalizer would change, are left to `Exact`.

use serde_json::{Map, Value, json};
use tokenizers_fast::pipeline::{EncodeOptions, Override, PipelineToken, PipelineTokenizer};
use unicode_normalization_alignments::UnicodeNormalization;

use super::template;
use crate::quiet;

/// Encoders of one file.
#[derive(Clone)]
pub(super) struct Fast {
    /// Encodes texts, and first pieces of texts.
    start: PipelineTokenizer,
    /// Encodes pieces that continue a text, if they need another encoder: without the prefix that is written before a
    /// text.
    rest: Option<PipelineTokenizer>,
    /// True if texts must be in NFC, because the file requires it.
    nfc: bool,
}

impl Fast {
    /// Opens a file of a known kind.
    pub(super) fn open(file: &Map<String, Value>) -> Option<Self> {
        let nfc = file.get("normalizer").is_some_and(|normalizer| normalizer["type"] == "NFC");
        let known = file.get("model").is_some_and(|model| model["type"] != "Unigram")
            && (nfc || is_known_normalizer(file.get("normalizer")))
            && is_known_pre_tokenizer(file.get("pre_tokenizer"))
            && added_tokens_are_plain(file.get("added_tokens"));
        if !known {
            return None;
        }
        let mut file = file.clone();
        extend_small_tables(&mut file)?;
        if nfc {
            file.remove("normalizer");
        }
        for frame in ["post_processor", "padding", "truncation"] {
            file.remove(frame);
        }
        let start = load(file.clone())?;
        let rest = if template::remove_prefix_of(&mut file) { Some(load(file)?) } else { None };
        Some(Self { start, rest, nfc })
    }

    /// Returns whether the ids of this text are those of the file.
    pub(super) fn takes(&self, text: &str) -> bool {
        text.is_ascii()
            || ((!self.nfc || text.nfc().map(|(character, _)| character).eq(text.chars()))
                && !text.chars().any(|character| character == UNUSED || is_disputed(character)))
    }

    /// Appends the ids of a text, or of a piece that continues one.
    pub(super) fn encode(&self, text: &str, first: bool, ids: &mut Vec<u32>) -> Result<(), String> {
        let pipeline = self.rest.as_ref().filter(|_| !first).unwrap_or(&self.start);
        let mut new: Vec<PipelineToken> = Vec::with_capacity(text.len() / 3);
        pipeline.encode_into(text, &OPTIONS, &mut new).map_err(|error| error.to_string())?;
        ids.extend_from_slice(PipelineToken::cast_slice(&new));
        Ok(())
    }
}

/// Number of keys for which the crate finds a perfect hash at the first attempt. With fewer, an attempt may fail, which
/// its hash library prints.
const MANY_KEYS: usize = 150;
/// Sizes of vocabularies with fewer pairs to hash. Those of the first 512 tokens are not hashed.
const FEW_PAIRS: std::ops::RangeInclusive<usize> = 513..=2048;
/// A code point that is not a character. Texts with it are left to `Exact`, so that no text has a token with it.
const UNUSED: char = '\u{10ffff}';

const OPTIONS: EncodeOptions = EncodeOptions {
    add_special_tokens: false,
    encode_special_tokens: true,
    padding: Override::Off,
    truncation: Override::Off,
};

fn load(file: Map<String, Value>) -> Option<PipelineTokenizer> {
    let mut value = Value::Object(file);
    quiet::catch(|| {
        tokenizers_fast::canonicalize_value(&mut value).ok()?;
        tokenizers_fast::from_json(&serde_json::to_string(&value).ok()?).ok()
    })
    .ok()?
}

/// Returns whether the libraries may disagree about the class of a character.
pub(super) fn is_disputed(character: char) -> bool {
    let code = u32::from(character);
    let after = NEW_CHARACTERS.partition_point(|(_, last)| *last < code);
    NEW_CHARACTERS.get(after).is_some_and(|(first, _)| *first <= code)
}

/// Characters added to Unicode since version 15, with unassigned ones between them. Libraries of different versions
/// disagree on whether they are letters.
const NEW_CHARACTERS: [(u32, u32); 88] = [
    (0x558, 0x558),
    (0x58b, 0x58c),
    (0x5c8, 0x5c9),
    (0x88f, 0x88f),
    (0x897, 0x897),
    (0xb53, 0xb54),
    (0xc5c, 0xc5c),
    (0xcdc, 0xcdc),
    (0xcf3, 0xcf3),
    (0xece, 0xece),
    (0x1acf, 0x1af0),
    (0x1b4e, 0x1b4f),
    (0x1b7f, 0x1b7f),
    (0x1c89, 0x1c8a),
    (0x208f, 0x208f),
    (0x209d, 0x209f),
    (0x20c1, 0x20c4),
    (0x2427, 0x2429),
    (0x2b96, 0x2b96),
    (0x2e60, 0x2e63),
    (0x2ffc, 0x2fff),
    (0x31e4, 0x31ef),
    (0xa7cb, 0xa7cf),
    (0xa7d2, 0xa7d2),
    (0xa7d4, 0xa7d4),
    (0xa7da, 0xa7f1),
    (0xab6c, 0xab6d),
    (0xfbc3, 0xfbd2),
    (0xfd90, 0xfd91),
    (0xfdc8, 0xfdce),
    (0x105c0, 0x105f3),
    (0x107bb, 0x107bf),
    (0x10940, 0x10959),
    (0x10d40, 0x10d8f),
    (0x10ec2, 0x10eff),
    (0x1123f, 0x11241),
    (0x11380, 0x113e2),
    (0x116d0, 0x116e3),
    (0x11b00, 0x11bf9),
    (0x11db0, 0x11df1),
    (0x11f00, 0x11f5a),
    (0x1246f, 0x1246f),
    (0x12475, 0x1247f),
    (0x12550, 0x12686),
    (0x1342f, 0x1342f),
    (0x13439, 0x143fa),
    (0x16100, 0x16139),
    (0x16d40, 0x16d79),
    (0x16ea0, 0x16ed3),
    (0x16ff2, 0x16ff6),
    (0x187f8, 0x187ff),
    (0x18cd6, 0x18cff),
    (0x18d09, 0x191d2),
    (0x1b123, 0x1b132),
    (0x1b155, 0x1b155),
    (0x1b168, 0x1b168),
    (0x1cc00, 0x1cefd),
    (0x1d127, 0x1d128),
    (0x1d1eb, 0x1d1ff),
    (0x1d250, 0x1d2d3),
    (0x1d6a6, 0x1d6a6),
    (0x1db00, 0x1db1c),
    (0x1df1f, 0x1dfff),
    (0x1e030, 0x1e08f),
    (0x1e4d0, 0x1e6ff),
    (0x1f1ae, 0x1f1ae),
    (0x1f6d8, 0x1f6dc),
    (0x1f774, 0x1f77f),
    (0x1f7d9, 0x1f7db),
    (0x1f7f1, 0x1f7ff),
    (0x1f8b2, 0x1f8d8),
    (0x1fa54, 0x1fa57),
    (0x1fa75, 0x1fa77),
    (0x1fa87, 0x1fa8f),
    (0x1faad, 0x1faaf),
    (0x1fabb, 0x1fabf),
    (0x1fac6, 0x1facf),
    (0x1fada, 0x1fadf),
    (0x1fae8, 0x1faef),
    (0x1faf7, 0x1fafa),
    (0x1fbcb, 0x1fbef),
    (0x1fbfa, 0x1fbfa),
    (0x2b739, 0x2b73f),
    (0x2b81e, 0x2b81e),
    (0x2cea2, 0x2cead),
    (0x2ebf0, 0x2ee5d),
    (0x31350, 0x33479),
    (0x3d000, 0x3fc3f),
];

/// Accepts no normalizer, or that of Llama 2: a space before the text, and U+2581 for spaces.
fn is_known_normalizer(normalizer: Option<&Value>) -> bool {
    let replaces = |member: &Value| {
        member["type"] == "Replace" && member["pattern"]["String"] == " " && member["content"] == "\u{2581}"
    };
    let prepends = |member: &Value| member["type"] == "Prepend" && member["prepend"] == "\u{2581}";
    match normalizer {
        None | Some(Value::Null) => true,
        Some(sequence) if sequence["type"] == "Sequence" => {
            let members = sequence["normalizers"].as_array().map_or(&[][..], Vec::as_slice);
            matches!(members, [first, second] if prepends(first) && replaces(second))
        }
        Some(only) => replaces(only),
    }
}

/// Accepts byte-level words by the expressions that the crate implements in code, digits, or no words.
fn is_known_pre_tokenizer(pre_tokenizer: Option<&Value>) -> bool {
    let Some(pre_tokenizer) = pre_tokenizer.filter(|value| !value.is_null()) else { return true };
    let members = match pre_tokenizer["type"].as_str() {
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice),
        _ => std::slice::from_ref(pre_tokenizer),
    };
    let patterns: Vec<&str> = members.iter().filter_map(isolating_expression).collect();
    let is_deepseek = matches!(*patterns, [a, b, c] if tokenizers_fast::utils::is_deepseek(a, b, c));
    members.iter().enumerate().all(|(at, member)| match member["type"].as_str() {
        Some("ByteLevel") => member["add_prefix_space"] == false && at + 1 == members.len(),
        Some("Split") => {
            let recognized = |pattern| is_deepseek || tokenizers_fast::utils::recognize(pattern).is_some();
            isolating_expression(member).is_some_and(recognized)
        }
        Some("Digits") => true,
        Some("Metaspace") => members.len() == 1,
        _ => false,
    })
}

/// Returns the expression of a `Split` whose matches are words.
fn isolating_expression(member: &Value) -> Option<&str> {
    let isolates = match member["behavior"].as_str()? {
        "Isolated" => member["invert"] == false,
        "Removed" => member["invert"] == true,
        _ => false,
    };
    member["pattern"]["Regex"].as_str().filter(|_| isolates)
}

/// Extends small tables that the crate hashes by tokens that no text has; `None` if the file has such a token itself.
fn extend_small_tables(file: &mut Map<String, Value>) -> Option<()> {
    let vocab = file.get("model")?["vocab"].as_object()?.len();
    if let Some(added) = file.get_mut("added_tokens").and_then(Value::as_array_mut) {
        // Special tokens are text here.
        if added.iter().all(|token| token["special"] == true) {
            added.clear();
        }
        if let Some(first) = added.first().and_then(|token| token["content"].as_str()).map(String::from) {
            // The crate is fastest if all begin alike.
            added.extend((added.len()..MANY_KEYS).map(|number| {
                json!({
                    "id": vocab + number, "content": format!("{first}{UNUSED}{number}"), "special": true,
                    "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                })
            }));
            // A larger vocabulary would change the ids of these tokens.
            return Some(());
        }
    }
    if !FEW_PAIRS.contains(&vocab) {
        return Some(());
    }
    let model = file.get_mut("model")?;
    let (mut token, are_lists) = (String::new(), model["merges"][0].is_array());
    for id in vocab..vocab + MANY_KEYS + 2 {
        if !token.is_empty() {
            let merge = if are_lists { json!([token, UNUSED]) } else { format!("{token} {UNUSED}").into() };
            model["merges"].as_array_mut()?.push(merge);
        }
        token.push(UNUSED);
        if model["vocab"].as_object_mut()?.insert(token.clone(), id.into()).is_some() {
            return None;
        }
    }
    Some(())
}

/// Returns whether the added tokens that are found within text are independent of their surroundings, and consume none
/// of them.
fn added_tokens_are_plain(added: Option<&Value>) -> bool {
    let list = added.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    list.iter().filter(|token| token["special"] != true).all(|token| {
        ["lstrip", "rstrip", "single_word", "normalized"].iter().all(|flag| token[*flag] != true)
    })
}
