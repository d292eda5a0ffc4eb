//! The collective of a job with one rank: nothing to communicate.

use crate::collective::{AbortHandle, Collective, Operation, Result, Wait};

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

    fn start(&mut self, operation: Operation) -> Result<()> {
        operation.expect_shards(0, 1);
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
