//! A collective that skips gradient communication, for benchmarks and dry runs only: replicas drift apart.
//!
//! The time that a training step saves with it is the communication time that backward does not hide.

use xlaunch_comm::{AbortHandle, Collective, Result};
use xlaunch_engine::DType;
use xlaunch_pool::Lease;

/// Wraps a collective. All-reduce, reduce-scatter and all-gather do nothing.
#[derive(Debug)]
pub(crate) struct SkipAllReduce(pub(crate) Box<dyn Collective>);

impl Collective for SkipAllReduce {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn register(&mut self, memory: Lease) -> Result<bool> {
        self.0.register(memory)
    }

    fn all_reduce(&mut self, _: Lease, _: DType) -> Result<()> {
        self.0.check()
    }

    fn reduce_scatter(&mut self, _: Lease, _: Lease, _: DType) -> Result<()> {
        self.0.check()
    }

    fn all_gather(&mut self, _: Lease, _: Lease) -> Result<()> {
        self.0.check()
    }

    fn wait_scatter(&mut self) -> Result<()> {
        Ok(())
    }

    fn wait_gather(&mut self) -> Result<()> {
        self.0.check()
    }

    fn broadcast(&mut self, elements: Lease, root: usize) -> Result<()> {
        self.0.broadcast(elements, root)
    }

    fn wait_all(&mut self) -> Result<()> {
        self.0.check()
    }

    fn check(&self) -> Result<()> {
        self.0.check()
    }

    fn abort_handle(&self) -> AbortHandle {
        self.0.abort_handle()
    }

    fn finalize(self: Box<Self>) -> Result<()> {
        self.0.finalize()
    }
}
