//! The collective of a job with one rank: nothing to communicate.

use xlaunch_pool::{DType, Lease};

use crate::collective::{AbortHandle, Collective, Result};

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

    fn register(&mut self, _: Lease) -> Result<bool> {
        Ok(false)
    }

    fn all_reduce(&mut self, _: Vec<Lease>, _: DType) -> Result<()> {
        Ok(())
    }

    fn reduce_scatter(&mut self, _: Vec<[Lease; 2]>, _: DType) -> Result<()> {
        unreachable!("one rank is never sharded")
    }

    fn all_gather(&mut self, _: Vec<[Lease; 2]>) -> Result<()> {
        unreachable!("one rank is never sharded")
    }

    fn wait_scatter(&mut self) -> Result<()> {
        Ok(())
    }

    fn wait_gather(&mut self) -> Result<()> {
        Ok(())
    }

    fn broadcast(&mut self, _: Lease, _: usize) -> Result<()> {
        Ok(())
    }

    fn wait_all(&mut self) -> Result<()> {
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
