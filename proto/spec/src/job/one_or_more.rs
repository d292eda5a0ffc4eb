//! Lists whose only entry may be written as one string.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The forms of a list of strings, for the schema.
#[cfg(feature = "schema")]
#[derive(schemars::JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "describes the form; values are read by the visitor, which has better messages")]
pub(super) enum OneOrMore {
    One(String),
    More(Vec<String>),
}

/// An entry of such a list.
pub(super) trait Entry<'de>: Deserialize<'de> + From<String> {
    /// The forms of the list, for messages.
    const EXPECTED: &'static str;
}

impl Entry<'_> for String {
    const EXPECTED: &'static str = "a string or a list of strings";
}

pub(super) fn deserialize<'de, D: Deserializer<'de>, T: Entry<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_any(Entries(PhantomData))
}

struct Entries<T>(PhantomData<T>);

impl<'de, T: Entry<'de>> Visitor<'de> for Entries<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E>(self, one: &str) -> Result<Self::Value, E> {
        Ok(vec![one.to_owned().into()])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list))
    }
}
