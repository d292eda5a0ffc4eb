//! Finds places where a text can be cut without changing its ids. Pure.
//!
//! Long texts are encoded in pieces: memory stays bounded, and threads share the work. The ids are those of the whole
//! text if no word, as the tokenizer splits words, spans the cut. That is determined by trial: a kind of place is used
//! if many sample texts have the same words when they are whole and when they are cut there. If the tokenizer's words
//! are longer than that, a cut still changes nothing if no token of the vocabulary spans such a place.
//!
//! If neither holds, and in texts without such a place, pieces have [`LONGEST_PIECE`] bytes.

use serde_json::{Map, Value};
use tokenizers::{
    NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper,
};
use unicode_categories::UnicodeCategories;

use super::template::{self, members};

/// Approximate size of the pieces in which texts are encoded. Long enough that cuts cost little, short enough for
/// caches.
pub(super) const PIECE: usize = 64 << 10;
/// Maximum size of a piece that is encoded at once: 4 MiB of spaces are the longest piece that any test compares.
pub(crate) const LONGEST_PIECE: usize = 9 << 19;

/// The places where a tokenizer's texts can be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cuts {
    /// Texts can be cut between any two characters.
    Anywhere,
    /// Texts can be cut at places of the kinds that are enabled.
    Places {
        /// Cuts after anything except white space, before white space.
        word_end: bool,
        /// Cuts after a letter or digit, before white space.
        letter_end: bool,
        /// Cuts after a line feed, before a letter.
        line_start: bool,
    },
}

impl Cuts {
    pub(crate) const NOWHERE: Self = Self::Places { word_end: false, letter_end: false, line_start: false };

    /// Returns the last place above `min` at which `text` can be cut. `text` need not be UTF-8, and may end within a
    /// character.
    pub(crate) fn last(self, text: &[u8], min: usize) -> Option<usize> {
        if self == Self::Anywhere {
            let start = character_start(text, text.len().saturating_sub(1));
            let is_incomplete =
                std::str::from_utf8(&text[start..]).is_err_and(|error| error.error_len().is_none());
            return Some(if is_incomplete { start } else { text.len() }).filter(|cut| *cut > min);
        }
        (min + 1..text.len()).rev().find(|cut| self.is_cut(text, *cut))
    }

    /// Returns whether the text can be cut before byte `at`, which is not the first.
    fn is_cut(self, text: &[u8], at: usize) -> bool {
        let Self::Places { word_end, letter_end, line_start } = self else { return true };
        if text[at - 1] == b'\n' {
            return line_start && character_from(text, at).is_some_and(UnicodeCategories::is_letter);
        }
        if !(word_end || letter_end) || !matches!(text[at], b' ' | b'\t' | b'\n' | b'\r') {
            return false;
        }
        let Some(before) = character_before(text, at) else { return false };
        (word_end && !before.is_whitespace()) || (letter_end && is_letter_or_digit(before))
    }

    /// Determines the cuts for a file with these tokens.
    pub(super) fn of<'a>(file: &Map<String, Value>, tokens: impl Iterator<Item = &'a [u8]> + Clone) -> Self {
        let Some(words) = Words::of(file) else { return Self::NOWHERE };
        let added = added_tokens(file);
        let tokens_alone_decide = is_local(file) && !joins_unknown(file);
        let allowed = |kind: Kind| {
            added
                .as_ref()
                .is_some_and(|contents| contents.iter().all(|content| !kind.is_within(content.as_bytes())))
                && (words.end_at(kind)
                    || (tokens_alone_decide && !tokens.clone().any(|token| kind.is_within(token))))
        };
        Self::Places {
            word_end: allowed(Kind::WordEnd),
            letter_end: allowed(Kind::LetterEnd),
            line_start: allowed(Kind::LineStart),
        }
    }
}

/// A kind of place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    WordEnd,
    LetterEnd,
    LineStart,
}

impl Kind {
    /// Returns whether there is such a place between two characters. Incomplete characters count as letters.
    fn is_between(self, first: char, second: char) -> bool {
        let letter = |c: char| is_letter_or_digit(c) || c == char::REPLACEMENT_CHARACTER;
        let space = |c: char| c.is_whitespace() || c == super::METASPACE;
        match self {
            Self::WordEnd => !space(first) && space(second),
            Self::LetterEnd => letter(first) && space(second),
            Self::LineStart => first == '\n' && letter(second),
        }
    }

    fn is_within(self, token: &[u8]) -> bool {
        let text = String::from_utf8_lossy(token);
        text.chars().zip(text.chars().skip(1)).any(|(first, second)| self.is_between(first, second))
    }
}

/// Beginnings and continuations of texts: any two of them form a text with a place to try between them.
const STARTS: [&str; 44] = [
    "a",
    "the",
    "it's",
    "don't",
    "He'll",
    "x1",
    "1",
    "12",
    "123",
    "1234",
    "AB",
    "AbC",
    "\u{e9}t\u{e9}",
    "\u{c9}T\u{c9}",
    "\u{4e16}",
    "\u{4e16}\u{754c}",
    "\u{30ab}\u{30bf}",
    "\u{d55c}\u{ae00}",
    "\u{43c}\u{438}\u{440}",
    "\u{5d0}",
    "\u{e01}",
    "\u{915}",
    "\u{b2}",
    "\u{2167}",
    "a-b",
    "  a",
    "\n\na",
    "!a",
    "\u{1f600}a",
    "!",
    "a.",
    "...",
    "\u{3002}",
    "a\u{301}",
    "\u{915}\u{93f}",
    "\u{1f600}",
    "\u{24d0}",
    "){",
    "/",
    "http://",
    "\u{200b}",
    "\u{1f469}\u{200d}",
    "_",
    "'",
];
const SPACED: [&str; 28] = [
    " ",
    "  ",
    "    ",
    " x",
    "  x",
    "   x",
    " X",
    " 1",
    " 12",
    " .",
    "  .",
    " ...x",
    " 's",
    "\n",
    "\n\n",
    "\nx",
    "\n\nx",
    "\n X",
    "\r\nx",
    " \n",
    " \nx",
    "\n.",
    "\n\n/",
    "\t",
    "\tx",
    "\t\tx",
    " \u{4e16}",
    " \u{301}x",
];
const LINES: [&str; 18] = [
    "\n",
    "\n\n",
    "\n\n\n",
    "a\n",
    "a\n\n",
    "a.\n",
    "a.\n\n",
    "\u{3002}\n",
    "a \n",
    "  \n",
    "a\r\n",
    "\r\n\r\n",
    "1\n",
    "!!\n",
    "/\n",
    ";\n\n\n",
    "\t\n",
    "\u{301}\n",
];
const WORDS: [&str; 12] = [
    "a",
    "x y",
    "the",
    "Ab",
    "AB",
    "\u{4e16}\u{754c}",
    "\u{43c}\u{438}",
    "\u{c9}a",
    "\u{915}\u{93f}",
    "a1",
    "s\n",
    "ll ",
];

/// The word splitting of a tokenizer.
struct Words {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Word splitting of pieces that continue a text.
    continued: Option<PreTokenizerWrapper>,
    continued_normalizer: Option<NormalizerWrapper>,
}

impl Words {
    fn of(file: &Map<String, Value>) -> Option<Self> {
        let parts = |file: &Map<String, Value>| {
            let part = |key| file.get(key).cloned().unwrap_or(Value::Null);
            let normalizer = serde_json::from_value(part("normalizer")).ok()?;
            let pre_tokenizer = serde_json::from_value(part("pre_tokenizer")).ok()?;
            Some((normalizer, pre_tokenizer))
        };
        let (normalizer, pre_tokenizer) = parts(file)?;
        let part = |key: &str| (key.to_owned(), file.get(key).cloned().unwrap_or(Value::Null));
        let mut rest: Map<String, Value> = ["normalizer", "pre_tokenizer"].map(part).into_iter().collect();
        template::remove_prefix_of(&mut rest);
        let (continued_normalizer, continued) = parts(&rest)?;
        Some(Self { normalizer, pre_tokenizer, continued, continued_normalizer })
    }

    /// Returns whether words end at places of this kind in all samples.
    fn end_at(&self, kind: Kind) -> bool {
        let (before, after): (&[&str], &[&str]) = match kind {
            Kind::WordEnd | Kind::LetterEnd => (&STARTS, &SPACED),
            Kind::LineStart => (&LINES, &WORDS),
        };
        let ends_so = |text: &&&str| {
            let last = text.chars().next_back();
            kind != Kind::LetterEnd || last.is_some_and(is_letter_or_digit)
        };
        let after: Vec<(&str, Option<Vec<String>>)> = after
            .iter()
            .map(|text| (*text, words(&self.continued_normalizer, &self.continued, text)))
            .collect();
        before.iter().filter(ends_so).all(|start| {
            let Some(first) = words(&self.normalizer, &self.pre_tokenizer, start) else { return false };
            after.iter().all(|(text, rest)| {
                let Some(rest) = rest else { return false };
                let whole = words(&self.normalizer, &self.pre_tokenizer, &format!("{start}{text}"));
                whole.is_some_and(|whole| whole.iter().eq(first.iter().chain(rest)))
            })
        })
    }
}

/// Returns the words of a text.
fn words(
    normalizer: &Option<NormalizerWrapper>,
    pre_tokenizer: &Option<PreTokenizerWrapper>,
    text: &str,
) -> Option<Vec<String>> {
    crate::quiet::catch(|| {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = normalizer {
            normalizer.normalize(&mut normalized).ok()?;
        }
        let mut words = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut words).ok()?;
        }
        let splits = words.get_splits(OffsetReferential::Normalized, OffsetType::None);
        Some(splits.into_iter().map(|(word, ..)| word.to_owned()).collect())
    })
    .ok()?
}

/// Returns the start of the character that contains byte `at`, or `at` if it is not within a character.
pub(crate) fn character_start(text: &[u8], at: usize) -> usize {
    let is_start = |at: &usize| text.get(*at).is_none_or(|byte| byte & 0xc0 != 0x80);
    (at.saturating_sub(3)..=at).rev().find(is_start).unwrap_or(at)
}

fn character_before(text: &[u8], at: usize) -> Option<char> {
    let start = character_start(text, at - 1);
    std::str::from_utf8(&text[start..at]).ok()?.chars().next()
}

fn character_from(text: &[u8], at: usize) -> Option<char> {
    let end = (at + 1..=at + 4).find(|end| text.get(*end).is_none_or(|byte| byte & 0xc0 != 0x80))?;
    std::str::from_utf8(text.get(at..end)?).ok()?.chars().next()
}

/// Returns false for combining marks and letter-like symbols, which regular expressions treat as punctuation.
fn is_letter_or_digit(character: char) -> bool {
    character.is_letter() || character.is_number()
}

/// Returns whether normalizers and pre-tokenizers look only at single characters, so that tokens decide.
fn is_local(file: &Map<String, Value>) -> bool {
    let one_character =
        |member: &Value| member["pattern"]["String"].as_str().is_some_and(|text| text.chars().count() == 1);
    let normalizers =
        members(file.get("normalizer"), "normalizers").into_iter().all(|member| match kind(member) {
            "Replace" => one_character(member),
            kind => matches!(kind, "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "Prepend"),
        });
    let pre_tokenizers = |member: &Value| match kind(member) {
        "Split" => one_character(member),
        "Metaspace" | "Digits" | "Punctuation" | "Whitespace" | "WhitespaceSplit" | "CharDelimiterSplit" => {
            true
        }
        kind => kind == "ByteLevel" && member["use_regex"] == false,
    };
    // One that is not the first puts its prefix within texts too, which pieces that continue a text do not have.
    let prepends = |member: &&Value| match kind(member) {
        "Metaspace" => !matches!(member["prepend_scheme"].as_str(), Some("never" | "first")),
        kind => kind == "ByteLevel" && member["add_prefix_space"] != false,
    };
    let all = members(file.get("pre_tokenizer"), "pretokenizers");
    normalizers && !all.iter().skip(1).any(prepends) && all.into_iter().all(pre_tokenizers)
}

/// Returns whether neighbouring characters that the model does not know become one id, wherever they are.
fn joins_unknown(file: &Map<String, Value>) -> bool {
    let model = file.get("model").unwrap_or(&Value::Null);
    model["byte_fallback"] != true && (model["type"] == "Unigram" || model["fuse_unk"] == true)
}

/// Returns the added tokens that are found within text; `None` if one of them depends on its surroundings.
fn added_tokens(file: &Map<String, Value>) -> Option<Vec<&str>> {
    let list = file.get("added_tokens").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let within_text = list.iter().filter(|token| token["special"] != true);
    within_text
        .map(|token| {
            let plain = ["lstrip", "rstrip", "single_word"].iter().all(|flag| token[*flag] != true);
            plain.then(|| token["content"].as_str().unwrap_or_default())
        })
        .collect()
}

fn kind(component: &Value) -> &str {
    component["type"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORD_END: Cuts = Cuts::Places { word_end: true, letter_end: true, line_start: false };
    const LETTER_END: Cuts = Cuts::Places { word_end: false, letter_end: true, line_start: false };
    const LINE_START: Cuts = Cuts::Places { word_end: false, letter_end: false, line_start: true };

    #[test]
    fn cuts_are_between_words() {
        let last = |cuts: Cuts, text: &str| cuts.last(text.as_bytes(), 0);
        assert_eq!(last(WORD_END, "ab,  cd"), Some(3));
        assert_eq!(last(LETTER_END, "ab cd,  ef"), Some(2));
        assert_eq!(last(WORD_END, "a\u{3000} b"), None);
        assert_eq!(last(LETTER_END, "\u{4e16}\u{754c}\nx"), Some(6));
        // In the expressions of many model families, marks and symbols belong to the following text.
        assert_eq!(last(LETTER_END, "\u{915}\u{93f}\nx\u{301} \u{24d0}\n"), None);
        assert_eq!(last(LINE_START, "a.\n\u{4e16}\n!"), Some(3));
        assert_eq!(last(LINE_START, "a.\n\u{301}\n"), None);
        assert_eq!(last(Cuts::NOWHERE, "ab cd"), None);
        assert_eq!(WORD_END.last(b"ab cd ef", 5), None);
        for text in ["ab", "a\u{e9}", "a\u{4e16}", "a\u{1f600}"] {
            let text = text.as_bytes();
            assert_eq!(Cuts::Anywhere.last(text, 0), Some(text.len()));
            for end in 2..text.len() {
                assert_eq!(Cuts::Anywhere.last(&text[..end], 0), Some(1), "{end} bytes of {text:?}");
                assert_eq!(Cuts::Anywhere.last(&text[..end], 1), None);
            }
        }
        for invalid in [b"a\xff", b"\xe9\x80\x80\x80\x80".as_slice(), b"\x80\x80\x80\x80\x80", b"\xe4\xb8a"] {
            assert_eq!(Cuts::Anywhere.last(invalid, 0), Some(invalid.len()), "{invalid:?}");
        }
        assert_eq!(WORD_END.last(b"\xff\xff\xff\xff\xff a", 0), None);
        assert_eq!(LINE_START.last(b"\n\xff\n\xe4", 0), None);
    }

    #[test]
    fn tokens_that_span_words_forbid_cuts() {
        let within = |token: &[u8]| Kind::LetterEnd.is_within(token);
        assert!(within(b"the cat") && within("a\u{2581}".as_bytes()) && within(b"\xe4\xb8\n"));
        assert!(!within(b" the") && !within(b");\n\n") && !within("\u{2581}\u{2581}a".as_bytes()));
        assert!(Kind::LineStart.is_within(b"\n\na") && !Kind::LineStart.is_within(b"a\n\n"));
    }

    #[test]
    fn prefix_that_is_written_within_texts_forbids_cuts() {
        let cuts = |scheme: &str, first: serde_json::Value| {
            let metaspace = serde_json::json!({
                "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true,
            });
            let sequence = serde_json::json!({"type": "Sequence", "pretokenizers": [first, metaspace]});
            let file = serde_json::json!({"pre_tokenizer": sequence});
            Cuts::of(file.as_object().unwrap(), std::iter::empty())
        };
        let delimiter = serde_json::json!({"type": "CharDelimiterSplit", "delimiter": "-"});
        let digits = serde_json::json!({"type": "Digits", "individual_digits": true});
        for first in [delimiter, digits] {
            assert_eq!(cuts("always", first.clone()), Cuts::NOWHERE);
            assert_ne!(cuts("first", first), Cuts::NOWHERE);
        }
    }

    #[test]
    fn unknown_characters_that_become_one_id_forbid_cuts_within_words() {
        let cuts = |model: serde_json::Value| {
            let metaspace = serde_json::json!({
                "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true,
            });
            let file = serde_json::json!({"pre_tokenizer": metaspace, "model": model});
            Cuts::of(file.as_object().unwrap(), std::iter::empty())
        };
        for (kind, fuse_unk, byte_fallback, anywhere) in [
            ("BPE", false, false, true),
            ("BPE", true, false, false),
            ("BPE", true, true, true),
            ("Unigram", false, false, false),
            ("Unigram", false, true, true),
        ] {
            let model =
                serde_json::json!({"type": kind, "fuse_unk": fuse_unk, "byte_fallback": byte_fallback});
            assert_eq!(cuts(model) != Cuts::NOWHERE, anywhere, "{kind} {fuse_unk} {byte_fallback}");
        }
    }

    #[test]
    fn words_of_each_family_end_where_texts_are_cut() {
        let split = |pattern: &str| {
            let split = serde_json::json!({
                "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
            });
            let file = serde_json::json!({"pre_tokenizer": split});
            Cuts::of(file.as_object().unwrap(), std::iter::empty())
        };
        const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
        const LLAMA3: &str = concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
            r"|\s+(?!\S)|\s+"
        );
        const NANOCHAT: &str = concat!(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]",
            r"|\s+(?!\S)|\s+"
        );
        const SPACED_WORDS: &str = r"\w+\s*|[^\w\s]+";
        let modern = Cuts::Places { word_end: false, letter_end: true, line_start: true };
        assert_eq!(split(GPT2), WORD_END);
        assert_eq!(split(LLAMA3), modern);
        assert_eq!(split(NANOCHAT), modern);
        assert_eq!(
            split(SPACED_WORDS),
            Cuts::Places { word_end: false, letter_end: false, line_start: true }
        );
    }
}
