//! The manifest: sizes and XXH3-128 hashes of a checkpoint's files.

use std::io::Read;
use std::path::Path;

use fs_err::File;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::{CheckpointError, MANIFEST, VERSION};

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub(super) version: u32,
    pub(super) files: Vec<Entry>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) xxh3_128: String,
}

impl Entry {
    /// Hashes a file.
    pub(super) fn of(dir: &Path, name: &str) -> std::io::Result<Self> {
        let mut file = File::open(dir.join(name))?;
        let (mut hash, mut bytes) = (Xxh3::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => {
                    hash.update(&buffer[..count]);
                    bytes += count as u64;
                }
            }
        }
        Ok(Self { name: name.into(), bytes, xxh3_128: format!("{:032x}", hash.digest128()) })
    }
}

/// Checks every file of a checkpoint against its manifest. File names that could leave the directory are refused.
pub(super) fn verify(dir: &Path) -> Result<(), CheckpointError> {
    let incomplete = |reason: String| CheckpointError::Incomplete { path: dir.into(), reason };
    let text = fs_err::read(dir.join(MANIFEST)).map_err(|error| incomplete(error.to_string()))?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|error| incomplete(format!("{MANIFEST}: {error}")))?;
    if manifest.version != VERSION {
        return Err(incomplete(format!(
            "it has format version {}, but this build reads version {VERSION}",
            manifest.version
        )));
    }
    for expected in &manifest.files {
        if expected.name.contains(['/', '\\']) || expected.name.starts_with('.') {
            return Err(incomplete(format!("{MANIFEST} contains the file name {:?}", expected.name)));
        }
        let bytes =
            fs_err::metadata(dir.join(&expected.name)).map_err(|error| incomplete(error.to_string()))?.len();
        if bytes != expected.bytes {
            return Err(incomplete(format!(
                "{} has {bytes} bytes instead of {}",
                expected.name, expected.bytes
            )));
        }
        let found = Entry::of(dir, &expected.name).map_err(|error| incomplete(error.to_string()))?;
        if found != *expected {
            return Err(incomplete(format!("{} does not match its hash", expected.name)));
        }
    }
    Ok(())
}
