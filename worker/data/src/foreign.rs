//! Detects files that clearly do not have the format of `data.tokenizer`, from their first bytes. Pure.
//!
//! Every byte of any file is a valid token. Without these checks a model would train on an archive, or on text read as
//! 16-bit ids, and only its loss would reveal it.

use crate::shard;

/// Number of bytes of a file that are examined.
pub const HEAD_BYTES: usize = 16 << 10;
/// Text has at most one NUL in this many bytes. Files of ids below 256, and UTF-16, have many more.
pub(crate) const NUL_SHARE: usize = 64;
/// Minimum number of bytes for telling files of ids from others.
const MIN_BYTES: usize = 16;
const MIN_IDS: usize = 32;
/// High halves of 32-bit ids are below this: a vocabulary has at most 2^20 ids.
const MAX_HIGH_HALF: u16 = 1 << 4;

const UNPACK: &str = "decompress it, or prepare it with `xlaunch data prepare`";
const UNPACK_FIRST: &str = "decompress it, or use gzip or zstd for `xlaunch data prepare`";
const PREPARE: &str = "prepare its text with `xlaunch data prepare`, or leave it out of the globs";
const WRITE_PARQUET: &str = "write it as Parquet for `xlaunch data prepare`";
const TO_UTF_8: &str = "convert it to UTF-8";
const SET_BIN: &str = "set data.tokenizer = \"bin\"";
const SET_BYTES: &str = "set data.tokenizer = \"bytes\", or prepare it with `xlaunch data prepare`";

/// A file with fewer magic bytes may also begin with this id.
const MIN_MAGIC_OF_IDS: usize = 3;
/// Magic bytes of formats, with a description and, if there is more to do than to leave the file out, advice.
const FORMATS: [(&[u8], &str, Option<&str>); 27] = [
    (b"\x1f\x8b\x08", "a gzip archive", Some(UNPACK)),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", Some(UNPACK)),
    (b"\xfd7zXZ\0", "an xz archive", Some(UNPACK_FIRST)),
    (b"BZh", "a bzip2 archive", Some(UNPACK_FIRST)),
    (b"\x04\x22\x4d\x18", "an LZ4 archive", Some(UNPACK_FIRST)),
    (b"PK\x03\x04", "a zip archive (as PyTorch's .bin and .pt files, .npz and .docx are)", None),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", None),
    (b"\x80\x02", "a Python pickle", None),
    (b"\x80\x03", "a Python pickle", None),
    (b"\x80\x04\x95", "a Python pickle", None),
    (b"\x80\x05\x95", "a Python pickle", None),
    (b"PAR1", "a Parquet file", Some("prepare it with `xlaunch data prepare`")),
    (b"ARROW1\0", "an Arrow file", Some(WRITE_PARQUET)),
    (b"\xff\xff\xff\xff", "an Arrow stream", Some(WRITE_PARQUET)),
    (b"\x93NUMPY", "a NumPy array", None),
    (b"MMIDIDX\0", "an index of Megatron", Some("name only the .bin file beside it")),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", None),
    (b"SQLite format 3\0", "an SQLite database", None),
    (b"GGUF\x03\0", "a GGUF model", None),
    (b"%PDF-", "a PDF document", Some("extract its text")),
    (b"\x89PNG", "an image", None),
    (b"\xff\xd8\xff", "an image", None),
    (b"GIF8", "an image", None),
    (b"\x7fELF", "a program", None),
    (b"\xff\xfe\0\0", "UTF-32 text", Some(TO_UTF_8)),
    (b"\xff\xfe", "UTF-16 text", Some(TO_UTF_8)),
    (b"\xfe\xff", "UTF-16 text", Some(TO_UTF_8)),
];

/// Actual kind of a file, and a remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Description, such as "a gzip archive".
    pub what: &'static str,
    /// Advice for `[data]` of a job.
    pub remedy: &'static str,
}

/// Returns the kind of a file of `bytes` bytes that starts with `head`, if it is not text.
pub fn not_text(head: &[u8], bytes: u64) -> Option<Foreign> {
    if let Some(known) = known_format(head, 0) {
        return Some(known);
    }
    if !matches!(shard::layout(head, bytes), Ok(None)) {
        return Some(Foreign { what: "a file of token ids", remedy: SET_BIN });
    }
    let nuls = head.iter().filter(|byte| **byte == 0).count();
    (nuls * NUL_SHARE > head.len()).then_some(Foreign {
        what: "not text: it has many NUL bytes",
        remedy: "set data.tokenizer = \"bin\" for token ids, convert UTF-16 to UTF-8, or leave it out of the globs",
    })
}

/// Returns the kind of a file that starts with `head` and has no header, if it does not contain 16-bit ids.
pub fn not_ids(head: &[u8]) -> Option<Foreign> {
    if let Some(known) = known_format(head, MIN_MAGIC_OF_IDS) {
        return Some(known);
    }
    if head.len() >= MIN_BYTES && is_text(head) {
        return Some(Foreign { what: "text", remedy: SET_BYTES });
    }
    is_wide(head).then_some(Foreign {
        what: "a file of 32-bit ids without a header",
        remedy: "give it llm.c's header (magic number 20240801), or prepare the text with `xlaunch data prepare`",
    })
}

fn known_format(head: &[u8], min_magic: usize) -> Option<Foreign> {
    let (what, advice) = format_of(head, min_magic)?;
    Some(Foreign { what, remedy: advice.unwrap_or(PREPARE) })
}

/// Returns a description of a format with at least `min_magic` magic bytes, and advice.
pub(crate) fn format_of(head: &[u8], min_magic: usize) -> Option<(&'static str, Option<&'static str>)> {
    let is_one = |magic: &[u8]| magic.len() >= min_magic && head.starts_with(magic);
    FORMATS.iter().find(|(magic, ..)| is_one(magic)).map(|(_, what, advice)| (*what, *advice))
}

/// Returns whether `head` is UTF-8 without control characters other than those of text. 16-bit ids are not: half of
/// their bytes are arbitrary.
fn is_text(head: &[u8]) -> bool {
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        // The last character may be incomplete.
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&head[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    text.chars().all(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t' | '\x0c'))
}

/// Returns whether every second 16-bit number is the high half of a 32-bit id.
fn is_wide(head: &[u8]) -> bool {
    let halves: Vec<u16> = head.chunks_exact(2).map(|id| u16::from_le_bytes([id[0], id[1]])).collect();
    let (low, high) = (halves.iter().step_by(2), halves.iter().skip(1).step_by(2));
    let (low_max, high_max) = (low.max().copied().unwrap_or(0), high.max().copied().unwrap_or(0));
    halves.len() >= MIN_IDS
        && ((high_max == 0 && low_max > 0) || (high_max < MAX_HIGH_HALF && low_max >= 1 << 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(values: impl Iterator<Item = u16>) -> Vec<u8> {
        values.flat_map(u16::to_le_bytes).collect()
    }

    fn wide(values: impl Iterator<Item = u32>) -> Vec<u8> {
        values.flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn text_is_accepted_and_other_files_are_named() {
        let text_of = |head: &[u8]| not_text(head, head.len() as u64).map(|foreign| foreign.what);
        for text in ["", "a", "fn main() {}\n", "Grüße, 世界\r\n", "\x1b[0m\x08terminal log"] {
            assert_eq!(text_of(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(text_of(b"latin-1: \xe4\xf6\xfc and some more"), None);
        assert_eq!(text_of(b"\x1f\x8b\x08\0\0"), Some("a gzip archive"));
        assert_eq!(text_of(b"PAR1\x15\x04"), Some("a Parquet file"));
        let utf16: Vec<u8> = "some text".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert!(text_of(&utf16).unwrap().contains("NUL"));
        // Common ids of GPT-2 are below 256.
        assert!(text_of(&ids((0..2000).map(|i| i * 31 % 2000))).unwrap().contains("NUL"));
        for magic in [20_240_520_u32, 20_240_801, 278_895_051, 20_240_522] {
            let foreign = not_text(&wide([magic, 1, 7].into_iter()), 2000).unwrap();
            assert_eq!((foreign.what, foreign.remedy), ("a file of token ids", SET_BIN), "{magic}");
        }
    }

    #[test]
    fn ids_are_accepted_and_text_and_wide_ids_are_named() {
        let of = |head: &[u8]| not_ids(head).map(|foreign| foreign.what);
        assert_eq!(of(&ids((0..8000).map(|i| (i as u32 * 7919 % 50_257) as u16))), None);
        assert_eq!(of(&ids((0..100).map(|i| i % 65))), None, "a vocabulary of characters");
        assert_eq!(of(&ids((0..100).map(|i| i * i % 10))), None, "a vocabulary of digits");
        assert_eq!(of(&ids([5, 0, 7, 0].into_iter())), None, "too short to tell");
        assert_eq!(of(b"It was a dark and stormy night."), Some("text"));
        let cut = "Straße".repeat(20);
        assert_eq!(of(&cut.as_bytes()[..cut.len() - 2]), Some("text"), "a character is cut");
        assert_eq!(of(b"\x1f\x8b\x08\0\0"), Some("a gzip archive"));
        assert_eq!(of(&ids([0x280, 40_000].into_iter().cycle().take(100))), None, "begins like a pickle");
        let wide_ids = "a file of 32-bit ids without a header";
        assert_eq!(of(&wide((0..100).map(|i| i * 37 % 50_257))), Some(wide_ids));
        assert_eq!(of(&wide((0..100).map(|i| i * 1281 % 128_256))), Some(wide_ids));
    }
}
