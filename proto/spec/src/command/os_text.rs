//! Serialisation of OS strings, which may contain any bytes: as a string if they are UTF-8, otherwise as an array of
//! bytes.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Text {
    Utf8(String),
    Bytes(Vec<u8>),
}

impl From<&OsStr> for Text {
    fn from(text: &OsStr) -> Self {
        match text.to_str() {
            Some(utf8) => Self::Utf8(utf8.into()),
            None => Self::Bytes(text.as_bytes().into()),
        }
    }
}

impl From<Text> for OsString {
    fn from(text: Text) -> Self {
        match text {
            Text::Utf8(utf8) => utf8.into(),
            Text::Bytes(bytes) => Self::from_vec(bytes),
        }
    }
}

pub(super) fn serialize<S: Serializer>(text: &OsStr, serializer: S) -> Result<S::Ok, S::Error> {
    Text::from(text).serialize(serializer)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<OsString, D::Error> {
    Text::deserialize(deserializer).map(OsString::from)
}

pub(super) mod list {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(
        texts: &[OsString],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(texts.iter().map(|text| Text::from(text.as_os_str())))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<OsString>, D::Error> {
        Ok(Vec::<Text>::deserialize(deserializer)?.into_iter().map(OsString::from).collect())
    }
}

pub(super) mod path {
    use std::path::PathBuf;

    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(
        path: &Option<PathBuf>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        path.as_ref().map(|path| Text::from(path.as_os_str())).serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<PathBuf>, D::Error> {
        Ok(Option::<Text>::deserialize(deserializer)?.map(|path| OsString::from(path).into()))
    }
}
