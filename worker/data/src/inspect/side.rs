//! Reads and verifies the files beside shards: masks, and positions of documents.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::READ_BYTES;
use crate::manifest::SideFile;
use crate::{PrepareError, open_regular};

/// A file that is read from start to end.
struct SideReader {
    path: PathBuf,
    file: File,
    hash: Xxh3,
    buffer: Vec<u8>,
    at: usize,
    expected_hash: String,
}

impl SideReader {
    fn open(dir: &Path, file: &SideFile) -> Result<Self, PrepareError> {
        let path = dir.join(&file.name);
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => PrepareError::Data(format!("{} is missing", path.display())),
            _ => PrepareError::read(path.display(), &error),
        };
        let opened = open_regular(&path).map_err(failed)?;
        let bytes = opened.metadata().map_err(failed)?.len();
        if bytes != file.bytes {
            return Err(damaged(&path, "its size differs from the manifest"));
        }
        let expected_hash = file.xxh3_128.clone();
        Ok(Self { path, file: opened, hash: Xxh3::new(), buffer: Vec::new(), at: 0, expected_hash })
    }

    /// Returns the next byte; `None` at the end.
    fn next(&mut self) -> Result<Option<u8>, PrepareError> {
        if self.at == self.buffer.len() {
            self.buffer.clear();
            self.at = 0;
            let read = Read::by_ref(&mut self.file).take(READ_BYTES as u64).read_to_end(&mut self.buffer);
            read.map_err(|error| PrepareError::read(self.path.display(), &error))?;
            self.hash.update(&self.buffer);
        }
        let byte = self.buffer.get(self.at).copied();
        self.at += usize::from(byte.is_some());
        Ok(byte)
    }

    fn finish(mut self) -> Result<(), PrepareError> {
        if self.next()?.is_some() {
            return Err(self.damaged("it is longer than the ids"));
        }
        let hash = format!("{:032x}", self.hash.digest128());
        if hash.eq_ignore_ascii_case(&self.expected_hash) {
            Ok(())
        } else {
            Err(self.damaged("its contents do not match the hash in the manifest"))
        }
    }

    fn damaged(&self, reason: &str) -> PrepareError {
        damaged(&self.path, reason)
    }
}

fn damaged(path: &Path, reason: &str) -> PrepareError {
    PrepareError::Data(format!("{}: damaged: {reason}", path.display()))
}

/// The mask of a shard.
pub(super) struct MaskReader {
    file: SideReader,
    byte: u8,
    /// Number of bits of `byte` that were not returned yet.
    left: u32,
    ones: u64,
}

impl MaskReader {
    pub(super) fn open(dir: &Path, file: &SideFile) -> Result<Self, PrepareError> {
        Ok(Self { file: SideReader::open(dir, file)?, byte: 0, left: 0, ones: 0 })
    }

    pub(super) fn next(&mut self) -> Result<bool, PrepareError> {
        if self.left == 0 {
            self.byte = self.file.next()?.ok_or_else(|| self.file.damaged("it is shorter than the ids"))?;
            self.left = u8::BITS;
        }
        let bit = self.byte & 1 == 1;
        self.byte >>= 1;
        self.left -= 1;
        self.ones += u64::from(bit);
        Ok(bit)
    }

    /// Returns the number of ids whose loss counts.
    pub(super) fn finish(self) -> Result<u64, PrepareError> {
        if self.byte != 0 {
            return Err(self.file.damaged("bits after the last id are set"));
        }
        self.file.finish().map(|()| self.ones)
    }
}

/// The positions at which documents start.
pub(super) struct StartsReader {
    file: SideReader,
    next: Option<u64>,
}

impl StartsReader {
    pub(super) fn open(dir: &Path, file: &SideFile) -> Result<Self, PrepareError> {
        let mut starts = Self { file: SideReader::open(dir, file)?, next: None };
        starts.next = starts.read()?;
        match starts.next {
            None | Some(0) => Ok(starts),
            Some(_) => Err(starts.file.damaged("the first document does not start at 0")),
        }
    }

    /// Returns whether a document starts at this position. Positions must be passed in order.
    pub(super) fn next_is(&mut self, position: u64) -> Result<bool, PrepareError> {
        if self.next != Some(position) {
            return Ok(false);
        }
        self.next = self.read()?;
        match self.next {
            Some(next) if next <= position => Err(self.file.damaged("its positions are not ascending")),
            _ => Ok(true),
        }
    }

    fn read(&mut self) -> Result<Option<u64>, PrepareError> {
        let mut bytes = [0; 8];
        for byte in &mut bytes {
            match self.file.next()? {
                Some(next) => *byte = next,
                None => return Ok(None),
            }
        }
        Ok(Some(u64::from_le_bytes(bytes)))
    }

    pub(super) fn finish(self) -> Result<(), PrepareError> {
        if self.next.is_some() {
            return Err(self.file.damaged("a document starts after the last id"));
        }
        self.file.finish()
    }
}
