//! Detects the kind of an input from its name and its first bytes. Pure.

use super::inputs::{Input, extension};
use crate::foreign::{NUL_SHARE, format_of};

/// Kind of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    /// One value per line.
    JsonLines,
    /// Arrays of values, or consecutive values.
    Json,
    /// A header, then one row per line.
    Separated {
        delimiter: u8,
    },
    Parquet,
}

/// Returns the kind of an input whose text starts with `head`. `named_field`: the user named a field of rows.
///
/// # Errors
/// A description of the file, if it cannot be read.
pub(super) fn of(input: &Input, head: &[u8], named_field: bool) -> Result<Kind, String> {
    if head.starts_with(b"PAR1") {
        return Ok(Kind::Parquet);
    }
    if let Some(what) = foreign(head) {
        return Err(what);
    }
    let extension = match input {
        Input::Stdin => None,
        Input::File(path) => extension(path),
    };
    Ok(match extension.as_deref() {
        Some("jsonl" | "ndjson") => Kind::JsonLines,
        Some("json") => Kind::Json,
        Some("csv") => Kind::Separated { delimiter: b',' },
        Some("tsv" | "tab") => Kind::Separated { delimiter: b'\t' },
        Some("parquet") => return Err("a file named .parquet, which is not a Parquet file".into()),
        _ if named_field && head.trim_ascii_start().starts_with(b"[") => Kind::Json,
        _ if named_field => Kind::JsonLines,
        _ => Kind::Text,
    })
}

/// Returns whether text without a name that tells its kind, as from a pipe, begins like JSON.
pub(super) fn may_be_json(input: &Input, head: &[u8]) -> bool {
    let is_named = matches!(input, Input::File(path) if extension(path).is_some());
    let head = head.trim_ascii_start();
    let value = head.strip_prefix(b"[").unwrap_or(head).trim_ascii_start();
    !is_named && value.strip_prefix(b"{").is_some_and(|rest| rest.trim_ascii_start().starts_with(b"\""))
}

/// Returns a description of a file that is not text, with advice.
fn foreign(head: &[u8]) -> Option<String> {
    const TAR_MAGIC: &[u8] = b"ustar";
    let nuls = head.iter().filter(|byte| **byte == 0).count();
    let what = if head.get(257..).is_some_and(|rest| rest.starts_with(TAR_MAGIC)) {
        "a tar archive; unpack it"
    } else if head.starts_with(b"PARE") && head.get(7) == Some(&0) {
        // The size of a module follows.
        "an encrypted Parquet file; write it without encryption"
    } else if head.get(8..10) == Some(b"{\"") && head.get(4..8) == Some(&[0; 4]) {
        "a safetensors file"
    } else if head.len() >= 256
        && crate::shard::layout(&head[..256], u64::MAX).is_ok_and(|layout| layout.is_some())
    {
        // Token files of llm.c and modded-nanogpt.
        "a file of token ids; train on it as it is"
    } else if let Some((what, advice)) = format_of(head, 0) {
        return Some(advice.map_or(what.into(), |advice| format!("{what}; {advice}")));
    } else if nuls * NUL_SHARE > head.len() {
        // Small ids, and English text in UTF-16, are UTF-8 as well.
        "binary data with many NUL bytes, such as token ids; train on those as they are, and convert UTF-16 to UTF-8"
    } else {
        return None;
    };
    Some(what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_recognised_by_name_and_content() {
        let kind = |name: &str, head: &[u8]| of(&Input::File(name.into()), head, false);
        assert_eq!(kind("a.txt", b"text"), Ok(Kind::Text));
        assert_eq!(kind("a.txt", b"PARENTS and"), Ok(Kind::Text));
        assert_eq!(kind("a.JSONL.gz", b"{}"), Ok(Kind::JsonLines));
        assert_eq!(kind("a.json", b"[]"), Ok(Kind::Json));
        assert_eq!(kind("a.tsv", b"text\n"), Ok(Kind::Separated { delimiter: b'\t' }));
        assert_eq!(kind("data", b"PAR1\x15\x04"), Ok(Kind::Parquet));
        assert_eq!(of(&Input::Stdin, b" [{}]", true), Ok(Kind::Json));
        assert_eq!(of(&Input::Stdin, b"{}\n{}", true), Ok(Kind::JsonLines));
        for (head, what) in [
            (&b"PK\x03\x04abc"[..], "zip archive"),
            (b"\xff\xfeh\0", "UTF-16"),
            (b"\xff\xfe\0\0h\0\0\0", "UTF-32"),
            (b"\x80\x04\x95", "pickle"),
            (b"\x80\x02\0\0\0\0\0\0{\"__metadata__\"", "safetensors"),
            (b"\xfd7zXZ\0", "an xz archive; decompress it"),
            (b"PARE\x55\0\0\0\x9a\x13", "encrypted Parquet"),
            (b"SQLite format 3\0", "SQLite"),
            (b"\x04\x22\x4d\x18abc", "LZ4"),
            (b"h\0e\0l\0l\0o\0", "convert UTF-16 to UTF-8"),
            (b"\x2f\0\x01\0\x3a\0\0\0", "token ids"),
        ] {
            assert!(kind("a.txt", head).unwrap_err().contains(what), "{what}");
        }
        assert_eq!(kind("a.txt", &[&[0][..], &[b'a'; 63]].concat()), Ok(Kind::Text));
        let may_be_json = |name: &str, head: &[u8]| may_be_json(&Input::File(name.into()), head);
        assert!(
            may_be_json("/dev/fd/63", b" {\"text\": 1}") && may_be_json("part-00000.gz", b"[\n{ \"text\"")
        );
        assert!(!may_be_json("a.ipynb", b"{\"cells\"") && !may_be_json("/dev/fd/63", b"{ return; }"));
        assert!(kind("a.parquet", b"text").unwrap_err().contains("not a Parquet file"));
    }
}
