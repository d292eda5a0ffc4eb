//! Where a run comes from: its data, and the checkpoint that it continues.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Number of tokens and a hash of a sample of them, by which changed training data is recognised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Number of tokens.
    pub tokens: u64,
    /// XXH3-128 of the sample, in hexadecimal.
    pub hash: String,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens ({:.8})", self.tokens, self.hash)
    }
}

/// State that the next attempt of a run resumes from, after leftovers of killed workers were removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The checkpoint; `None` if the run starts again from its beginning, or from memory.
    pub checkpoint: Option<PathBuf>,
    /// The newest memory snapshot is at least as new as any checkpoint.
    pub from_memory: bool,
    /// There is also a checkpoint of the memory snapshot's step.
    pub on_disk: bool,
    /// Checkpoints that were rejected, for the user.
    pub notes: Vec<String>,
}
