//! A collective whose sums cost nothing, because they are not formed, nor the results of shared work exchanged.
//!
//! What a step of a training bench becomes shorter by is the communication that backward does not hide. Replicas drift
//! apart, so nothing but a bench may use it.

use xlaunch_comm::{AbortHandle, Collective, Result};
use xlaunch_engine::DType;
use xlaunch_pool::Lease as Loan;

/// `inner` without its sums.
#[derive(Debug)]
pub(crate) struct SkipAllReduce(pub(crate) Box<dyn Collective>);

impl Collective for SkipAllReduce {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world(&self) -> usize {
        self.0.world()
    }

    fn register(&mut self, memory: Loan) -> Result<bool> {
        self.0.register(memory)
    }

    fn all_reduce(&mut self, _: Loan, _: DType) -> Result<()> {
        self.0.check()
    }

    fn reduce_scatter(&mut self, _: Loan, _: Loan, _: DType) -> Result<()> {
        self.0.check()
    }

    fn all_gather(&mut self, _: Loan, _: Loan) -> Result<()> {
        self.0.check()
    }

    fn finish_gather(&mut self) -> Result<()> {
        self.0.check()
    }

    fn broadcast(&mut self, elements: Loan, root: usize) -> Result<()> {
        self.0.broadcast(elements, root)
    }

    fn finish(&mut self) -> Result<()> {
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
