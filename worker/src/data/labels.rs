//! Documents of prepared data, and the ids whose loss counts.
//!
//! Positions are those in the logical sequence of a split: all shards one after another.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use xlaunch_data::{Manifest, SideFile, Split, read_regular};

use super::DataError;
use super::open::{DataFile, read_error};

/// Documents and supervised ids of a split.
#[derive(Clone, Debug, Default)]
pub(super) struct Labels {
    pub(super) boundaries: Boundaries,
    /// `None`: every loss counts.
    pub(super) mask: Option<Arc<Mask>>,
    /// True if documents are pairs of a better and a worse answer.
    pub(super) preferences: bool,
}

/// The beginnings of documents.
#[derive(Clone, Debug, Default)]
pub(super) enum Boundaries {
    /// Files of ids or text do not tell.
    #[default]
    Unknown,
    /// Documents start at each of these ids.
    EndOfText(i32),
    /// The file of starts lists the positions. It is read when needed; its hash is that of the manifest.
    File { path: PathBuf, hash: String, tokens: u64 },
}

/// One bit per id: 1 if the loss of predicting it counts.
#[derive(Debug)]
pub(super) struct Mask {
    parts: Vec<MaskPart>,
}

#[derive(Debug)]
struct MaskPart {
    file: DataFile,
    /// Position of the first id.
    start: u64,
    end: u64,
}

impl Labels {
    /// Opens the files of a split of the prepared directory `dir`.
    pub(super) fn open(dir: &Path, manifest: &Manifest, split: &Split) -> Result<Self, DataError> {
        let boundaries = match (&split.starts, manifest.end_of_text) {
            (Some(starts), _) => {
                let path = dir.join(&starts.name);
                check_size(&DataFile::open(&path)?, starts, starts.bytes / 8 * 8)?;
                Boundaries::File { path, hash: starts.xxh3_128.clone(), tokens: split.tokens }
            }
            (None, Some(id)) => Boundaries::EndOfText(id.cast_signed()),
            (None, None) => Boundaries::Unknown,
        };
        let (mut parts, mut start) = (Vec::new(), 0);
        for shard in &split.shards {
            let end = start + shard.tokens;
            if let Some(mask) = &shard.mask {
                let path = dir.join(&mask.name);
                let file = DataFile::open(&path)?;
                check_size(&file, mask, shard.tokens.div_ceil(8))?;
                parts.push(MaskPart { file, start, end });
            } else if split.shards.iter().any(|shard| shard.mask.is_some()) {
                let problem = "this shard has no mask, but others have".into();
                return Err(DataError::Format { path: dir.join(&shard.name), problem });
            }
            start = end;
        }
        let mask = (!parts.is_empty()).then(|| Arc::new(Mask { parts }));
        Ok(Self { boundaries, mask, preferences: manifest.has_preferences() })
    }
}

impl Boundaries {
    /// Reads the file of starts.
    pub(super) fn read(path: &Path, tokens: u64) -> Result<Vec<u64>, DataError> {
        let problem = |problem: &str| DataError::Format { path: path.into(), problem: problem.into() };
        let bytes = read_regular(path, tokens.saturating_mul(8)).map_err(|error| read_error(path, &error))?;
        let starts: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|start| u64::from_le_bytes(start.try_into().unwrap_or_default()))
            .collect();
        if starts.first().is_some_and(|first| *first != 0) {
            return Err(problem("the first document does not start at 0; prepare the directory again"));
        }
        if starts.iter().any(|start| *start >= tokens) || !starts.is_sorted_by(|a, b| a < b) {
            return Err(problem("positions of documents do not ascend; prepare the directory again"));
        }
        Ok(starts)
    }
}

impl Mask {
    /// Appends the bits of the ids `position..position + count` to `out`.
    pub(super) fn read(&self, position: u64, count: usize, out: &mut Vec<bool>) -> Result<(), DataError> {
        let (mut at, end) = (position, position + count as u64);
        let mut index = self.parts.partition_point(|part| part.end <= at);
        while at < end {
            let part = &self.parts[index];
            let (first, last) = (at - part.start, end.min(part.end) - part.start);
            let bytes = first / 8..last.div_ceil(8);
            let mut read = vec![0; usize::try_from(bytes.end - bytes.start).unwrap_or(usize::MAX)];
            part.file.read_at(&mut read, bytes.start)?;
            let bit =
                |at: u64| read[usize::try_from(at / 8 - bytes.start).unwrap_or(usize::MAX)] >> (at % 8) & 1;
            out.extend((first..last).map(|at| bit(at) == 1));
            at = part.start + last;
            index += 1;
        }
        Ok(())
    }
}

/// Checks that a file has the size that the manifest and the ids demand.
fn check_size(file: &DataFile, described: &SideFile, bytes: u64) -> Result<(), DataError> {
    let found = file.bytes();
    if found == described.bytes && found == bytes {
        return Ok(());
    }
    let problem = format!(
        "it does not match the manifest: it has {found} bytes instead of {bytes}; prepare the directory again"
    );
    Err(DataError::Format { path: file.path().into(), problem })
}
