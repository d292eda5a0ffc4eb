//! A collective that records the operations that its rank starts and the time that it waits, for heartbeats and as
//! evidence of hangs.

use xlaunch_comm::{AbortHandle, Collective, Result};
use xlaunch_engine::DType;
use xlaunch_pool::Lease;

use crate::phase;

/// Wraps the collective that does all the work.
#[derive(Debug)]
pub(crate) struct TrackedCollective(pub(crate) Box<dyn Collective>);

impl TrackedCollective {
    fn start(&mut self, start: impl FnOnce(&mut dyn Collective) -> Result<()>) -> Result<()> {
        phase::begin_collective();
        let started = start(&mut *self.0);
        phase::collective_started();
        started
    }
}

impl Collective for TrackedCollective {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn register(&mut self, memory: Lease) -> Result<bool> {
        self.0.register(memory)
    }

    fn all_reduce(&mut self, buckets: Vec<Lease>, dtype: DType) -> Result<()> {
        self.start(|inner| inner.all_reduce(buckets, dtype))
    }

    fn reduce_scatter(&mut self, buckets: Vec<[Lease; 2]>, dtype: DType) -> Result<()> {
        self.start(|inner| inner.reduce_scatter(buckets, dtype))
    }

    fn all_gather(&mut self, buckets: Vec<[Lease; 2]>) -> Result<()> {
        self.start(|inner| inner.all_gather(buckets))
    }

    fn wait_scatter(&mut self) -> Result<()> {
        phase::wait_for_collectives(|| self.0.wait_scatter())
    }

    fn wait_gather(&mut self) -> Result<()> {
        phase::wait_for_collectives(|| self.0.wait_gather())
    }

    fn broadcast(&mut self, elements: Lease, root: usize) -> Result<()> {
        self.start(|inner| inner.broadcast(elements, root))
    }

    fn wait_all(&mut self) -> Result<()> {
        phase::wait_for_collectives(|| self.0.wait_all())
    }

    fn check(&self) -> Result<()> {
        self.0.check()
    }

    fn abort_handle(&self) -> AbortHandle {
        self.0.abort_handle()
    }

    fn finalize(self: Box<Self>) -> Result<()> {
        phase::wait_for_collectives(|| self.0.finalize())
    }
}
