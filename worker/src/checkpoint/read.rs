//! Reads tensors block by block, and verifies each block as it is read.
//!
//! ```text
//! chunks of all files --threads--> blocks: read, hashed --> pieces of arenas --bounded channel--> the model
//! ```
//! At most a few blocks are in memory. A reader must not use the pieces before [`read`] has returned `Ok`: until then a
//! hash may turn out to be wrong.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fs_err::File;
use rayon::ThreadPool;
use rayon::prelude::*;
use xlaunch_data::Tokenizer;
use xlaunch_spec::model::ModelShape;
use xxhash_rust::xxh3::Xxh3;

pub use super::tensors::Arena;

use super::manifest::{self, Checked, Chunk, Entry, check, hex};
use super::tensors::{self, Stored};
use super::{CheckpointError, MODEL, STATE, State, TOKENIZER};
use crate::model::layout::Parameters;
use xlaunch_data::MAX_TOKENIZER_BYTES;

/// Bytes that a thread reads at once. Small in tests, as are chunks.
const BLOCK_BYTES: u64 = if cfg!(test) { 3 << 10 } else { 4 << 20 };

/// Consecutive values of an arena.
#[derive(Debug)]
pub struct Piece {
    /// The arena.
    pub arena: Arena,
    /// Index of the first value.
    pub at: usize,
    /// The values.
    pub values: Vec<f32>,
}

/// Receives pieces, from several threads and in any order. `Err` ends the reading: the receiver is gone.
pub type Sink<'a> = &'a (dyn Fn(Piece) -> Result<(), Abandoned> + Sync);

/// The receiver needs no more pieces.
#[derive(Clone, Copy, Debug)]
pub struct Abandoned;

/// Reads the checkpoint `path` of this model on these threads: all parameters, and the moments in the ranges `moments`
/// of the arena.
pub fn read(
    path: &Path,
    shape: &ModelShape,
    layout: &Parameters,
    moments: &[Range<usize>],
    threads: &ThreadPool,
    sink: Sink<'_>,
) -> Result<State, CheckpointError> {
    let Checked { state, manifest } = check(path)?;
    check_model(path, &state, shape)?;
    let mut files = Vec::new();
    let (mut params, mut optimizer) = (Vec::new(), Vec::new());
    for entry in manifest.files.into_iter().filter(|entry| ![STATE, TOKENIZER].contains(&&*entry.name)) {
        let is_model = entry.name == MODEL;
        let source = Source::open(path, entry, layout, !is_model)?;
        if is_model { &mut params } else { &mut optimizer }.extend_from_slice(&source.tensors);
        files.push(source);
    }
    tensors::check_complete(path, layout, &[Arena::Params], &params)?;
    tensors::check_complete(path, layout, &[Arena::M, Arena::V], &optimizer)?;
    let wanted = |tensor: &Stored| {
        let overlaps =
            |range: &Range<usize>| range.start < tensor.elements.end && tensor.elements.start < range.end;
        tensor.arena == Arena::Params || moments.iter().any(overlaps)
    };
    let tasks: Vec<(&Source, &Chunk)> = files
        .iter()
        .flat_map(|file| file.chunks.iter().map(move |chunk| (file, chunk)))
        .filter(|(file, chunk)| file.overlaps(chunk.offset..chunk.end(), wanted))
        .collect();
    let read = |(file, chunk): (&Source, &Chunk)| file.read_chunk(chunk, sink);
    threads.install(|| tasks.into_par_iter().try_for_each(read)).or_else(Failure::into_result)?;
    Ok(state)
}

/// Reads the parameters from a `model.safetensors`, which another program may have written.
pub fn read_weights(
    path: &Path,
    layout: &Parameters,
    threads: &ThreadPool,
    sink: Sink<'_>,
) -> Result<(), CheckpointError> {
    let file = open_weights(path, layout)?;
    let blocks: Vec<Range<u64>> = file.tensor_blocks().collect();
    let read = |block: Range<u64>| file.read_block(block, None, sink);
    threads.install(|| blocks.into_par_iter().try_for_each(read)).or_else(Failure::into_result)
}

/// Checks that a `model.safetensors` has the parameters of this model.
pub fn check_weights(path: &Path, layout: &Parameters) -> Result<(), CheckpointError> {
    let file = open_weights(path, layout)?;
    let size = file.file.metadata().map_err(|error| file.failed(&error))?.len();
    let end = file.tensors.iter().map(|tensor| tensor.bytes.end).max().unwrap_or(0);
    if end <= size {
        Ok(())
    } else {
        Err(CheckpointError::Read {
            path: path.into(),
            reason: format!("it has {size} bytes instead of {end}"),
        })
    }
}

fn open_weights(path: &Path, layout: &Parameters) -> Result<Source, CheckpointError> {
    let read = |error: std::io::Error| CheckpointError::Read { path: path.into(), reason: error.to_string() };
    let file = File::open(path).map_err(read)?;
    let tensors = tensors::read_contents(path, &file, layout, false)?;
    tensors::check_complete(path, layout, &[Arena::Params], &tensors)?;
    Ok(Source::of_tensors(path, file, tensors))
}

/// Checks that a checkpoint belongs to this model.
pub(super) fn check_model(path: &Path, state: &State, shape: &ModelShape) -> Result<(), CheckpointError> {
    match state.model.difference(shape) {
        None => Ok(()),
        Some((key, saved, wanted)) => Err(CheckpointError::OtherModel {
            path: path.into(),
            difference: format!("{key} is {saved} in the checkpoint, {wanted} in this job"),
        }),
    }
}

/// A file of tensors.
pub(super) struct Source {
    /// The checkpoint.
    dir: PathBuf,
    name: String,
    file: File,
    tensors: Vec<Stored>,
    chunks: Vec<Chunk>,
    /// Offset of the first tensor. Blocks are cut at multiples of their size from there, so no cut splits a value.
    data: u64,
}

/// Reason why reading ended early.
enum Failure {
    Checkpoint(CheckpointError),
    Abandoned,
}

impl Failure {
    fn into_result(self) -> Result<(), CheckpointError> {
        match self {
            Self::Checkpoint(error) => Err(error),
            Self::Abandoned => Ok(()),
        }
    }
}

impl Source {
    /// Creates a source for a file without a manifest.
    pub(super) fn of_tensors(path: &Path, file: File, tensors: Vec<Stored>) -> Self {
        Self { dir: path.into(), name: String::new(), file, tensors, chunks: Vec::new(), data: 0 }
    }

    /// Reads as many tensors as possible.
    #[cfg(feature = "fuzzing")]
    pub(super) fn read_all(&self, sink: Sink<'_>) {
        for block in self.tensor_blocks() {
            let _ = self.read_block(block, None, sink);
        }
    }

    /// Returns the blocks of each tensor separately, without hashes.
    fn tensor_blocks(&self) -> impl Iterator<Item = Range<u64>> {
        self.tensors.iter().flat_map(|tensor| blocks(tensor.bytes.clone(), tensor.bytes.start))
    }

    fn open(dir: &Path, entry: Entry, layout: &Parameters, moments: bool) -> Result<Self, CheckpointError> {
        let path = dir.join(&entry.name);
        let damaged = |reason: String| CheckpointError::Damaged { path: dir.into(), reason };
        let (file, _) = manifest::open(&path).map_err(|error| damaged(error.to_string()))?;
        let tensors = tensors::read_contents(&path, &file, layout, moments).map_err(|error| match error {
            CheckpointError::Read { reason, .. } => damaged(format!("{}: {reason}", entry.name)),
            other => other,
        })?;
        let data = tensors.first().map_or(0, |tensor| tensor.bytes.start);
        // A value that spans two chunks would be read as two halves.
        let cut = |chunk: &Chunk| {
            let index = tensors.partition_point(|tensor| tensor.bytes.end <= chunk.offset);
            let tensor = tensors.get(index).filter(|tensor| tensor.bytes.start < chunk.offset);
            tensor.is_some_and(|tensor| !(chunk.offset - tensor.bytes.start).is_multiple_of(4))
        };
        if entry.chunks.iter().any(cut) {
            return Err(damaged(format!("the chunks of {} cut values", entry.name)));
        }
        Ok(Self { dir: dir.into(), name: entry.name, file, tensors, chunks: entry.chunks, data })
    }

    /// Returns whether a range of the file contains part of a tensor that is `wanted`.
    fn overlaps(&self, range: Range<u64>, wanted: impl Fn(&Stored) -> bool) -> bool {
        self.in_range(&range).any(wanted)
    }

    /// Returns the tensors in a range of the file.
    fn in_range(&self, range: &Range<u64>) -> impl Iterator<Item = &Stored> {
        let first = self.tensors.partition_point(|tensor| tensor.bytes.end <= range.start);
        let end = range.end;
        self.tensors[first..].iter().take_while(move |tensor| tensor.bytes.start < end)
    }

    fn read_chunk(&self, chunk: &Chunk, sink: Sink<'_>) -> Result<(), Failure> {
        let mut hash = Xxh3::new();
        for block in blocks(chunk.offset..chunk.end(), self.data) {
            self.read_block(block, Some(&mut hash), sink)?;
        }
        if hex(&hash) != chunk.xxh3_128 {
            let reason = format!("{} does not match its hash", self.name);
            return Err(Failure::Checkpoint(CheckpointError::Damaged { path: self.dir.clone(), reason }));
        }
        Ok(())
    }

    /// Reads a block and passes on its parts of tensors.
    fn read_block(&self, block: Range<u64>, hash: Option<&mut Xxh3>, sink: Sink<'_>) -> Result<(), Failure> {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut bytes = vec![0; size(block.end - block.start)];
        let read = self.file.file().read_exact_at(&mut bytes, block.start);
        read.map_err(|error| Failure::Checkpoint(self.failed(&error)))?;
        if let Some(hash) = hash {
            hash.update(&bytes);
        }
        for tensor in self.in_range(&block) {
            let part = tensor.bytes.start.max(block.start)..tensor.bytes.end.min(block.end);
            let values = &bytes[size(part.start - block.start)..size(part.end - block.start)];
            let values = values
                .chunks_exact(4)
                .map(|value| f32::from_le_bytes([value[0], value[1], value[2], value[3]]));
            let at = tensor.elements.start + size(part.start - tensor.bytes.start) / size_of::<f32>();
            let piece = Piece { arena: tensor.arena, at, values: values.collect() };
            sink(piece).map_err(|Abandoned| Failure::Abandoned)?;
        }
        Ok(())
    }

    fn failed(&self, error: &std::io::Error) -> CheckpointError {
        CheckpointError::Read { path: self.dir.join(&self.name), reason: error.to_string() }
    }
}

/// Cuts a range of a file into blocks. The distance of each cut from `origin` is a multiple of the block size.
fn blocks(range: Range<u64>, origin: u64) -> impl Iterator<Item = Range<u64>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let next = match start.checked_sub(origin) {
            None => origin,
            Some(distance) => origin.saturating_add((distance / BLOCK_BYTES + 1).saturating_mul(BLOCK_BYTES)),
        };
        let block = start..next.min(start.saturating_add(BLOCK_BYTES)).min(range.end);
        start = block.end;
        (block.start < block.end).then_some(block)
    })
}

/// Returns the tokenizer of the checkpoint `dir`: from its `tokenizer.json`, or bytes if its run read files as bytes.
/// `None` if it is unknown.
pub fn tokenizer(dir: &Path) -> Result<Option<Tokenizer>, CheckpointError> {
    let Checked { state, manifest } = check(dir)?;
    if manifest.files.iter().any(|entry| entry.name == TOKENIZER) {
        let json = manifest::read_verified(dir, &manifest, TOKENIZER, MAX_TOKENIZER_BYTES)?;
        let damaged = |reason: String| CheckpointError::Damaged { path: dir.into(), reason };
        let tokenizer = Tokenizer::from_json(&json);
        let end_of_text = state.end_of_text;
        // Older checkpoints do not record the id; the tokenizer determines it.
        let known = tokenizer.map(|tokenizer| match end_of_text {
            Some(_) => tokenizer.with_end_of_text(end_of_text),
            None => tokenizer,
        });
        return known.map(Some).map_err(|error| damaged(format!("{TOKENIZER}: {error}")));
    }
    let is_bytes = state.spec["data"]["tokenizer"] == "bytes";
    Ok(is_bytes.then(Tokenizer::bytes))
}
