//! Headers of token files. Pure: derives the position and width of the ids from the first bytes and the size of a file.
//!
//! | magic | ids | from |
//! |---|---|---|
//! | 20240520 | u16 | llm.c: `[magic, 1, tokens, 0...]` |
//! | 20240801 | u32 | llm.c for Llama 3: the same |
//! | 278895051 | u16 or u32 | modded-nanogpt: `[magic, 1, tokens, bytes per token, 0...]` |
//! | none | u16 | nanoGPT: no header |
//!
//! A header is 256 little-endian i32. A file must have exactly the size that its header says.

/// Size of a header in bytes.
pub const HEADER_BYTES: usize = 1024;
/// Maximum number of tokens in a header, which stores it as i32.
pub const MAX_TOKENS: u64 = i32::MAX as u64;

const LLMC_U16: i32 = 20_240_520;
const LLMC_U32: i32 = 20_240_801;
const MODDED: i32 = 278_895_051;
const HEADER_VERSION: i32 = 1;

/// Other files of llm.c that could be mistaken for token files.
const OTHER_MAGICS: [(i32, &str); 5] = [
    (20_240_326, "an llm.c model"),
    (20_240_327, "an llm.c debug state"),
    (20_240_328, "an llm.c tokenizer"),
    (20_240_522, "llm.c's HellaSwag questions"),
    (20_240_527, "an llm.c training state"),
];

/// Position and width of the ids of a token file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes before the first id.
    pub header: u64,
    /// Bytes per id: 2 or 4, little-endian.
    pub width: usize,
    /// Number of ids.
    pub tokens: u64,
}

/// Reason why a file is not a readable token file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages describe the fields")]
pub enum ShardError {
    #[error("token file format version {version} is not supported; expected version {HEADER_VERSION}")]
    Version { version: i32 },
    #[error(
        "truncated or damaged: the header says {tokens} tokens, {expected} bytes in all, but it has {bytes} bytes"
    )]
    Size { tokens: i32, expected: u64, bytes: u64 },
    #[error("damaged header: {width} bytes per token; expected 2 or 4")]
    Width { width: i32 },
    #[error("this is {what}, not a token file")]
    Other { what: &'static str },
}

/// Returns the layout according to the header of a file. `head` is the file's first [`HEADER_BYTES`] bytes, or all of
/// them if there are fewer; `bytes` is its size. `None` if the file does not start with a token file's header.
pub fn layout(head: &[u8], bytes: u64) -> Result<Option<Layout>, ShardError> {
    let Some(magic) = word(head, 0) else { return Ok(None) };
    if let Some((_, what)) = OTHER_MAGICS.iter().find(|(other, _)| *other == magic) {
        return Err(ShardError::Other { what });
    }
    let by_header = word(head, 3).unwrap_or(0);
    let width = match magic {
        LLMC_U16 => 2,
        LLMC_U32 => 4,
        MODDED => by_header,
        _ => return Ok(None),
    };
    let version = word(head, 1).unwrap_or(0);
    if version != HEADER_VERSION {
        return Err(ShardError::Version { version });
    }
    let width = match width {
        2 => 2,
        4 => 4,
        width => return Err(ShardError::Width { width }),
    };
    let said = word(head, 2).unwrap_or(0);
    let tokens = u64::try_from(said).unwrap_or(0);
    // This is at most 1024 + 4 * 2^31.
    let expected = HEADER_BYTES as u64 + width * tokens;
    if said < 0 || bytes != expected {
        return Err(ShardError::Size { tokens: said, expected, bytes });
    }
    let width = if width == 2 { 2 } else { 4 };
    Ok(Some(Layout { header: HEADER_BYTES as u64, width, tokens }))
}

/// Returns the header of a file of `tokens` ids of `width` bytes (2 or 4) in llm.c's layout. `None` above
/// [`MAX_TOKENS`].
pub fn header(tokens: u64, width: usize) -> Option<[u8; HEADER_BYTES]> {
    let mut header = [0; HEADER_BYTES];
    let magic = if width == 2 { LLMC_U16 } else { LLMC_U32 };
    for (index, word) in [magic, HEADER_VERSION, i32::try_from(tokens).ok()?].into_iter().enumerate() {
        header[4 * index..4 * index + 4].copy_from_slice(&word.to_le_bytes());
    }
    Some(header)
}

/// Returns the number of bytes per id in files for a vocabulary of this size.
pub fn width(vocab: usize) -> usize {
    if vocab <= 1 << 16 { 2 } else { 4 }
}

fn word(head: &[u8], index: usize) -> Option<i32> {
    let bytes = head.get(4 * index..4 * index + 4)?;
    bytes.try_into().ok().map(i32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(words: &[i32]) -> Vec<u8> {
        let mut head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        head.resize(HEADER_BYTES, 0);
        head
    }

    #[test]
    fn headers_of_all_formats_are_recognised() {
        let of = |words: &[i32], bytes| layout(&head(words), bytes).unwrap();
        let found = |width, tokens| Some(Layout { header: 1024, width, tokens });
        assert_eq!(of(&[LLMC_U16, 1, 3], 1030), found(2, 3));
        assert_eq!(of(&[LLMC_U32, 1, 3], 1036), found(4, 3));
        assert_eq!(of(&[MODDED, 1, 3, 2], 1030), found(2, 3));
        assert_eq!(of(&[MODDED, 1, 3, 4], 1036), found(4, 3));
        assert_eq!(of(&[1, 2, 3], 1030), None);
        assert_eq!(layout(&[1, 2, 3], 3).unwrap(), None);
        for width in [2, 4] {
            assert_eq!(layout(&header(5, width).unwrap(), 1024 + 5 * width as u64).unwrap(), found(width, 5));
        }
        assert_eq!(header(MAX_TOKENS + 1, 2), None);
        assert_eq!((width(65_536), width(65_537)), (2, 4));
    }

    #[test]
    fn hostile_headers_are_refused() {
        let error = |head: &[u8], bytes| layout(head, bytes).unwrap_err().to_string();
        assert!(error(&head(&[LLMC_U16, 1, 4]), 1030).contains("1032 bytes in all, but it has 1030"));
        assert!(error(&head(&[LLMC_U32, 1, 3]), 1030).contains("truncated"));
        assert!(error(&head(&[LLMC_U16, 1, -1]), 1024).contains("-1 tokens"));
        assert!(error(&head(&[LLMC_U32, 1, i32::MAX]), 1024).contains("truncated"));
        assert!(error(&head(&[LLMC_U16, 2, 3]), 1030).contains("version 2"));
        assert!(error(&head(&[MODDED, 1, 3, 8]), 1030).contains("8 bytes per token"));
        assert!(error(&head(&[20_240_522, 1, 3]), 1030).contains("HellaSwag"));
        // The file ends within the header.
        assert!(error(&head(&[LLMC_U16, 1, 0])[..12], 12).contains("truncated"));
        assert!(error(&LLMC_U16.to_le_bytes(), 4).contains("version 0"));
    }
}
