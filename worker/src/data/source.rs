//! One logical sequence of token ids over several files.
//!
//! Files are read with `pread`, not mapped. The page cache serves both alike, and a file that is truncated during a job
//! causes an error instead of SIGBUS. Formats of token files, recognised by their content:
//!
//! - llm.c: 256 little-endian i32, `[20240520, 1, tokens, 0...]`, then u16 tokens; the size must match;
//! - nanoGPT: u16 tokens, no header.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xlaunch_proto::spec::Tokenizer;

use super::DataError;

/// First word of llm.c's header.
const LLMC_MAGIC: i32 = 20_240_520;
/// Bytes of llm.c's header.
const LLMC_HEADER_BYTES: u64 = 1024;
/// How many ids of each file are checked against the vocabulary when it is opened. The rest are checked when read.
const IDS_CHECKED_AT_OPEN: u64 = 1 << 24;

/// The concatenated token ids of several files, or a range of them.
#[derive(Clone, Debug)]
pub struct Tokens {
    parts: Arc<Vec<Part>>,
    start: u64,
    len: u64,
    vocab: usize,
}

#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
    /// Position of the first token in the logical sequence.
    start: u64,
    tokens: u64,
    /// Bytes before the first token.
    header: u64,
    /// Bytes of a token: 1 for text, 2 for token files.
    width: usize,
}

/// Opens `files` as one sequence of ids below `vocab`.
pub(crate) fn open(files: &[PathBuf], tokenizer: Tokenizer, vocab: usize) -> Result<Tokens, DataError> {
    let mut parts = Vec::with_capacity(files.len());
    let mut len = 0;
    for path in files {
        let part = match tokenizer {
            Tokenizer::Bytes => Part::text(path, len)?,
            Tokenizer::Bin => Part::token_file(path, len)?,
        };
        len += part.tokens;
        parts.push(part);
    }
    let tokens = Tokens { parts: Arc::new(parts), start: 0, len, vocab };
    tokens.check_first_ids()?;
    Ok(tokens)
}

impl Tokens {
    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Splits off the last `fraction` of the tokens.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a fraction of a length is a valid length"
    )]
    pub(super) fn split(&self, fraction: f64) -> (Self, Self) {
        let held_out = (self.len as f64 * fraction) as u64;
        let first = Self { len: self.len - held_out, ..self.clone() };
        let last = Self { start: self.start + first.len, len: held_out, ..self.clone() };
        (first, last)
    }

    /// Appends tokens `position..position + count` to `out`.
    pub fn read(&self, position: u64, count: usize, out: &mut Vec<i32>) -> Result<(), DataError> {
        debug_assert!(position + count as u64 <= self.len);
        let (mut at, end) = (self.start + position, self.start + position + count as u64);
        let mut index = self.parts.partition_point(|part| part.start + part.tokens <= at);
        while at < end {
            let part = &self.parts[index];
            let take = end.min(part.start + part.tokens) - at;
            part.read(at - part.start, take, self.vocab, out)?;
            at += take;
            index += 1;
        }
        Ok(())
    }

    /// Finds ids outside the vocabulary near the start of each file, so that most mistakes are found before training.
    fn check_first_ids(&self) -> Result<(), DataError> {
        let mut ids = Vec::new();
        for part in self.parts.iter().filter(|part| self.vocab < 1 << (8 * part.width)) {
            let mut at = 0;
            while at < part.tokens.min(IDS_CHECKED_AT_OPEN) {
                let take = (part.tokens - at).min(1 << 16);
                ids.clear();
                part.read(at, take, self.vocab, &mut ids)?;
                at += take;
            }
        }
        Ok(())
    }
}

impl Part {
    fn text(path: &Path, start: u64) -> Result<Self, DataError> {
        let (file, bytes) = open_file(path)?;
        Ok(Self { path: path.into(), file, start, tokens: bytes, header: 0, width: 1 })
    }

    fn token_file(path: &Path, start: u64) -> Result<Self, DataError> {
        let (file, bytes) = open_file(path)?;
        let problem = |problem: String| DataError::Format { path: path.into(), problem };
        let mut words = [0; 12];
        let has_header = bytes >= LLMC_HEADER_BYTES && {
            file.read_exact_at(&mut words, 0).map_err(|error| read_error(path, &error))?;
            word(&words, 0) == LLMC_MAGIC
        };
        let (header, tokens) = if has_header {
            let (version, tokens) = (word(&words, 1), u64::try_from(word(&words, 2)).unwrap_or(0));
            if version != 1 {
                return Err(problem(format!(
                    "token file format version {version} is not supported; expected version 1"
                )));
            }
            if bytes != LLMC_HEADER_BYTES + 2 * tokens {
                return Err(problem(format!(
                    "truncated or damaged: the header says {tokens} tokens, {} bytes in all, but it has {bytes} bytes",
                    LLMC_HEADER_BYTES + 2 * tokens
                )));
            }
            (LLMC_HEADER_BYTES, tokens)
        } else if bytes % 2 == 0 {
            (0, bytes / 2)
        } else {
            return Err(problem(format!(
                "its size of {bytes} bytes is not a whole number of 16-bit token ids"
            )));
        };
        Ok(Self { path: path.into(), file, start, tokens, header, width: 2 })
    }

    fn read(&self, position: u64, count: u64, vocab: usize, out: &mut Vec<i32>) -> Result<(), DataError> {
        let width = self.width as u64;
        let mut bytes = vec![0; usize::try_from(count * width).unwrap_or(usize::MAX)];
        self.file
            .read_exact_at(&mut bytes, self.header + position * width)
            .map_err(|error| read_error(&self.path, &error))?;
        let first = out.len();
        match self.width {
            1 => out.extend(bytes.iter().map(|byte| i32::from(*byte))),
            _ => out.extend(bytes.chunks_exact(2).map(|id| i32::from(u16::from_le_bytes([id[0], id[1]])))),
        }
        let outside = |id: &i32| usize::try_from(*id).is_ok_and(|id| id >= vocab);
        match out[first..].iter().position(outside) {
            None => Ok(()),
            Some(index) => Err(DataError::Vocabulary {
                path: self.path.clone(),
                id: out[first + index].unsigned_abs(),
                position: position + index as u64,
                vocab,
            }),
        }
    }
}

fn open_file(path: &Path) -> Result<(File, u64), DataError> {
    let file = File::open(path).map_err(|error| read_error(path, &error))?;
    let bytes = file.metadata().map_err(|error| read_error(path, &error))?.len();
    Ok((file, bytes))
}

fn read_error(path: &Path, error: &std::io::Error) -> DataError {
    let reason = match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "the file was truncated while it was in use".into(),
        _ => error.to_string(),
    };
    DataError::Read { path: path.into(), reason }
}

fn word(bytes: &[u8], index: usize) -> i32 {
    let at = 4 * index;
    i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(values: &[u16]) -> Vec<u8> {
        values.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    fn llmc_file(version: i32, tokens: i32, body: &[u16]) -> Vec<u8> {
        let mut words = [0i32; 256];
        words[..3].copy_from_slice(&[LLMC_MAGIC, version, tokens]);
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(ids(body));
        bytes
    }

    fn open_bytes(files: &[Vec<u8>], tokenizer: Tokenizer, vocab: usize) -> Result<Vec<i32>, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..files.len()).map(|i| dir.path().join(format!("{i}.bin"))).collect();
        for (path, bytes) in paths.iter().zip(files) {
            fs_err::write(path, bytes).unwrap();
        }
        let tokens = open(&paths, tokenizer, vocab)?;
        let mut out = Vec::new();
        tokens.read(0, usize::try_from(tokens.len()).unwrap(), &mut out)?;
        Ok(out)
    }

    #[test]
    fn both_token_formats_and_text_read_as_one_sequence() {
        let files = [llmc_file(1, 3, &[1, 2, 3]), ids(&[4, 500])];
        assert_eq!(open_bytes(&files, Tokenizer::Bin, 501).unwrap(), [1, 2, 3, 4, 500]);
        assert_eq!(open_bytes(&[b"ab".into(), b"c".into()], Tokenizer::Bytes, 256).unwrap(), [97, 98, 99]);
    }

    #[test]
    fn reads_span_files_within_a_split() {
        let dir = tempfile::tempdir().unwrap();
        let paths = [dir.path().join("a"), dir.path().join("b")];
        fs_err::write(&paths[0], b"abcdef").unwrap();
        fs_err::write(&paths[1], b"ghij").unwrap();
        let (train, val) = open(&paths, Tokenizer::Bytes, 256).unwrap().split(0.3);
        let mut out = Vec::new();
        train.read(4, 3, &mut out).unwrap();
        val.read(1, 2, &mut out).unwrap();
        let text: Vec<u8> = out.iter().map(|id| u8::try_from(*id).unwrap()).collect();
        assert_eq!((text.as_slice(), train.len(), val.len()), (b"efgij".as_slice(), 7, 3));
    }

    #[test]
    fn damaged_files_are_refused_with_path_and_problem() {
        let error = |bytes: Vec<u8>| open_bytes(&[bytes], Tokenizer::Bin, 100).unwrap_err().to_string();
        assert!(error(llmc_file(1, 5, &[1, 2, 3])).contains("truncated"));
        assert!(error(llmc_file(2, 3, &[1, 2, 3])).contains("version 2"));
        assert!(error(vec![1, 2, 3]).contains("16-bit"));
        let outside = error(ids(&[5, 6, 100]));
        assert!(
            outside.contains("id 100") && outside.contains("position 2") && outside.contains("0.bin"),
            "{outside}"
        );
    }
}
