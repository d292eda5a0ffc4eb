//! Memory snapshots: snapshots of a rank's state in memory files that belong to its agent, so that they survive the
//! worker.
//!
//! ```text
//! training thread: erase the header of the older file -> copy the state into it
//! checkpoint thread: hash, `state.json`, header -> write the same memory to disk
//! next attempt: header -> pieces for the model, hashed as they are read
//! ```
//! The buffers of the asynchronous save are mapped files instead of private memory, so snapshots cost no extra copy.
//! Two files take turns: while one is overwritten, the other is complete. Before each save all ranks agree that none of
//! them is still writing the previous one, so at that point the previous snapshot is complete on every rank.
//!
//! A rank has only its own [`Portion`]; after reading, the ranks exchange their portions. The format, and the agent's
//! use of it, are described in [`xlaunch_proto::snapshot`]. Its hash is computed over the hashes of blocks, so that
//! several threads can read and verify a snapshot.
//!
//! Invariants: a header is written after the data that it describes, and erased before that data changes; a rank that
//! finds a snapshot unreadable erases it, so that no later attempt tries it again.
//!
//! A snapshot needs no more checks than a checkpoint on disk: both contain the same bytes, saved after the same
//! agreement that the state is finite, and after `observe.check_every` has compared the replicas.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use fs_err::{File, OpenOptions};
use rayon::ThreadPool;
use rayon::prelude::*;
use rustix::fs::FallocateFlags;
use xlaunch_engine::{HostAllocator, HostBuffer};
use xlaunch_proto::snapshot::{HEADER_BYTES, Header, Identity, MAX_STATE_BYTES, SnapshotId, offset};
use xlaunch_spec::ids::Digest;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::tensors::Arena;
use super::{Abandoned, CheckpointError, Piece, Portion, Sink, State};

/// Values per block, the unit of reading and hashing. Small in tests.
const BLOCK_VALUES: usize = if cfg!(test) { 700 } else { 1 << 20 };
/// Arenas in the order of the files and of the hash.
const ARENAS: [Arena; 3] = [Arena::Params, Arena::M, Arena::V];

/// Host copies of a rank's [`Portion`] of the arenas, with its ranges back to back.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "the fields are named after the arenas")]
pub struct Snapshot {
    pub params: HostBuffer,
    pub m: HostBuffer,
    pub v: HostBuffer,
    /// The memory file that the buffers are mapped from, if any.
    pub slot: Option<Slot>,
}

impl Snapshot {
    /// Erases the memory snapshot. Call this before overwriting the buffers.
    pub(super) fn erase(&self) -> io::Result<()> {
        self.slot.as_ref().map_or(Ok(()), Slot::erase)
    }

    /// Marks the snapshot in the buffers as complete, so that the next attempt can resume from it.
    pub(super) fn complete(&self, state: &State) -> io::Result<()> {
        let complete = |slot: &Slot| slot.complete([&*self.params, &*self.m, &*self.v], state);
        self.slot.as_ref().map_or(Ok(()), complete)
    }
}

/// The memory files of this rank, and the use of each.
#[derive(Clone, Debug)]
pub struct Memory {
    files: Vec<Arc<File>>,
    identity: Identity,
    layout: Digest,
    portion: Portion,
    /// Number of this attempt.
    attempt: u32,
    /// The snapshot that this attempt resumes from.
    resume: Option<SnapshotId>,
}

/// A memory file that holds one snapshot.
#[derive(Debug)]
pub struct Slot {
    file: Arc<File>,
    identity: Identity,
    layout: Digest,
    portion: Portion,
    attempt: u32,
}

/// A run of consecutive values of an arena.
struct Block {
    /// Range in the arena.
    arena: Range<usize>,
    /// Range in this arena's part of the file.
    packed: Range<usize>,
}

/// Reason why a snapshot was not read.
enum Failure {
    Damaged(String),
    /// The reader gave up.
    Abandoned,
}

impl Memory {
    /// Opens the files with these descriptors of this process. `layout` is equal between attempts exactly if the
    /// model's layout and its division among ranks are equal.
    pub fn open(
        fds: &[u32],
        identity: Identity,
        layout: &[u8],
        portion: Portion,
        attempt: u32,
        resume: Option<SnapshotId>,
    ) -> io::Result<Self> {
        let open = |fd: &u32| {
            let path = PathBuf::from(format!("/proc/self/fd/{fd}"));
            OpenOptions::new().read(true).write(true).open(path).map(Arc::new)
        };
        let files = fds.iter().map(open).collect::<io::Result<_>>()?;
        Ok(Self { files, identity, layout: Digest::of(layout), portion, attempt, resume })
    }

    /// Returns whether this attempt resumes from a snapshot.
    pub fn is_resumed(&self) -> bool {
        self.resume.is_some()
    }

    /// Returns the total size of all files in bytes.
    fn bytes(&self) -> u64 {
        let file = offset(3, self.portion.len() as u64).unwrap_or(u64::MAX);
        file.saturating_mul(self.files.len() as u64)
    }

    /// Maps the files as buffers, in order of use: the snapshot that this attempt resumes from is overwritten last.
    /// Touches all of their memory.
    ///
    /// # Errors
    /// If there is not enough memory; then no file is used.
    pub(super) fn allocate(&self, host: &HostAllocator) -> Result<Vec<Snapshot>, CheckpointError> {
        let mut files: Vec<_> = self.files.iter().collect();
        files
            .sort_by_key(|file| self.resume.is_some() && header(file).map(|header| header.id) == self.resume);
        let snapshots: io::Result<_> = files.iter().map(|file| self.snapshot(file, host)).collect();
        snapshots.map_err(|error| {
            files.iter().for_each(|file| release(file));
            let mib = self.bytes().div_ceil(1 << 20);
            CheckpointError::Memory { rank: self.identity.rank, mib, reason: error.to_string() }
        })
    }

    fn snapshot(&self, file: &Arc<File>, host: &HostAllocator) -> io::Result<Snapshot> {
        let values = self.portion.len();
        let start = |arena| offset(arena, values as u64).ok_or(io::ErrorKind::InvalidInput);
        // Allocate before mapping: accessing a page without memory behind it would raise SIGBUS.
        rustix::fs::fallocate(file.file(), FallocateFlags::empty(), 0, start(3)?)?;
        let map = |arena| -> io::Result<HostBuffer> { host.map(file.file(), start(arena)?, values) };
        let slot = Slot {
            file: (*file).clone(),
            identity: self.identity,
            layout: self.layout,
            portion: self.portion.clone(),
            attempt: self.attempt,
        };
        Ok(Snapshot { params: map(0)?, m: map(1)?, v: map(2)?, slot: Some(slot) })
    }

    /// Reads this rank's portion of the arenas from the snapshot that this attempt resumes from. The caller must not
    /// use the pieces before `Ok` is returned. `None` if reading was abandoned.
    ///
    /// # Errors
    /// If the snapshot is damaged; it has been erased then.
    pub fn read(&self, threads: &ThreadPool, sink: Sink<'_>) -> Result<Option<State>, CheckpointError> {
        let Some(id) = self.resume else { return Ok(None) };
        let file = self.files.iter().find(|file| header(file).is_some_and(|header| header.id == id));
        let result = match file {
            Some(file) => self.read_file(file, threads, sink),
            None => Err(Failure::Damaged("it no longer exists".into())),
        };
        match result {
            Ok(state) => Ok(Some(state)),
            Err(Failure::Abandoned) => Ok(None),
            Err(Failure::Damaged(reason)) => {
                let (step, rank) = (id.step, self.identity.rank);
                let erased = file.map_or(Ok(()), |file| erase(file));
                erased.map_err(|error| CheckpointError::Read {
                    path: "memory snapshot".into(),
                    reason: format!("failed to erase it: {error}"),
                })?;
                Err(CheckpointError::DamagedMemory { step, rank, reason })
            }
        }
    }

    fn read_file(&self, file: &File, threads: &ThreadPool, sink: Sink<'_>) -> Result<State, Failure> {
        let damaged = |reason: &str| Failure::Damaged(reason.into());
        let header = header(file).ok_or_else(|| damaged("its header was erased"))?;
        let values = self.portion.len() as u64;
        if header.identity != self.identity {
            return Err(damaged("it belongs to another run or rank"));
        }
        if (header.layout, header.values) != (self.layout, values) {
            return Err(damaged("it belongs to another model, or another division among ranks"));
        }
        if header.state_bytes > MAX_STATE_BYTES {
            return Err(damaged("the size of its state is invalid"));
        }
        let read = |error: io::Error| Failure::Damaged(error.to_string());
        let start = |arena| offset(arena, values).ok_or_else(|| damaged("its size is invalid"));
        let blocks = blocks(&self.portion);
        let tasks: Vec<(u64, Arena, &Block)> = (0..)
            .zip(ARENAS)
            .flat_map(|(index, arena)| blocks.iter().map(move |it| (index, arena, it)))
            .collect();
        let read_block = |(index, arena, block): (u64, Arena, &Block)| {
            let mut values = vec![0.0_f32; block.arena.len()];
            // Little-endian, as on all supported platforms.
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
            let at = start(index)? + (block.packed.start * size_of::<f32>()) as u64;
            file.file().read_exact_at(bytes, at).map_err(read)?;
            let hash = xxh3_128(bytes);
            sink(Piece { arena, at: block.arena.start, values }).map_err(|Abandoned| Failure::Abandoned)?;
            Ok(hash)
        };
        let hashes: Result<Vec<u128>, Failure> =
            threads.install(|| tasks.into_par_iter().map(read_block).collect());
        let mut state = vec![0; usize::try_from(header.state_bytes).unwrap_or(0)];
        file.file().read_exact_at(&mut state, start(3)?).map_err(read)?;
        if hash_of(hashes?, &state) != header.hash {
            return Err(damaged("it does not match its hash"));
        }
        let state: State = serde_json::from_slice(&state).map_err(|error| read(error.into()))?;
        if state.step == header.id.step {
            Ok(state)
        } else {
            Err(Failure::Damaged(format!("its state is of step {}", state.step)))
        }
    }
}

impl Slot {
    /// Marks the slot as having no complete snapshot.
    pub(super) fn erase(&self) -> io::Result<()> {
        erase(&self.file)
    }

    /// Turns the data copied to the arenas into a complete snapshot.
    pub(super) fn complete(&self, arenas: [&[f32]; 3], state: &State) -> io::Result<()> {
        let values = arenas[0].len() as u64;
        let id = SnapshotId { step: state.step, attempt: self.attempt };
        let state = serde_json::to_vec(state)?;
        let state_bytes = state.len() as u64;
        if state_bytes > MAX_STATE_BYTES {
            return Err(io::Error::other(format!("its state has {state_bytes} bytes")));
        }
        let blocks = blocks(&self.portion);
        let in_arena = |values: &'_ [f32]| -> Vec<u128> {
            blocks.iter().map(|block| xxh3_128(bytemuck::cast_slice(&values[block.packed.clone()]))).collect()
        };
        let hash = hash_of(arenas.into_iter().flat_map(in_arena), &state);
        let at = offset(3, values).ok_or(io::ErrorKind::InvalidInput)?;
        self.file.file().write_all_at(&state, at)?;
        let (identity, layout) = (self.identity, self.layout);
        let header = Header { identity, id, layout, values, state_bytes, hash };
        self.file.file().write_all_at(&header.encode(), 0)
    }
}

/// Returns the memory to the system as far as possible.
fn release(file: &File) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let bytes = file.metadata().map_or(0, |metadata| metadata.len());
    let _ = rustix::fs::fallocate(file.file(), flags, 0, bytes);
}

fn erase(file: &File) -> io::Result<()> {
    file.file().write_all_at(&[0; HEADER_BYTES], 0)
}

/// The header of a complete snapshot.
fn header(file: &File) -> Option<Header> {
    let mut bytes = [0; HEADER_BYTES];
    file.file().read_exact_at(&mut bytes, 0).ok()?;
    Header::decode(&bytes)
}

/// The blocks of a portion.
fn blocks(portion: &Portion) -> Vec<Block> {
    let mut packed = 0;
    let mut blocks = Vec::new();
    for owned in portion.ranges() {
        for start in owned.arena.clone().step_by(BLOCK_VALUES) {
            let arena = start..owned.arena.end.min(start + BLOCK_VALUES);
            let end = packed + arena.len();
            blocks.push(Block { arena, packed: packed..end });
            packed = end;
        }
    }
    blocks
}

/// The hash of a snapshot, from those of the blocks of its arenas, one arena after another.
fn hash_of(blocks: impl IntoIterator<Item = u128>, state: &[u8]) -> u128 {
    let mut hash = Xxh3::new();
    blocks.into_iter().for_each(|block| hash.update(&block.to_le_bytes()));
    hash.update(state);
    hash.digest128()
}

#[cfg(test)]
mod tests;
