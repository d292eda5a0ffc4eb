//! Encodes a block: UTF-8, JSON, documents, ids. Pure.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use xxhash_rust::xxh3::xxh3_64;

use super::blocks::{Block, Form, HASHED_BYTES};
use super::rows::REFUSED;
use super::{Invalid, PrepareError};
use crate::Tokenizer;
use crate::chat::{ChatEncoder, Document, Outcome, parse_json};

/// Settings of the encoders.
#[derive(Clone, Debug)]
pub(super) struct Encoder {
    pub(super) tokenizer: Tokenizer,
    /// Field of JSONL objects that holds the text.
    pub(super) field: String,
    pub(super) invalid: Invalid,
    /// True to leave out lines that cannot be used.
    pub(super) skip: bool,
    /// Encodes lines as chats.
    pub(super) chats: Option<ChatEncoder>,
}

/// The ids of a block.
#[derive(Debug, Default)]
pub(super) struct Encoded {
    pub(super) ids: Vec<u32>,
    /// True for each id whose loss counts; empty if those of all do.
    pub(super) mask: Vec<bool>,
    pub(super) parts: Vec<Part>,
    /// See [`Block::read`].
    pub(super) read: u64,
    /// Reasons why lines were left out.
    pub(super) skipped: Vec<String>,
    /// See [`Chat`](crate::manifest::Chat).
    pub(super) ends: BTreeSet<u32>,
    pub(super) truncated: u64,
    pub(super) dropped: u64,
    /// Chats whose thoughts the template does not write.
    pub(super) lost_thoughts: u64,
}

impl Encoded {
    /// Adds a document of chats.
    fn add(&mut self, chats: &ChatEncoder, document: Document) {
        self.ends.extend(chats.ends(&document));
        let Document { ids, mask, bytes, hash } = document;
        self.parts.push(Part { start: Some(hash), ids: ids.len(), bytes });
        self.ids.extend(ids);
        self.mask.extend(mask);
    }
}

/// A document, or a part of one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Hash of the start of the document. `None` for a part that continues one.
    pub(super) start: Option<u64>,
    /// Number of ids.
    pub(super) ids: usize,
    /// Bytes of text.
    pub(super) bytes: u64,
}

impl Encoder {
    pub(super) fn encode(&self, block: &Block) -> Result<Encoded, PrepareError> {
        let mut encoded = Encoded { read: block.read, ..Encoded::default() };
        match &*block.form {
            Form::Text { delimiter } => self.texts(block, delimiter, &mut encoded)?,
            Form::Json | Form::Elements | Form::Table => self.lines(block, &mut encoded)?,
        }
        Ok(encoded)
    }

    fn texts(&self, block: &Block, delimiter: &[u8], out: &mut Encoded) -> Result<(), PrepareError> {
        let finder = Finder::new(delimiter);
        let (mut at, mut continues) = (0, block.continues);
        while at < block.bytes.len() {
            let rest = &block.bytes[at..];
            let length = if delimiter.is_empty() { None } else { finder.find(rest) };
            let (bytes, next) = match length {
                Some(length) => (&rest[..length], at + length + delimiter.len()),
                None => (rest, block.bytes.len()),
            };
            // Lines of Windows files also end with a carriage return.
            let bytes = if delimiter == b"\n" { bytes.strip_suffix(b"\r").unwrap_or(bytes) } else { bytes };
            let text = self.text(bytes).map_err(|valid| {
                let at = block.offset + (at + valid) as u64;
                PrepareError::Data(format!(
                    "{}: not valid UTF-8 at byte {at}\nhelp: convert it, name other files, or use --invalid replace",
                    block.label
                ))
            })?;
            if continues || !text.is_empty() {
                self.document(&text, !continues, out)?;
            }
            (at, continues) = (next, false);
        }
        Ok(())
    }

    fn lines(&self, block: &Block, out: &mut Encoded) -> Result<(), PrepareError> {
        for (number, bytes) in (block.line..).zip(block.bytes.split(|byte| *byte == b'\n')) {
            let bytes = bytes.trim_ascii();
            let used = match &self.chats {
                Some(chats) => self.chat(chats, bytes, &block.form, out),
                None => match self.line(bytes, &block.form) {
                    Ok(text) if text.is_empty() => Ok(()),
                    Ok(text) => {
                        self.document(&text, true, out)?;
                        Ok(())
                    }
                    Err(reason) => Err(reason),
                },
            };
            match used {
                Ok(()) => {}
                Err(reason) => {
                    let reason = format!("{}: {reason}", block.form.place(&block.label, number));
                    if !self.skip {
                        return Err(PrepareError::Data(reason));
                    }
                    out.skipped.push(reason.lines().next().unwrap_or_default().into());
                }
            }
        }
        Ok(())
    }

    /// Encodes a line of JSON that holds a chat.
    fn chat(&self, chats: &ChatEncoder, bytes: &[u8], form: &Form, out: &mut Encoded) -> Result<(), String> {
        let line = self.line_text(bytes, form)?;
        if line.is_empty() {
            return Ok(());
        }
        let row = self.json(&line, form, parse_json)?;
        match chats.encode(&row)? {
            Outcome::Empty => {}
            Outcome::Dropped => out.dropped += 1,
            Outcome::Document { document, truncated, loses_thoughts } => {
                out.truncated += u64::from(truncated);
                out.lost_thoughts += u64::from(loses_thoughts);
                out.add(chats, document);
            }
            Outcome::Pair { documents, loses_thoughts } => {
                out.lost_thoughts += u64::from(loses_thoughts);
                documents.into_iter().for_each(|document| out.add(chats, document));
            }
        }
        Ok(())
    }

    fn line_text<'a>(&self, bytes: &'a [u8], form: &Form) -> Result<Cow<'a, str>, String> {
        self.text(bytes).map_err(|valid| {
            let in_field = if matches!(form, Form::Table) { unquoted_len(&bytes[..valid]) } else { None };
            let (at, whole) = in_field.map_or((valid, form.unit()), |at| (at, "field"));
            format!("not valid UTF-8 at byte {at} of the {whole}\nhelp: see --invalid and --on-error")
        })
    }

    /// Returns the text of a line of JSON: a string, or a field of an object. Returns no text for an empty line and for
    /// `null`.
    fn line(&self, bytes: &[u8], form: &Form) -> Result<String, String> {
        let line = self.line_text(bytes, form)?;
        if line.is_empty() {
            return Ok(String::new());
        }
        let text = self.json(&line, form, |line| {
            let mut json = serde_json::Deserializer::from_str(line);
            let text = Row { field: &self.field }.deserialize(&mut json)?.map(Cow::into_owned);
            json.end().map(|()| text)
        })?;
        text.ok_or_else(|| {
            let help = "help: name the field that holds the text with --field, or see --on-error";
            format!("the object has no field `{}`\n{help}", self.field.escape_debug())
        })
    }

    /// Parses a line of JSON. Halves of surrogate pairs, which are not characters, are refused or replaced.
    fn json<T>(
        &self,
        line: &str,
        form: &Form,
        parse: impl Fn(&str) -> serde_json::Result<T>,
    ) -> Result<T, String> {
        if let Some(reason) = line.strip_prefix(REFUSED) {
            return Err(format!("{reason}\nhelp: see --on-error"));
        }
        let parsed = parse(line).or_else(|error| match without_half_pairs(line).map(|other| parse(&other)) {
            Some(Ok(value)) if self.invalid == Invalid::Replace => Ok(value),
            Some(Ok(_)) => Err(serde_json::Error::custom(
                "an escape is half of a surrogate pair\nhelp: see --invalid and --on-error",
            )),
            _ => Err(error),
        });
        parsed.map_err(|error| Self::json_reason(line, form, &error))
    }

    /// Formats a JSON error without its line number, which is always 1.
    fn json_reason(line: &str, form: &Form, error: &serde_json::Error) -> String {
        let text = error.to_string();
        let end = text.rfind(" at line ").unwrap_or(text.len());
        let column = error.column();
        let format = if matches!(form, Form::Json) { "JSONL" } else { "JSON" };
        let is_array = matches!(form, Form::Json) && line.trim_start().starts_with('[');
        let named = if is_array { "\nhelp: if the whole file is a JSON array, name it `.json`" } else { "" };
        let Some(before) = column.checked_sub(1) else {
            return format!("not valid {format}: {}{named}", &text[..end]);
        };
        let place = match form {
            Form::Json => format!("column {column}"),
            _ => format!("byte {before} of the {}", form.unit()),
        };
        let rest = line.as_bytes().get(before..).unwrap_or_default();
        // Python's `json` module writes these numbers unless `allow_nan` is false.
        let help = if rest.starts_with(b"NaN") || rest.starts_with(b"Infinity") {
            "\nhelp: NaN and Infinity are not JSON: write null in their place"
        } else {
            named
        };
        format!("not valid {format}: {} at {place}{help}", &text[..end])
    }

    /// Converts bytes to text. The error is the number of valid bytes.
    fn text<'a>(&self, bytes: &'a [u8]) -> Result<Cow<'a, str>, usize> {
        match (std::str::from_utf8(bytes), self.invalid) {
            (Ok(text), _) => Ok(Cow::Borrowed(text)),
            (Err(_), Invalid::Replace) => Ok(String::from_utf8_lossy(bytes)),
            (Err(error), Invalid::Error) => Err(error.valid_up_to()),
        }
    }

    fn document(&self, text: &str, first: bool, out: &mut Encoded) -> Result<(), PrepareError> {
        let before = out.ids.len();
        let start = first.then(|| {
            let (end, bos) = (self.tokenizer.end_of_text(), self.tokenizer.bos());
            out.ids.extend(end);
            // Model families without an end-of-text token start every text with the same token.
            out.ids.extend(bos.filter(|bos| Some(*bos) != end));
            let bytes = text.as_bytes();
            xxh3_64(&bytes[..bytes.len().min(HASHED_BYTES)])
        });
        self.tokenizer
            .encode_part(text, first, &mut out.ids)
            .map_err(|error| PrepareError::Data(error.to_string()))?;
        out.parts.push(Part { start, ids: out.ids.len() - before, bytes: text.len() as u64 });
        Ok(())
    }
}

/// Deserializes the text of a row: a string, or one field of an object without keeping the others.
struct Row<'a> {
    field: &'a str,
}

impl<'de> DeserializeSeed<'de> for Row<'_> {
    type Value = Option<Cow<'de, str>>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Row<'_> {
    type Value = Option<Cow<'de, str>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Some(Cow::Borrowed("")))
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Some(Cow::Borrowed(text)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(Cow::Owned(text.to_owned())))
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut text = None;
        while let Some(Text(key)) = map.next_key()? {
            if key != self.field {
                map.next_value::<IgnoredAny>()?;
            } else if text.replace(map.next_value::<Option<Text<'_>>>()?).is_some() {
                return Err(M::Error::custom(format!(
                    "the field `{}` is there twice",
                    self.field.escape_debug()
                )));
            }
        }
        // `null` counts as an empty text.
        Ok(text.map(|text| text.map_or_else(Cow::default, |Text(text)| text)))
    }
}

/// A string, borrowed if it has no escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Returns the length of a text of which this is the beginning as a JSON string.
fn unquoted_len(beginning: &[u8]) -> Option<usize> {
    let closed = [beginning, b"\""].concat();
    serde_json::from_slice::<String>(&closed).ok().map(|text| text.len())
}

/// Returns JSON in which every escape of half a surrogate pair is one of U+FFFD; `None` if there is none.
fn without_half_pairs(json: &str) -> Option<String> {
    let unit = |at: usize| {
        let digits = json.get(at..)?.strip_prefix("\\u")?.get(..4)?;
        u16::from_str_radix(digits, 16).ok()
    };
    let (mut out, mut copied, mut at) = (String::new(), 0, 0);
    while let Some(next) = json[at..].find('\\') {
        at += next;
        at += match (unit(at), unit(at + 6)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => 12,
            (Some(0xd800..=0xdfff), _) => {
                out.push_str(&json[copied..at]);
                out.push_str("\\ufffd");
                copied = at + 6;
                6
            }
            // What is escaped may have several bytes, and is not JSON then.
            _ => 1 + json[at + 1..].chars().next().map_or(0, char::len_utf8),
        };
    }
    (copied > 0).then(|| out + &json[copied..])
}
