//! A collective that records the operations that its rank starts and the time that it waits, for heartbeats and as
//! evidence of hangs.

use xlaunch_comm::{AbortHandle, Among, Collective, Exchange, Operation, Result, Wait};
use xlaunch_pool::Lease;

use crate::phase;

/// Wraps the collective that does all the work.
#[derive(Debug)]
pub(crate) struct TrackedCollective(pub(crate) Box<dyn Collective>);

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

    fn divide(&mut self, size: usize) -> Result<()> {
        self.0.divide(size)
    }

    fn start_among(&mut self, among: Among, operation: Operation) -> Result<()> {
        phase::begin_collective();
        let started = self.0.start_among(among, operation);
        phase::collective_started();
        started
    }

    fn exchange(&mut self, exchange: Exchange) -> Result<()> {
        let starts = !matches!(exchange, Exchange::Finish);
        if starts {
            phase::begin_collective();
        }
        let exchanged = phase::wait_for_collectives(|| self.0.exchange(exchange));
        if starts {
            phase::collective_started();
        }
        exchanged
    }

    fn wait(&mut self, wait: Wait) -> Result<()> {
        phase::wait_for_collectives(|| self.0.wait(wait))
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
