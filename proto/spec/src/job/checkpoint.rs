//! The section `[checkpoint]`.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// Saving checkpoints and resuming from them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointSection {
    /// Steps between checkpoints. The last step is always saved; 0 saves only the last step.
    pub every: u64,
    /// Seconds between checkpoints, in addition to `every`. 0 turns this off.
    pub every_seconds: f64,
    /// Write checkpoints while training continues: a step waits only until the state is copied to host memory. A
    /// checkpoint that is due while another one is being written is skipped. false waits until each is written.
    #[serde(rename = "async")]
    pub asynchronous: bool,
    /// Keep the two newest snapshots of every rank in memory, so that a restart resumes without reading a checkpoint.
    /// They take 24 bytes of host memory per parameter in total; without them, checkpoints take 12.
    pub memory: MemorySnapshots,
    /// Action if a checkpoint cannot be saved. If the final checkpoint cannot be saved, the job always fails.
    pub on_error: OnSaveError,
    /// Number of newest checkpoints to keep; older ones of this run are deleted. In `dir`, so are those of the runs
    /// that it continues; without `dir`, they stay in the directories of their runs. 0 keeps all. A checkpoint whose
    /// directory is renamed to `step-<N>.keep` is neither counted nor deleted.
    pub keep: usize,
    /// Keep checkpoints whose step is a multiple of this number, in addition to the newest. 0 turns this off.
    pub keep_every: u64,
    /// Number of checkpoints with the lowest validation loss to keep in addition to the newest. Only checkpoints of
    /// steps that were evaluated have a validation loss.
    pub keep_best: usize,
    /// Directory of checkpoints. Default: `checkpoints` in the run's directory.
    pub dir: Option<String>,
    /// "off", "auto" (the newest complete checkpoint in `dir` or, without `dir`, of the job's earlier runs; a fresh
    /// start if there is none), or the path of a checkpoint, of a directory of checkpoints or of a run's directory.
    pub resume: String,
    /// Resume even if the data, the seed, the order of the data, the treatment of documents, the optimizer or, other
    /// than by the number of ranks, the global batch has changed; `--resume-changed`.
    pub resume_changed: bool,
    /// Start afresh in a `dir` that contains checkpoints, which are renamed to `step-<N>.abandoned`; `--overwrite`.
    pub overwrite: bool,
    /// Initial weights, instead of random ones: a model in Hugging Face's layout (a directory with a config.json), a
    /// checkpoint, a run, or a model.safetensors file of xlaunch. Unless `preset` is set or this is a file, keys of
    /// `[model]` that are not set take their values from the model; `seq` may be smaller.
    pub init: Option<String>,
}

impl CheckpointSection {
    /// Returns the path in `resume`; `None` if it is "off" or "auto".
    pub fn resume_path(&self) -> Option<&Path> {
        (!["off", "auto"].contains(&self.resume.as_str())).then(|| Path::new(&self.resume))
    }

    /// Returns the largest number of checkpoints that a run of `steps` steps has on disk at a time: those that are kept
    /// and the next one, as old ones are deleted only after it is complete. `None` if the number is not limited.
    pub fn most_at_a_time(&self, steps: u64) -> Option<u64> {
        let saved = match (self.every, self.every_seconds > 0.0) {
            (0, false) => Some(1),
            (every, false) => Some(steps.div_ceil(every)),
            (_, true) => None,
        };
        let is_limited = self.keep > 0 && self.keep_every == 0;
        let kept = is_limited.then(|| (self.keep as u64).saturating_add(self.keep_best as u64 + 1));
        saved.into_iter().chain(kept).min()
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self {
            every: 0,
            every_seconds: 0.0,
            asynchronous: true,
            memory: MemorySnapshots::Auto,
            on_error: OnSaveError::Continue,
            keep: 2,
            keep_every: 0,
            keep_best: 0,
            dir: None,
            resume: "off".into(),
            resume_changed: false,
            overwrite: false,
            init: None,
        }
    }
}

/// Policy for snapshots in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum MemorySnapshots {
    /// Keep snapshots if the job may restart, saves checkpoints at intervals, and its snapshots fit into a quarter of
    /// the memory that training leaves free.
    Auto,
    /// Always keep snapshots. The job fails if there is not enough memory.
    On,
    /// Never keep snapshots: restarts read the newest checkpoint.
    Off,
}

/// Action if a checkpoint cannot be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnSaveError {
    /// Report the failure and continue training; the next checkpoint is tried as usual.
    Continue,
    /// End the attempt. The job is restarted if `launch.max_restarts` allows it, otherwise it ends with exit code 65.
    Stop,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_holds_the_kept_checkpoints_and_the_next() {
        let most = |every, every_seconds, keep, keep_best| {
            let section =
                CheckpointSection { every, every_seconds, keep, keep_best, ..CheckpointSection::default() };
            section.most_at_a_time(100)
        };
        assert_eq!(most(0, 0.0, 2, 0), Some(1));
        assert_eq!(most(10, 0.0, 2, 0), Some(3));
        assert_eq!(most(10, 0.0, 2, 1), Some(4));
        assert_eq!(most(60, 0.0, 2, 0), Some(2));
        assert_eq!(most(10, 0.0, 0, 0), Some(10));
        assert_eq!(most(0, 60.0, 2, 0), Some(3));
        assert_eq!(most(0, 60.0, 0, 0), None);
    }
}
