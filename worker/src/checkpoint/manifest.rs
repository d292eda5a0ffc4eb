//! The manifest: lists exactly the files of a checkpoint, with their sizes and XXH3-128 hashes.
//!
//! Versions 2 and 3 have a hash per chunk of a file, because several ranks write one file, and readers verify each
//! block as they read it. Version 1 has one hash per file, which is read as a single chunk.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::Path;

use fs_err::File;
use fs_err::os::unix::fs::OpenOptionsExt;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::{CheckpointError, MANIFEST, MODEL, STATE, State, TOKENIZER, VERSION, parse_optimizer_name};

/// Size limit of files that are read whole. The manifest of a model with 100 billion parameters has 30 MB.
const MAX_MANIFEST_BYTES: u64 = 256 << 20;
const MAX_STATE_BYTES: u64 = 16 << 20;

/// The contents of `manifest.json`.
#[derive(Debug, Serialize)]
pub(super) struct Manifest {
    pub(super) version: u32,
    pub(super) files: Vec<Entry>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Chunks that cover the file, in order of offset.
    pub(super) chunks: Vec<Chunk>,
}

/// A part of a file with its own hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Offset in the file.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// XXH3-128 hash in hexadecimal.
    pub xxh3_128: String,
}

impl Chunk {
    /// Describes the chunk with these bytes.
    pub(super) fn of(offset: u64, bytes: &[u8]) -> Self {
        let mut hash = Xxh3::new();
        hash.update(bytes);
        Self { offset, bytes: bytes.len() as u64, xxh3_128: hex(&hash) }
    }

    pub(super) fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// Parses a hexadecimal hash.
pub fn parse_hash(hex: &str) -> Option<u128> {
    u128::from_str_radix(hex, 16).ok()
}

pub(super) fn hex(hash: &Xxh3) -> String {
    format!("{:032x}", hash.digest128())
}

/// A checkpoint whose files have the right names and sizes. Contents are verified as they are read.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) state: State,
    pub(super) manifest: Manifest,
}

/// Checks a checkpoint without reading its tensors.
pub(super) fn check(dir: &Path) -> Result<Checked, CheckpointError> {
    let damaged = |reason: String| CheckpointError::Damaged { path: dir.into(), reason };
    let manifest = read_manifest(dir)?;
    for entry in &manifest.files {
        let (_, bytes) = open(&dir.join(&entry.name)).map_err(|error| unreadable(dir, &error))?;
        if bytes != entry.bytes {
            return Err(damaged(format!("{} has {bytes} bytes instead of {}", entry.name, entry.bytes)));
        }
    }
    let state = read_state(dir, &manifest)?;
    Ok(Checked { state, manifest })
}

/// Classifies an error: a missing file, or something other than a file, means a damaged checkpoint. Other errors may be
/// temporary.
fn unreadable(dir: &Path, error: &io::Error) -> CheckpointError {
    let (path, reason) = (dir.into(), error.to_string());
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::InvalidData | io::ErrorKind::NotADirectory => {
            CheckpointError::Damaged { path, reason }
        }
        _ => CheckpointError::Read { path, reason },
    }
}

fn read_manifest(dir: &Path) -> Result<Manifest, CheckpointError> {
    let json =
        read_whole(&dir.join(MANIFEST), MAX_MANIFEST_BYTES).map_err(|error| unreadable(dir, &error))?;
    parse(dir, &json)
}

/// Parses the manifest of the checkpoint `dir`.
pub(super) fn parse(dir: &Path, json: &[u8]) -> Result<Manifest, CheckpointError> {
    let damaged = |reason: String| CheckpointError::Damaged { path: dir.into(), reason };
    // The version comes first: the rest of another version may have any form.
    let Header { version } =
        serde_json::from_slice(json).map_err(|error| damaged(format!("{MANIFEST}: {error}")))?;
    if !(1..=VERSION).contains(&version) {
        return Err(CheckpointError::Version { path: dir.into(), version });
    }
    let manifest: AnyManifest =
        serde_json::from_slice(json).map_err(|error| damaged(format!("{MANIFEST}: {error}")))?;
    let files: Vec<Entry> = manifest.files.into_iter().map(AnyEntry::entry).collect();
    check_names(&files).map_err(damaged)?;
    files.iter().try_for_each(check_chunks).map_err(damaged)?;
    Ok(Manifest { version, files })
}

/// Requires the model, the state, and the moments of every rank, each exactly once. A tokenizer is optional. Rejects
/// anything else.
fn check_names(files: &[Entry]) -> Result<(), String> {
    let names: BTreeSet<&str> = files.iter().map(|entry| entry.name.as_str()).collect();
    if names.len() != files.len() {
        return Err(format!("{MANIFEST} contains a file twice"));
    }
    if let Some(missing) = [MODEL, STATE].into_iter().find(|name| !names.contains(name)) {
        return Err(format!("{MANIFEST} does not contain {missing}"));
    }
    let others: Vec<&str> =
        names.into_iter().filter(|name| ![MODEL, STATE, TOKENIZER].contains(name)).collect();
    let ranks: Vec<_> = others.iter().map(|name| parse_optimizer_name(name)).collect();
    if let Some(at) = ranks.iter().position(Option::is_none) {
        return Err(format!("{MANIFEST} contains the file name {:?}", others[at]));
    }
    // Names have leading zeros, so they sort by rank.
    let world = ranks.len();
    let complete = ranks.iter().enumerate().all(|(rank, found)| *found == Some((rank, world)));
    if complete && world > 0 {
        Ok(())
    } else {
        Err(format!("{MANIFEST} does not contain the optimizer state of every rank"))
    }
}

fn check_chunks(entry: &Entry) -> Result<(), String> {
    let mut end = 0;
    for chunk in &entry.chunks {
        if chunk.offset != end || chunk.bytes == 0 || chunk.offset.checked_add(chunk.bytes).is_none() {
            return Err(format!("{MANIFEST}: the chunks of {} do not follow each other", entry.name));
        }
        end = chunk.end();
    }
    if end == entry.bytes {
        Ok(())
    } else {
        Err(format!("{MANIFEST}: the chunks of {} do not cover it", entry.name))
    }
}

fn read_state(dir: &Path, manifest: &Manifest) -> Result<State, CheckpointError> {
    let damaged = |reason: String| CheckpointError::Damaged { path: dir.into(), reason };
    let json = read_verified(dir, manifest, STATE, MAX_STATE_BYTES)?;
    let state: State = serde_json::from_slice(&json).map_err(|error| damaged(format!("{STATE}: {error}")))?;
    if state.version == manifest.version {
        Ok(state)
    } else {
        Err(damaged(format!("{STATE} has version {}, {MANIFEST} {}", state.version, manifest.version)))
    }
}

/// Reads a small file of the manifest and checks its hash.
pub(super) fn read_verified(
    dir: &Path,
    manifest: &Manifest,
    name: &str,
    max: u64,
) -> Result<Vec<u8>, CheckpointError> {
    let contents = read_whole(&dir.join(name), max).map_err(|error| unreadable(dir, &error))?;
    let entry = manifest.files.iter().find(|entry| entry.name == name);
    let verified = entry.is_some_and(|entry| {
        contents.len() as u64 == entry.bytes
            && entry.chunks.iter().all(|chunk| {
                let (start, end) = (usize::try_from(chunk.offset), usize::try_from(chunk.end()));
                let (Ok(start), Ok(end)) = (start, end) else { return false };
                contents.get(start..end).is_some_and(|bytes| Chunk::of(chunk.offset, bytes) == *chunk)
            })
    });
    let reason = || format!("{name} does not match its hash");
    verified
        .then_some(contents)
        .ok_or_else(|| CheckpointError::Damaged { path: dir.into(), reason: reason() })
}

fn read_whole(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let (file, bytes) = open(path)?;
    if bytes > max {
        let message = format!("{} has more than {max} bytes", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    let mut contents = Vec::new();
    file.take(max).read_to_end(&mut contents)?;
    Ok(contents)
}

/// Opens a regular file and returns its size. Refuses symbolic links, and files that would block.
pub(super) fn open(path: &Path) -> io::Result<(File, u64)> {
    let irregular =
        || io::Error::new(io::ErrorKind::InvalidData, format!("{} is not a regular file", path.display()));
    if !fs_err::symlink_metadata(path)?.is_file() {
        return Err(irregular());
    }
    // The file may have been replaced since it was checked.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let mut options = fs_err::OpenOptions::new();
    let file = options.read(true).custom_flags(i32::try_from(flags).unwrap_or(0)).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(irregular());
    }
    Ok((file, metadata.len()))
}

#[derive(Deserialize)]
struct Header {
    version: u32,
}

/// A manifest of any version.
#[derive(Deserialize)]
struct AnyManifest {
    files: Vec<AnyEntry>,
}

#[derive(Deserialize)]
struct AnyEntry {
    name: String,
    bytes: u64,
    /// Present only in version 1.
    xxh3_128: Option<String>,
    #[serde(default)]
    chunks: Vec<Chunk>,
}

impl AnyEntry {
    fn entry(self) -> Entry {
        let Self { name, bytes, xxh3_128, mut chunks } = self;
        if let Some(xxh3_128) = xxh3_128.filter(|_| chunks.is_empty()) {
            chunks.push(Chunk { offset: 0, bytes, xxh3_128 });
        }
        Entry { name, bytes, chunks }
    }
}
