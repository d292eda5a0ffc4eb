//! Stores the highest job id that may have been assigned, separately from the journal.
//!
//! Ids name directories, units and accounts, so no id may be assigned twice, even if the journal is lost or an old
//! journal is restored. Ids are reserved in blocks, so that only a few submissions have to write this file.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::files;

const IDS_FILE: &str = "ids";
const IDS_VERSION: u32 = 1;
/// Number of ids reserved in advance.
const BLOCK: u64 = 1000;

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    reserved: u64,
}

/// The reserved ids.
#[derive(Debug)]
pub(crate) struct Ids {
    dir: PathBuf,
    /// Upper bound of the ids assigned so far.
    reserved: u64,
}

impl Ids {
    /// Reads the file in the state directory. A missing or invalid file reserves no ids.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let reserved = match fs_err::read(dir.join(IDS_FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            bytes => serde_json::from_slice::<Content>(&bytes?).map_or(0, |content| content.reserved),
        };
        Ok(Self { dir: dir.into(), reserved })
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Returns whether ids beyond the one after `submitted` may have been assigned, so that `submitted` is not the
    /// highest.
    pub(crate) fn are_beyond(&self, submitted: u64) -> bool {
        submitted.saturating_add(1) < self.reserved.saturating_sub(BLOCK)
    }

    /// Durably reserves the ids up to `highest`.
    pub(crate) fn reserve(&mut self, highest: u64) -> io::Result<()> {
        if highest <= self.reserved {
            return Ok(());
        }
        let reserved = highest.saturating_add(BLOCK);
        let content = Content { version: IDS_VERSION, reserved };
        files::write(&self.dir, IDS_FILE, &serde_json::to_vec(&content)?)?;
        self.reserved = reserved;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ids_are_remembered_and_written_once_per_block() {
        let dir = tempfile::tempdir().unwrap();
        let mut ids = Ids::open(dir.path()).unwrap();
        assert!(ids.reserved() == 0 && !ids.are_beyond(0));
        ids.reserve(1).unwrap();
        let ids_again = Ids::open(dir.path()).unwrap();
        assert!(ids_again.reserved() == 1 + BLOCK && !ids_again.are_beyond(0) && !ids_again.are_beyond(7));
        fs_err::remove_file(dir.path().join(IDS_FILE)).unwrap();
        ids.reserve(1 + BLOCK).unwrap();
        assert!(!dir.path().join(IDS_FILE).exists());
        ids.reserve(2 + BLOCK).unwrap();
        let ids = Ids::open(dir.path()).unwrap();
        assert!(ids.are_beyond(3) && !ids.are_beyond(1 + BLOCK));
        fs_err::write(dir.path().join(IDS_FILE), [0; 30]).unwrap();
        assert_eq!(Ids::open(dir.path()).unwrap().reserved(), 0);
    }
}
