//! A list of strings that may be written as one string.

use std::fmt;

use serde::Deserializer;
use serde::de::{SeqAccess, Visitor};

/// The forms that users may write, for the schema.
#[cfg(feature = "schema")]
#[derive(schemars::JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "describes the form; values are read by the visitor, which has better messages")]
pub(super) enum OneOrMore {
    One(String),
    More(Vec<String>),
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    deserializer.deserialize_any(Strings)
}

struct Strings;

impl<'de> Visitor<'de> for Strings {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E>(self, one: &str) -> Result<Self::Value, E> {
        Ok(vec![one.into()])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut strings = Vec::new();
        while let Some(string) = list.next_element()? {
            strings.push(string);
        }
        Ok(strings)
    }
}
