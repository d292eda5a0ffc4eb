//! Writes a rank's part of a checkpoint, and commits the parts of all ranks.
//!
//! ```text
//! .tmp-step-N/  <- every rank: its ranges of the model, its moments; each file synced by its writers
//!               <- rank 0, when all are done: state, tokenizer, manifest; directory synced; parts of all ranks read
//!                  back; renamed to step-N/; parent synced
//! ```

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use fs_err::{File, OpenOptions};
use xlaunch_proto::disk::Disk;

use super::manifest::{self, Chunk, Entry, Manifest};
use super::tensors::{Arena, Contents, Stored};
use super::{MANIFEST, MODEL, Portion, STATE, Snapshot, State, TOKENIZER, name, optimizer_name};
use crate::fail::{self, Place};
use crate::model::layout::Parameters;
use crate::phase;

/// Maximum chunk size in bytes. Readers hash a chunk as a whole. Small in tests, so that small files have many chunks.
const CHUNK_BYTES: usize = if cfg!(test) { 4 << 10 } else { 4 << 20 };
/// Maximum number of values requested from [`Values`] at once.
pub(super) const PIECE_LEN: usize = CHUNK_BYTES / size_of::<f32>();
/// Prefix of directories that are being written.
pub(super) const TEMPORARY: &str = ".tmp-";
/// Prefix of a checkpoint while another checkpoint of the same step replaces it.
pub(super) const REPLACED: &str = ".old-";

/// Values of a rank's [`Portion`], with its ranges back to back.
pub(super) trait Values {
    /// Returns at most [`PIECE_LEN`] values of an arena.
    fn get(&mut self, arena: Arena, range: Range<usize>) -> io::Result<&[f32]>;
}

impl Values for &Snapshot {
    fn get(&mut self, arena: Arena, range: Range<usize>) -> io::Result<&[f32]> {
        let values = match arena {
            Arena::Params => &self.params,
            Arena::M => &self.m,
            Arena::V => &self.v,
        };
        Ok(&values[range])
    }
}

/// A rank's part of a file: the chunks that the rank has written and synced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Name of the file.
    pub name: String,
    /// Chunks that the rank has written, with their checksums.
    pub chunks: Vec<Chunk>,
}

/// Writes the part of one rank.
#[derive(Clone, Debug)]
pub(super) struct Writer {
    pub(super) layout: Parameters,
    pub(super) portion: Portion,
    pub(super) rank: usize,
    pub(super) writers: usize,
}

/// Returns the directory in which the checkpoint of `step` is written.
pub(super) fn temporary(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("{TEMPORARY}{}", name(step)))
}

impl Writer {
    /// Writes this rank's part into the directory `to`, and syncs it.
    pub(super) fn write(&self, disk: &Disk, to: &Path, values: &mut dyn Values) -> io::Result<Vec<Written>> {
        disk.create_dir(to)?;
        let model = Contents::model(&self.layout)?;
        let mut file = ChunkWriter::open(disk, to, MODEL)?;
        if self.rank == 0 {
            file.put(0, &model.header)?;
        }
        self.put(&mut file, &model.tensors, values)?;
        let model = file.finish()?;

        let name = optimizer_name(self.rank, self.writers);
        let moments = Contents::moments(&self.layout, &self.portion)?;
        let mut file = ChunkWriter::open(disk, to, &name)?;
        file.put(0, &moments.header)?;
        self.put(&mut file, &moments.tensors, values)?;
        Ok(vec![model, file.finish()?])
    }

    /// Writes the parts of tensors that are in this rank's portion.
    fn put(&self, file: &mut ChunkWriter<'_>, tensors: &[Stored], values: &mut dyn Values) -> io::Result<()> {
        for tensor in tensors {
            for (part, at) in self.portion.within(&tensor.elements) {
                for from in (0..part.len()).step_by(PIECE_LEN) {
                    let len = PIECE_LEN.min(part.len() - from);
                    let piece = values.get(tensor.arena, at + from..at + from + len)?;
                    let skipped = (part.start + from - tensor.elements.start) * size_of::<f32>();
                    // The format is little-endian, as are all supported platforms.
                    file.put(tensor.bytes.start + skipped as u64, bytemuck::cast_slice(piece))?;
                }
            }
        }
        Ok(())
    }
}

/// Turns the files that all ranks have written to [`temporary`] into a checkpoint. Returns its path.
pub(super) fn commit(
    disk: &Disk,
    dir: &Path,
    state: &State,
    tokenizer: Option<&[u8]>,
    written: impl IntoIterator<Item = Written>,
) -> io::Result<PathBuf> {
    let temporary = temporary(dir, state.step);
    let mut files: BTreeMap<String, Vec<Chunk>> = BTreeMap::new();
    let mut samples = Vec::new();
    for Written { name, chunks } in written {
        samples.extend(chunks.last().map(|last| (name.clone(), last.clone())));
        files.entry(name).or_default().extend(chunks);
    }
    let state_json = serde_json::to_vec_pretty(state)?;
    let whole = [Some((STATE, &*state_json)), tokenizer.map(|json| (TOKENIZER, json))];
    for (name, contents) in whole.into_iter().flatten() {
        let mut file = ChunkWriter::open(disk, &temporary, name)?;
        file.put(0, contents)?;
        let file = file.finish()?;
        files.insert(file.name, file.chunks);
    }
    let entry = |(name, mut chunks): (String, Vec<Chunk>)| {
        chunks.sort_by_key(|chunk| chunk.offset);
        Entry { name, bytes: chunks.last().map_or(0, Chunk::end), chunks }
    };
    let manifest = Manifest { version: state.version, files: files.into_iter().map(entry).collect() };
    let mut file = ChunkWriter::open(disk, &temporary, MANIFEST)?;
    file.put(0, &serde_json::to_vec(&manifest)?)?;
    file.finish()?;
    disk.sync_dir(&temporary)?;
    read_back(&temporary, &samples)?;
    let path = dir.join(name(state.step));
    fail::io(Place::SaveCommit)?;
    put_in_place(disk, dir, &temporary, &path, state.step)?;
    disk.sync_dir(dir)?;
    Ok(path)
}

/// Checks that the files of the ranks are in this directory: a rank on another node may have written to a directory of
/// the same path that is not shared. Reads the last chunk of each rank's part of each file, so it costs a few MiB per
/// rank.
fn read_back(dir: &Path, samples: &[(String, Chunk)]) -> io::Result<()> {
    manifest::check(dir).map_err(io::Error::other)?;
    for (name, chunk) in samples {
        let (file, _) = manifest::open(&dir.join(name))?;
        let mut bytes = vec![0; usize::try_from(chunk.bytes).map_err(io::Error::other)?];
        file.file().read_exact_at(&mut bytes, chunk.offset)?;
        if Chunk::of(chunk.offset, &bytes) != *chunk {
            let at = dir.join(name);
            let message = format!(
                "{} does not have what a rank wrote to it: is {} shared?",
                at.display(),
                dir.display()
            );
            return Err(io::Error::other(message));
        }
    }
    Ok(())
}

/// Deletes the checkpoint of a step. Renames it first: if the process is killed, the rest must not look like a damaged
/// checkpoint.
pub(super) fn delete(disk: &Disk, dir: &Path, step: u64) -> io::Result<()> {
    fail::io(Place::SaveDelete)?;
    let name = name(step);
    let deleted = dir.join(format!("{TEMPORARY}deleted-{name}"));
    match disk.rename(&dir.join(&name), &deleted) {
        Ok(()) => disk.remove_dir(&deleted),
        // A directory of overlayfs that cannot be renamed: moving its files would copy them.
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => disk.remove_dir(&dir.join(&name)),
        Err(error) => Err(error),
    }
}

/// Renames a directory, replacing any directory of that name.
fn put_in_place(disk: &Disk, dir: &Path, from: &Path, to: &Path, step: u64) -> io::Result<()> {
    if !to.exists() {
        return disk.rename(from, to);
    }
    match disk.exchange(from, to) {
        Ok(()) => disk.remove_dir(from),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            // Until the second rename is done, the next start of a job finds the old checkpoint and restores it.
            let old = dir.join(format!("{REPLACED}{}", name(step)));
            disk.rename_dir(to, &old)?;
            disk.rename(from, to)?;
            disk.remove_dir(&old)
        }
        Err(error) => Err(error),
    }
}

/// Writes a file in chunks, each of which is hashed before it leaves memory.
struct ChunkWriter<'a> {
    disk: &'a Disk,
    name: String,
    file: File,
    /// Offset of `buffer` in the file.
    offset: u64,
    buffer: Vec<u8>,
    chunks: Vec<Chunk>,
}

impl<'a> ChunkWriter<'a> {
    fn open(disk: &'a Disk, dir: &Path, name: &str) -> io::Result<Self> {
        let file = disk.open(&dir.join(name), OpenOptions::new().write(true).create(true).truncate(false))?;
        Ok(Self { disk, name: name.into(), file, offset: 0, buffer: Vec::new(), chunks: Vec::new() })
    }

    fn put(&mut self, offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        if offset != self.offset + self.buffer.len() as u64 {
            self.flush()?;
            self.offset = offset;
        }
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK_BYTES - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if self.buffer.len() == CHUNK_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.chunks.push(Chunk::of(self.offset, &self.buffer));
        fail::io(Place::SaveWrite)?;
        self.disk.write_at(&self.file, &self.buffer, self.offset)?;
        self.offset += self.buffer.len() as u64;
        self.buffer.clear();
        phase::advance();
        Ok(())
    }

    fn finish(mut self) -> io::Result<Written> {
        self.flush()?;
        fail::io(Place::SaveSync)?;
        self.disk.sync(&self.file)?;
        Ok(Written { name: self.name, chunks: self.chunks })
    }
}
