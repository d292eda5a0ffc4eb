//! Finds out whether the nodes of a job share the directory of its runs. Each agent leaves a mark there, and looks for
//! the mark of the agent whose node has the checkpoints, even if that node is gone.

use std::io;
use std::path::{Path, PathBuf};

use xlaunch_spec::job::JobSpec;

/// Length of the leading part of an instance id that stays the same for the life of the agent's process.
pub(super) const PROCESS_BYTES: usize = 8;

/// Returns the directory to check: the checkpoint directory, or else the one with the runs and their checkpoints.
pub fn directory(spec: &JobSpec) -> PathBuf {
    spec.checkpoint.dir.as_ref().map_or_else(|| spec.runs_dir(), PathBuf::from)
}

/// This agent's mark. Dropping it removes the file unless it is kept.
#[derive(Debug)]
pub struct Mark {
    path: PathBuf,
    is_kept: bool,
}

impl Mark {
    /// Leaves a mark for other agents to find.
    ///
    /// # Errors
    /// Fails if the directory cannot be written.
    pub fn leave(dir: &Path, instance: &[u8]) -> io::Result<Self> {
        fs_err::create_dir_all(dir)?;
        let path = path(dir, instance);
        fs_err::write(&path, "")?;
        Ok(Self { path, is_kept: false })
    }

    /// Leaves the mark in place: the job continues without this node, and others look for its checkpoints.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if !self.is_kept {
            // A leftover empty file does no harm.
            let _ = fs_err::remove_file(&self.path);
        }
    }
}

/// Returns whether the mark of this agent is in the directory.
pub fn is_visible(dir: &Path, instance: &[u8]) -> bool {
    path(dir, instance).exists()
}

fn path(dir: &Path, instance: &[u8]) -> PathBuf {
    let process = instance.iter().take(PROCESS_BYTES).map(|byte| format!("{byte:02x}"));
    dir.join(format!(".node-{}", process.collect::<String>()))
}
