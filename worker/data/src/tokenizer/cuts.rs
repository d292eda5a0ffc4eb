//! Where a text can be cut without changing its ids. Pure.
//!
//! Long texts are encoded in pieces: memory stays bounded, and threads share the work. Ids are the same as for the whole
//! text if no word, as the tokenizer sees words, spans the cut:
//!
//! - GPT-2's words end before white space that follows anything else;
//! - for files, a letter or digit before white space ends a word in every expression that the crate `tokenizers` knows,
//!   and tokens do not span it if the vocabulary has none that contain a letter or digit before white space.
//!
//! Files for which this cannot be shown, and texts without such a place, are cut after [`LONGEST_PIECE`] bytes.

use serde_json::{Map, Value};

/// Texts are encoded in pieces of about this size. Long enough that cuts cost nothing, short enough for caches.
pub(super) const PIECE: usize = 64 << 10;
/// The longest piece that is encoded at once: 4 MiB of spaces are the longest that any test compares.
pub(crate) const LONGEST_PIECE: usize = 9 << 19;

/// The places where a tokenizer's texts can be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cuts {
    /// Between any two characters.
    Anywhere,
    /// After anything but white space, before white space.
    WordEnd,
    /// After a letter or digit, before white space.
    LetterEnd,
    /// Unknown.
    Nowhere,
}

impl Cuts {
    /// The last place in `text` at which it can be cut, above `min`. `text` need not be UTF-8.
    pub(crate) fn last(self, text: &[u8], min: usize) -> Option<usize> {
        if self == Self::Anywhere {
            return Some(character_start(text, text.len())).filter(|cut| *cut > min);
        }
        (min + 1..text.len()).rev().find(|cut| self.is_cut(text, *cut))
    }

    /// Whether the text can be cut before byte `at`, which is not the first.
    fn is_cut(self, text: &[u8], at: usize) -> bool {
        if !matches!(text[at], b' ' | b'\t' | b'\n' | b'\r') {
            return false;
        }
        let Some(before) = character_before(text, at) else { return false };
        match self {
            Self::Anywhere => true,
            Self::WordEnd => !before.is_whitespace(),
            Self::LetterEnd => before.is_alphanumeric(),
            Self::Nowhere => false,
        }
    }

    /// For a file in canonical form whose tokens these are.
    pub(super) fn of<'a>(file: &Map<String, Value>, mut tokens: impl Iterator<Item = &'a [u8]>) -> Self {
        let local = normalizers(file.get("normalizer"))
            && pre_tokenizers(file.get("pre_tokenizer"))
            && added_tokens(file.get("added_tokens"));
        match local && !tokens.any(spans_words) {
            true => Self::LetterEnd,
            false => Self::Nowhere,
        }
    }
}

/// The start of the character that contains byte `at`, or `at` if that is not within a character.
pub(crate) fn character_start(text: &[u8], at: usize) -> usize {
    let is_start = |at: &usize| text.get(*at).is_none_or(|byte| byte & 0xc0 != 0x80);
    (at.saturating_sub(3)..=at).rev().find(is_start).unwrap_or(at)
}

fn character_before(text: &[u8], at: usize) -> Option<char> {
    let start = character_start(text, at - 1);
    std::str::from_utf8(&text[start..at]).ok()?.chars().next()
}

/// Whether a token contains a letter or digit before white space. Parts of characters count as letters.
fn spans_words(token: &[u8]) -> bool {
    let text = String::from_utf8_lossy(token);
    let letter = |c: char| c.is_alphanumeric() || c == char::REPLACEMENT_CHARACTER;
    let space = |c: char| c.is_whitespace() || c == super::file::METASPACE;
    text.chars().zip(text.chars().skip(1)).any(|(first, second)| letter(first) && space(second))
}

/// Whether no normalizer looks across the end of a word.
fn normalizers(normalizer: Option<&Value>) -> bool {
    members(normalizer, "normalizers").iter().all(|member| match kind(member) {
        "MetaspaceNormalizer" => member["drop_whitespace"] == false,
        "Replace" => member["pattern"]["String"].as_str().is_some_and(|text| text.chars().count() == 1),
        kind => matches!(kind, "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "ByteLevel" | "Prepend"),
    })
}

/// Whether every pre-tokenizer splits at the end of a word, or nowhere near it.
fn pre_tokenizers(pre_tokenizer: Option<&Value>) -> bool {
    members(pre_tokenizer, "pretokenizers").iter().all(|member| match kind(member) {
        // The crate was built without an engine for expressions: it has loaded one of those that it knows.
        "Split" => {
            let literal = member["pattern"]["String"].as_str();
            literal.is_none_or(|text| text.chars().count() == 1)
        }
        kind => {
            matches!(kind, "Digits" | "Punctuation" | "Whitespace" | "WhitespaceSplit" | "CharDelimiterSplit")
        }
    })
}

/// Whether no added token that is found within text takes white space with it.
fn added_tokens(added: Option<&Value>) -> bool {
    let list = added.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    list.iter().filter(|token| token["special"] != true).all(|token| {
        let content = token["content"].as_str().unwrap_or_default();
        token["lstrip"] == false && token["rstrip"] == false && !spans_words(content.as_bytes())
    })
}

fn members<'a>(component: Option<&'a Value>, list: &str) -> Vec<&'a Value> {
    match component {
        None | Some(Value::Null) => Vec::new(),
        Some(component) if kind(component) == "Sequence" => {
            let list_of = component[list].as_array().map_or(&[][..], Vec::as_slice);
            list_of.iter().flat_map(|member| members(Some(member), list)).collect()
        }
        Some(component) => vec![component],
    }
}

fn kind(component: &Value) -> &str {
    component["type"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_between_words() {
        let last = |cuts: Cuts, text: &str| cuts.last(text.as_bytes(), 0);
        assert_eq!(last(Cuts::WordEnd, "ab,  cd"), Some(3));
        assert_eq!(last(Cuts::LetterEnd, "ab cd,  ef"), Some(2));
        assert_eq!(last(Cuts::WordEnd, "a\u{3000} b"), None);
        assert_eq!(last(Cuts::LetterEnd, "\u{4e16}\u{754c}\nx"), Some(6));
        assert_eq!(last(Cuts::Nowhere, "ab cd"), None);
        assert_eq!(Cuts::WordEnd.last(b"ab cd ef", 5), None);
        assert_eq!(Cuts::Anywhere.last("ab\u{e9}".as_bytes(), 1), Some(4));
        assert_eq!(Cuts::Anywhere.last(&"ab\u{e9}".as_bytes()[..3], 1), Some(3));
        assert_eq!(Cuts::WordEnd.last(b"\xff\xff\xff\xff\xff a", 0), None);
    }

    #[test]
    fn tokens_that_span_words_forbid_cuts() {
        assert!(spans_words(b"the cat") && spans_words("a\u{2581}".as_bytes()) && spans_words(b"\xe4\xb8\n"));
        assert!(
            !spans_words(b" the") && !spans_words(b");\n\n") && !spans_words("\u{2581}\u{2581}a".as_bytes())
        );
    }
}
