//! A collective that says how many ranks there are, and has no peers.

use xlaunch_comm::{AbortHandle, Collective, Result};
use xlaunch_engine::DType;
use xlaunch_pool::Lease;

/// Rank 0 of this many. No operation does anything.
#[derive(Debug)]
pub(super) struct Alone(pub(super) usize);

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        self.0
    }

    fn register(&mut self, _: Lease) -> Result<bool> {
        Ok(false)
    }

    fn all_reduce(&mut self, _: Lease, _: DType) -> Result<()> {
        Ok(())
    }

    fn reduce_scatter(&mut self, _: Lease, _: Lease, _: DType) -> Result<()> {
        Ok(())
    }

    fn all_gather(&mut self, _: Lease, _: Lease) -> Result<()> {
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
