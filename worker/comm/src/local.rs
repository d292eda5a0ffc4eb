//! One rank: every sum is what it was.

use xlaunch_pool::{DType, Lease as Loan};

use crate::collective::{AbortHandle, Collective, Result};

/// The collective of a job with one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

impl Local {
    /// A world of one.
    pub fn new() -> Self {
        Self
    }
}

impl Collective for Local {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn register(&mut self, _: Loan) -> Result<bool> {
        Ok(false)
    }

    fn all_reduce(&mut self, _: Loan, _: DType) -> Result<()> {
        Ok(())
    }

    fn reduce_scatter(&mut self, _: Loan, _: Loan, _: DType) -> Result<()> {
        unreachable!("one rank has nobody to share with")
    }

    fn all_gather(&mut self, _: Loan, _: Loan) -> Result<()> {
        unreachable!("one rank has nobody to share with")
    }

    fn finish_gather(&mut self) -> Result<()> {
        Ok(())
    }

    fn broadcast(&mut self, _: Loan, _: usize) -> Result<()> {
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
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
