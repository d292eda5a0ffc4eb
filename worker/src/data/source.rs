//! One logical sequence of token ids over several files.
//!
//! Files are read with `pread`, not mapped. The page cache serves both equally well, and a file that is truncated
//! during a job causes an error instead of SIGBUS. If a file is replaced by another, the attempt continues to read the
//! original if that is open, and ends otherwise: see [`open`](super::open).
//!
//! Formats of token files are recognised by their content: [`xlaunch_data::shard`] handles those with a header;
//! nanoGPT's format has none. Files that are clearly something else are refused: see [`foreign`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xlaunch_data::foreign::{self, Foreign};
use xlaunch_data::{Manifest, Shard, Split, shard};
use xlaunch_spec::job::Tokenizer;

use super::DataError;
use super::labels::Labels;
use super::open::DataFile;

/// Number of ids per file that are checked against the vocabulary when the file is opened. The rest are checked when
/// read.
const IDS_CHECKED_AT_OPEN: u64 = 1 << 24;

/// The concatenated token ids of several files, or a range of them.
#[derive(Clone, Debug)]
pub struct Tokens {
    parts: Arc<Vec<Part>>,
    start: u64,
    len: u64,
    vocab: usize,
    labels: Labels,
}

#[derive(Debug)]
struct Part {
    file: DataFile,
    /// Position of the first token in the logical sequence.
    start: u64,
    tokens: u64,
    /// Bytes before the first token.
    header: u64,
    /// Bytes per token: 1 for text, 2 or 4 for token files.
    width: usize,
}

/// Opens `files` as one sequence of ids below `vocab`.
pub(crate) fn open(files: &[PathBuf], tokenizer: Tokenizer, vocab: usize) -> Result<Tokens, DataError> {
    let part = |path: &PathBuf| match tokenizer {
        Tokenizer::Bytes => Part::text(path),
        Tokenizer::Bin => Part::token_file(path),
    };
    Tokens::of(files.iter().map(part), vocab)
}

/// Opens the shards of a split of a prepared directory, which must match its manifest.
pub(super) fn open_shards(
    dir: &Path,
    manifest: &Manifest,
    split: &Split,
    vocab: usize,
) -> Result<Tokens, DataError> {
    let tokens = Tokens::of(split.shards.iter().map(|shard| Part::shard(dir, shard)), vocab)?;
    Ok(Tokens { labels: Labels::open(dir, manifest, split)?, ..tokens })
}

impl Tokens {
    fn of(files: impl Iterator<Item = Result<Part, DataError>>, vocab: usize) -> Result<Self, DataError> {
        let (mut parts, mut len) = (Vec::new(), 0);
        for part in files {
            let part = Part { start: len, ..part? };
            // These are sizes of files: their sum is far below 2^64.
            len += part.tokens;
            parts.push(part);
        }
        let tokens = Self { parts: Arc::new(parts), start: 0, len, vocab, labels: Labels::default() };
        tokens.check_first_ids()?;
        Ok(tokens)
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.len
    }

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
        assert!(position + count as u64 <= self.len);
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

    /// Returns where documents begin, and which losses count. Prepared data is never [split](Self::split), so positions
    /// are those of the files.
    pub(super) fn labels(&self) -> &Labels {
        &self.labels
    }

    /// Appends whether the loss of predicting each of the tokens `position..position + count` counts.
    pub(super) fn read_mask(
        &self,
        position: u64,
        count: usize,
        out: &mut Vec<bool>,
    ) -> Result<(), DataError> {
        match &self.labels.mask {
            Some(mask) => mask.read(position, count, out),
            None => {
                out.resize(out.len() + count, true);
                Ok(())
            }
        }
    }

    /// Looks for ids outside the vocabulary near the start of each file, so that most mistakes are found before
    /// training.
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
    fn text(path: &Path) -> Result<Self, DataError> {
        let file = DataFile::open(path)?;
        let bytes = file.bytes();
        refuse(path, foreign::not_text(&file.head(foreign::HEAD_BYTES)?, bytes))?;
        Ok(Self { file, start: 0, tokens: bytes, header: 0, width: 1 })
    }

    fn token_file(path: &Path) -> Result<Self, DataError> {
        let file = DataFile::open(path)?;
        let bytes = file.bytes();
        let problem = |problem: String| DataError::Format { path: path.into(), problem };
        let head = file.head(foreign::HEAD_BYTES)?;
        let start = &head[..head.len().min(shard::HEADER_BYTES)];
        let layout = match shard::layout(start, bytes).map_err(|error| problem(error.to_string()))? {
            Some(layout) => layout,
            None => {
                refuse(path, foreign::not_ids(&head))?;
                if bytes % 2 != 0 {
                    return Err(problem(format!(
                        "its size of {bytes} bytes is not a whole number of 16-bit token ids"
                    )));
                }
                shard::Layout { header: 0, width: 2, tokens: bytes / 2 }
            }
        };
        let shard::Layout { header, width, tokens } = layout;
        Ok(Self { file, start: 0, tokens, header, width })
    }

    fn shard(dir: &Path, shard: &Shard) -> Result<Self, DataError> {
        let path = dir.join(&shard.name);
        let file = DataFile::open(&path)?;
        let bytes = file.bytes();
        let layout = shard::layout(&file.head(foreign::HEAD_BYTES)?, bytes);
        match layout {
            Ok(Some(shard::Layout { header, width, tokens }))
                if bytes == shard.bytes && tokens == shard.tokens =>
            {
                Ok(Self { file, start: 0, tokens, header, width })
            }
            _ => {
                let problem = format!(
                    "it does not match the manifest, which describes a shard of {} tokens in {} bytes; the file has \
                     {bytes} bytes; prepare the directory again",
                    shard.tokens, shard.bytes
                );
                Err(DataError::Format { path, problem })
            }
        }
    }

    fn read(&self, position: u64, count: u64, vocab: usize, out: &mut Vec<i32>) -> Result<(), DataError> {
        let width = self.width as u64;
        let mut bytes = vec![0; usize::try_from(count * width).unwrap_or(usize::MAX)];
        self.file.read_at(&mut bytes, self.header + position * width)?;
        let first = out.len();
        // 32-bit ids may be negative as i32; the comparison below catches them, too.
        match self.width {
            1 => out.extend(bytes.iter().map(|byte| i32::from(*byte))),
            2 => out.extend(bytes.chunks_exact(2).map(|id| i32::from(u16::from_le_bytes([id[0], id[1]])))),
            _ => out.extend(bytes.chunks_exact(4).map(|id| i32::from_le_bytes([id[0], id[1], id[2], id[3]]))),
        }
        let outside = |id: &i32| usize::try_from(id.cast_unsigned()).is_ok_and(|id| id >= vocab);
        match out[first..].iter().position(outside) {
            None => Ok(()),
            Some(index) => Err(DataError::Vocabulary {
                path: self.file.path().into(),
                id: out[first + index].cast_unsigned(),
                position: position + index as u64,
                vocab,
            }),
        }
    }
}

fn refuse(path: &Path, foreign: Option<Foreign>) -> Result<(), DataError> {
    match foreign {
        None => Ok(()),
        Some(Foreign { what, remedy }) => Err(DataError::Foreign { path: path.into(), what, remedy }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(values: &[u16]) -> Vec<u8> {
        values.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    fn wide(values: &[u32]) -> Vec<u8> {
        values.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    fn file(header: [i32; 4], body: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(shard::HEADER_BYTES, 0);
        [&bytes, body].concat()
    }

    fn llmc_file(version: i32, tokens: i32, body: &[u16]) -> Vec<u8> {
        file([20_240_520, version, tokens, 0], &ids(body))
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
    fn all_token_formats_and_text_read_as_one_sequence() {
        let files = [
            llmc_file(1, 3, &[1, 2, 3]),
            ids(&[4, 500]),
            file([20_240_801, 1, 2, 0], &wide(&[70_000, 5])),
            file([278_895_051, 1, 1, 2], &ids(&[6])),
            file([278_895_051, 1, 1, 4], &wide(&[128_255])),
        ];
        let expected = [1, 2, 3, 4, 500, 70_000, 5, 6, 128_255];
        assert_eq!(open_bytes(&files, Tokenizer::Bin, 128_256).unwrap(), expected);
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
        assert!(error(file([20_240_801, 1, i32::MAX, 0], &wide(&[1]))).contains("truncated"));
        assert!(error(file([20_240_801, 1, -1, 0], &[])).contains("-1 tokens"));
        assert!(error(file([278_895_051, 1, 1, 3], &wide(&[1]))).contains("3 bytes per token"));
        let negative = error(file([20_240_801, 1, 2, 0], &wide(&[1, u32::MAX])));
        assert!(negative.contains("id 4294967295 at position 1"), "{negative}");
        let outside = error(ids(&[5, 6, 100]));
        assert!(
            outside.contains("id 100") && outside.contains("position 2") && outside.contains("0.bin"),
            "{outside}"
        );
    }

    #[test]
    fn files_of_another_kind_are_refused_with_the_key_to_change() {
        let error = |bytes: &[u8], tokenizer| {
            open_bytes(&[bytes.to_vec()], tokenizer, 70_000).unwrap_err().to_string()
        };
        let text = error(b"It was a dark and stormy night.", Tokenizer::Bin);
        assert!(
            text.contains("0.bin: this is text") && text.contains("data.tokenizer = \"bytes\""),
            "{text}"
        );
        let shard = error(&llmc_file(1, 3, &[1, 2, 3]), Tokenizer::Bytes);
        assert!(shard.contains("file of token ids") && shard.contains("data.tokenizer = \"bin\""), "{shard}");
        for tokenizer in [Tokenizer::Bytes, Tokenizer::Bin] {
            let archive = error(b"\x1f\x8b\x08\0\0\0\0\0", tokenizer);
            assert!(archive.contains("gzip") && archive.contains("xlaunch data prepare"), "{archive}");
        }
        let wide = error(&wide(&[40_000; 100]), Tokenizer::Bin);
        assert!(wide.contains("32-bit ids without a header") && wide.contains("20240801"), "{wide}");
    }

    #[test]
    fn file_truncated_while_in_use_is_an_error_and_a_replaced_one_is_read_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs_err::write(&path, "abcdef").unwrap();
        let tokens = open(std::slice::from_ref(&path), Tokenizer::Bytes, 256).unwrap();
        fs_err::write(dir.path().join("other"), "other text").unwrap();
        fs_err::rename(dir.path().join("other"), &path).unwrap();
        let mut out = Vec::new();
        tokens.read(0, 6, &mut out).unwrap();
        assert_eq!(out, b"abcdef".map(i32::from));

        let tokens = open(std::slice::from_ref(&path), Tokenizer::Bytes, 256).unwrap();
        fs_err::write(&path, "cut").unwrap();
        let error = tokens.read(0, 6, &mut out).unwrap_err().to_string();
        assert!(error.contains("truncated while it was in use") && error.contains("text"), "{error}");
    }
}
