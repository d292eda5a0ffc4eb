//! Writes the files beside shards: masks, and positions of documents.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::PrepareError;
use crate::manifest::{MASK_SUFFIX, SHARD_SUFFIX, SideFile};

const SIDE_BUFFER_BYTES: usize = 256 << 10;

/// A file that is written from start to end.
pub(super) struct SideWriter {
    name: String,
    path: PathBuf,
    file: BufWriter<File>,
    hash: Xxh3,
    bytes: u64,
}

impl SideWriter {
    pub(super) fn create(dir: &Path, name: String) -> Result<Self, PrepareError> {
        let path = dir.join(&name);
        let file = BufWriter::with_capacity(SIDE_BUFFER_BYTES, create_new(&path)?);
        Ok(Self { name, path, file, hash: Xxh3::new(), bytes: 0 })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), PrepareError> {
        self.file.write_all(bytes).map_err(|error| PrepareError::write(&self.path, &error))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn finish(self) -> Result<SideFile, PrepareError> {
        let Self { name, path, file, hash, bytes } = self;
        let file = file.into_inner().map_err(|error| error.into_error());
        let synced = file.and_then(|file| file.sync_all());
        synced.map_err(|error| PrepareError::write(&path, &error))?;
        Ok(SideFile { name, bytes, xxh3_128: format!("{:032x}", hash.digest128()) })
    }
}

/// The mask of a shard: one bit per id, least significant bit first.
pub(super) struct MaskWriter {
    file: SideWriter,
    /// Bits that do not fill a byte yet, and their number.
    rest: (u8, u32),
}

impl MaskWriter {
    pub(super) fn create(dir: &Path, shard: &str) -> Result<Self, PrepareError> {
        let stem = shard.strip_suffix(SHARD_SUFFIX).unwrap_or(shard);
        Ok(Self { file: SideWriter::create(dir, format!("{stem}{MASK_SUFFIX}"))?, rest: (0, 0) })
    }

    pub(super) fn write(&mut self, bits: &[bool]) -> Result<(), PrepareError> {
        let (mut byte, mut count) = self.rest;
        let mut bytes = Vec::with_capacity(bits.len() / 8 + 1);
        for bit in bits {
            byte |= u8::from(*bit) << count;
            count += 1;
            if count == u8::BITS {
                bytes.push(byte);
                (byte, count) = (0, 0);
            }
        }
        self.rest = (byte, count);
        self.file.write(&bytes)
    }

    pub(super) fn finish(mut self) -> Result<SideFile, PrepareError> {
        if let (byte, 1..) = self.rest {
            self.file.write(&[byte])?;
        }
        self.file.finish()
    }
}

/// Creates a file. None is replaced: the directory contained no data.
pub(super) fn create_new(path: &Path) -> Result<File, PrepareError> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
    file.map_err(|error| PrepareError::write(path, &error))
}
