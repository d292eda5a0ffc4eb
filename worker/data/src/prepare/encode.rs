//! Encodes a block: UTF-8, JSON, documents, ids. Pure.

use std::borrow::Cow;
use std::fmt;

use memchr::memmem::Finder;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use xxhash_rust::xxh3::xxh3_64;

use super::blocks::{Block, Form, HASHED_BYTES};
use super::{Invalid, PrepareError};
use crate::Tokenizer;

/// What encoders need to know.
#[derive(Clone, Debug)]
pub(super) struct Encoder {
    pub(super) tokenizer: Tokenizer,
    /// The field of JSONL that holds the text.
    pub(super) field: String,
    pub(super) invalid: Invalid,
}

/// The ids of a block.
#[derive(Debug, Default)]
pub(super) struct Encoded {
    pub(super) ids: Vec<u32>,
    pub(super) parts: Vec<Part>,
    /// See [`Block::read`].
    pub(super) read: u64,
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
            Form::Json => self.lines(block, &mut encoded)?,
            Form::Text { delimiter } => self.texts(block, delimiter, &mut encoded)?,
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
            // Lines of Windows end with a carriage return, too.
            let bytes = if delimiter == b"\n" { bytes.strip_suffix(b"\r").unwrap_or(bytes) } else { bytes };
            let text = self.text(bytes).map_err(|valid| {
                let at = block.offset + (at + valid) as u64;
                PrepareError::Data(format!(
                    "{}: not valid UTF-8 at byte {at}\nhelp: convert it, name other files, or use --invalid replace",
                    block.label
                ))
            })?;
            if continues || !text.is_empty() {
                self.document(&text, !continues, out);
            }
            (at, continues) = (next, false);
        }
        Ok(())
    }

    fn lines(&self, block: &Block, out: &mut Encoded) -> Result<(), PrepareError> {
        for (number, bytes) in (block.line..).zip(block.bytes.split(|byte| *byte == b'\n')) {
            let damaged = |reason: String| PrepareError::Data(format!("{}:{number}: {reason}", block.label));
            let line = self.text(bytes.trim_ascii()).map_err(|valid| {
                damaged(format!("not valid UTF-8 at byte {valid} of the line\nhelp: see --invalid"))
            })?;
            if line.is_empty() {
                continue;
            }
            let mut json = serde_json::Deserializer::from_str(&line);
            let text = Field(&self.field).deserialize(&mut json).and_then(|text| json.end().map(|()| text));
            let text = text.map_err(|error| damaged(Self::json_reason(&error)))?;
            let Some(text) = text else {
                let help = "help: name the field that holds the text with --field";
                return Err(damaged(format!(
                    "the object has no field `{}`\n{help}",
                    self.field.escape_debug()
                )));
            };
            if !text.is_empty() {
                self.document(&text, true, out);
            }
        }
        Ok(())
    }

    /// Without the line, which is always the first.
    fn json_reason(error: &serde_json::Error) -> String {
        let text = error.to_string();
        let end = text.rfind(" at line ").unwrap_or(text.len());
        match error.column() {
            0 => format!("not valid JSONL: {}", &text[..end]),
            column => format!("not valid JSONL: {} at column {column}", &text[..end]),
        }
    }

    /// The error is how many bytes are valid.
    fn text<'a>(&self, bytes: &'a [u8]) -> Result<Cow<'a, str>, usize> {
        match (std::str::from_utf8(bytes), self.invalid) {
            (Ok(text), _) => Ok(Cow::Borrowed(text)),
            (Err(_), Invalid::Replace) => Ok(String::from_utf8_lossy(bytes)),
            (Err(error), Invalid::Error) => Err(error.valid_up_to()),
        }
    }

    fn document(&self, text: &str, first: bool, out: &mut Encoded) {
        let before = out.ids.len();
        let start = first.then(|| {
            out.ids.extend(self.tokenizer.end_of_text());
            let bytes = text.as_bytes();
            xxh3_64(&bytes[..bytes.len().min(HASHED_BYTES)])
        });
        self.tokenizer.encode_part(text, first, &mut out.ids);
        out.parts.push(Part { start, ids: out.ids.len() - before, bytes: text.len() as u64 });
    }
}

/// The text of one field of an object, without keeping the others.
struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<Cow<'de, str>>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<Cow<'de, str>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut text = None;
        while let Some(key) = map.next_key_seed(Text)? {
            if key != self.0 {
                map.next_value::<IgnoredAny>()?;
            } else if text.replace(map.next_value_seed(Text)?).is_some() {
                return Err(M::Error::custom(format!(
                    "the field `{}` is there twice",
                    self.0.escape_debug()
                )));
            }
        }
        Ok(text)
    }
}

/// A string, borrowed where it has no escapes.
struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}
