//! OS strings, which may contain any bytes. They are serialised as a string if they are UTF-8, otherwise as an array of
//! bytes, and displayed as a shell would need them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum length of a command line that is shown in full, in characters.
const MAX_LINE_CHARS: usize = 4096;

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

/// Returns program and arguments as one line, quoted where a shell needs it, and truncated if it is very long.
pub fn quote_line<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> String {
    let quote = |word: &OsStr| {
        let text = word.to_string_lossy();
        let plain = |c: char| c.is_alphanumeric() || "_-./=:,@%+".contains(c);
        if !text.is_empty() && text.chars().all(plain) {
            text.into_owned()
        } else {
            format!("'{}'", text.replace('\'', r"'\''"))
        }
    };
    let mut line = words.into_iter().map(quote).collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = line.char_indices().nth(MAX_LINE_CHARS) {
        line.truncate(end);
        line += "...";
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_line_can_be_pasted_into_a_shell() {
        let line = quote_line(["train.py", "--name", "it's two", "", "a=b"].map(OsStr::new));
        assert_eq!(line, r"train.py --name 'it'\''s two' '' a=b");
        let long = "é".repeat(MAX_LINE_CHARS + 1);
        assert_eq!(quote_line([OsStr::new(&long)]).chars().count(), MAX_LINE_CHARS + 3);
    }
}
