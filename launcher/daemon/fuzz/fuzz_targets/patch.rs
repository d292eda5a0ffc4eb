//! Builds fuzz inputs from valid JSON documents by replacing some values: random bytes are rarely an accepted document.

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use serde_json::{Value, json};

/// A document as text, or changes to a valid one.
#[derive(Arbitrary, Debug)]
pub enum Document<'a> {
    Text(&'a [u8]),
    Patched(Vec<Patch<'a>>),
}

/// Replaces a value of a document, or adds one.
#[derive(Arbitrary, Debug)]
pub struct Patch<'a> {
    at: u8,
    value: Replacement<'a>,
}

#[derive(Arbitrary, Debug)]
enum Replacement<'a> {
    Null,
    Bool(bool),
    Small(u8),
    Whole(i64),
    Large(u64),
    Real(f64),
    Text(&'a str),
    Repeated(&'a str, u16),
    Bytes(&'a [u8]),
    Texts(Vec<&'a str>),
    Numbers(Vec<i32>),
    Key(&'a str, u32),
    Variant(u8),
}

/// Names of variants in job and command descriptions.
const VARIANTS: [&str; 24] = [
    "auto",
    "gpu",
    "cpu",
    "cuda",
    "script",
    "module",
    "run_path",
    "binary",
    "node",
    "socket",
    "exclusive",
    "core-complex",
    "SIGTERM",
    "SIGINT",
    "fp32",
    "bf16",
    "tf32",
    "fp8",
    "graph",
    "stream",
    "cosine",
    "constant",
    "bytes",
    "off",
];

impl Document<'_> {
    /// Returns the text of the document. Patches apply to `valid`.
    pub fn text(&self, valid: &Value) -> Vec<u8> {
        let patches = match self {
            Self::Text(text) => return text.to_vec(),
            Self::Patched(patches) => patches,
        };
        let mut document = valid.clone();
        for Patch { at, value } in patches {
            let mut skip = usize::from(*at) % count(&document);
            value.apply(nth(&mut document, &mut skip).expect("counted above"));
        }
        serde_json::to_vec(&document).expect("a value")
    }
}

/// Counts the values in a document, including itself.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Object(map) => map.values().map(count).sum(),
        Value::Array(values) => values.iter().map(count).sum(),
        _ => 0,
    }
}

/// Returns the value of a document that follows `skip` others.
fn nth<'a>(value: &'a mut Value, skip: &mut usize) -> Option<&'a mut Value> {
    if *skip == 0 {
        return Some(value);
    }
    *skip -= 1;
    match value {
        Value::Object(map) => map.values_mut().find_map(|value| nth(value, skip)),
        Value::Array(values) => values.iter_mut().find_map(|value| nth(value, skip)),
        _ => None,
    }
}

impl Replacement<'_> {
    fn apply(&self, target: &mut Value) {
        *target = match self {
            Self::Null => Value::Null,
            Self::Bool(value) => json!(value),
            Self::Small(value) => json!(value),
            Self::Whole(value) => json!(value),
            Self::Large(value) => json!(value),
            Self::Real(value) => json!(value),
            Self::Text(text) => json!(text),
            Self::Repeated(text, count) => json!(text.repeat(usize::from(*count) / text.len().max(1))),
            Self::Bytes(bytes) => json!(bytes),
            Self::Texts(texts) => json!(texts),
            Self::Numbers(numbers) => json!(numbers),
            Self::Key(key, value) => match target {
                Value::Object(map) => {
                    map.insert((*key).into(), json!(value));
                    return;
                }
                _ => json!({ *key: value }),
            },
            Self::Variant(at) => json!(VARIANTS[usize::from(*at) % VARIANTS.len()]),
        }
    }
}
