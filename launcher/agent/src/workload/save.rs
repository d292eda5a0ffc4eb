//! Decides when a checkpoint can be committed, from the answers of all ranks that write a shard of it. Pure.

use std::collections::BTreeMap;

use xlaunch_proto::v1::{CommitCheckpoint, SavedFile, ShardSaved};

/// The save in flight. There is only one at a time: ranks begin the next save after all of them have answered.
#[derive(Debug)]
pub(super) struct SaveBarrier {
    world: usize,
    step: u64,
    /// Files of each rank's shard, or the reason why it failed.
    answers: BTreeMap<u32, Result<Vec<SavedFile>, String>>,
    failed_rank: Option<u32>,
}

impl SaveBarrier {
    /// Creates a barrier without a save in flight, for `world` ranks.
    pub(super) fn new(world: u32) -> Self {
        Self { world: world as usize, step: 0, answers: BTreeMap::new(), failed_rank: None }
    }

    /// Returns the rank that could not write its shard of the last save.
    pub(super) fn failed_rank(&self) -> Option<u32> {
        self.failed_rank
    }

    /// Records the answer of a rank. The last answer returns the command for rank 0. If several ranks have failed, it
    /// names the lowest of them.
    pub(super) fn record(&mut self, rank: u32, shard: ShardSaved) -> Option<CommitCheckpoint> {
        let ShardSaved { step, files, error } = shard;
        if step != self.step {
            // An earlier save that not all ranks have answered was abandoned with its attempt.
            (self.step, self.answers) = (step, BTreeMap::new());
        }
        self.answers.insert(rank, if error.is_empty() { Ok(files) } else { Err(error) });
        if self.answers.len() < self.world {
            return None;
        }
        self.failed_rank = self.answers.iter().find(|(_, answer)| answer.is_err()).map(|(rank, _)| *rank);
        let answers: Result<Vec<_>, String> = std::mem::take(&mut self.answers).into_values().collect();
        Some(match answers {
            Ok(files) => CommitCheckpoint { step, files: files.concat(), error: String::new() },
            Err(error) => CommitCheckpoint { step, files: Vec::new(), error },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(step: u64, name: &str) -> ShardSaved {
        let file = SavedFile { name: name.into(), chunks: Vec::new() };
        ShardSaved { step, files: vec![file], error: String::new() }
    }

    fn failed(step: u64, error: &str) -> ShardSaved {
        ShardSaved { step, files: Vec::new(), error: error.into() }
    }

    #[test]
    fn commit_follows_the_last_answer_and_has_the_files_of_all_ranks() {
        let mut barrier = SaveBarrier::new(3);
        assert_eq!(barrier.record(2, saved(10, "c")), None);
        assert_eq!(barrier.record(0, saved(10, "a")), None);
        let commit = barrier.record(1, saved(10, "b")).unwrap();
        let names: Vec<_> = commit.files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!((commit.step, names, commit.error.as_str()), (10, vec!["a", "b", "c"], ""));
        assert_eq!(barrier.record(0, saved(20, "a")), None, "the next save starts empty");
    }

    #[test]
    fn failure_waits_for_all_ranks_because_their_files_are_removed_then() {
        let mut barrier = SaveBarrier::new(3);
        assert_eq!(barrier.record(2, failed(10, "rank 2: no space")), None);
        assert_eq!(barrier.record(1, failed(10, "rank 1: no space")), None);
        let commit = barrier.record(0, saved(10, "a")).unwrap();
        assert_eq!((commit.files.len(), commit.error.as_str()), (0, "rank 1: no space"));
        assert_eq!(barrier.failed_rank(), Some(1));
    }

    #[test]
    fn answers_to_an_abandoned_save_do_not_count_for_the_next() {
        let mut barrier = SaveBarrier::new(2);
        assert_eq!(barrier.record(0, saved(10, "a")), None);
        assert_eq!(barrier.record(1, saved(20, "b")), None);
        assert!(barrier.record(0, saved(20, "a")).is_some());
    }
}
