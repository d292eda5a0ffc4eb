//! The origin of a run: its data, and the checkpoint that it continues.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Link in the directory of a job that leads to its newest run.
pub const LATEST: &str = "latest";
/// File in the directory of a training run that describes what it used.
pub const ENVIRONMENT_FILE: &str = "environment.json";
/// Key of that file: when the run started, in seconds since 1970.
pub const STARTED: &str = "started_unix_seconds";

/// Number of tokens and a hash of a sample of them. Used to detect changed training data.
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

/// Lock of a directory of checkpoints, held until this is dropped.
pub trait DirectoryLock: fmt::Debug + Send {
    /// Returns whether the directory still has the file that is locked. It has another one, or none, after it was moved
    /// or removed.
    fn is_in_place(&self) -> bool;
}

/// The state from which the next attempt of a run resumes. Leftovers of killed workers have been removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The checkpoint; `None` if the run starts again from its beginning, or from memory.
    pub checkpoint: Option<PathBuf>,
    /// True if the newest memory snapshot is at least as new as any checkpoint.
    pub from_memory: bool,
    /// True if there is also a checkpoint of the memory snapshot's step.
    pub on_disk: bool,
    /// Messages for the user about rejected checkpoints.
    pub notes: Vec<String>,
}
