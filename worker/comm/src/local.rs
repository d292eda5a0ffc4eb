//! The collective of a job with one rank: nothing to communicate.

use crate::collective::{AbortHandle, Among, Collective, Exchange, Operation, Result, Wait};

/// A world of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

impl Collective for Local {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn divide(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn start_among(&mut self, _: Among, operation: Operation) -> Result<()> {
        let shards = matches!(operation, Operation::ReduceScatter { .. } | Operation::AllGather { .. });
        assert!(!shards, "a single rank has no shards");
        Ok(())
    }

    /// Does nothing: only dry runs of jobs with several ranks exchange anything.
    fn exchange(&mut self, _: Exchange) -> Result<()> {
        Ok(())
    }

    fn wait(&mut self, _: Wait) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn abort_handle(&self) -> AbortHandle {
        AbortHandle::new(|| {})
    }

    fn finalize(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
