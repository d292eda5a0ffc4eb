//! A device without memory, on which a job makes the same requests to the pool as on the real one.

use xlaunch_pool::backing::{Backing, Purpose, Result as MapResult};
use xlaunch_pool::{DType, Options, Pool, Space, StreamId};

use crate::cuda::GEMM_WORKSPACE;
use crate::error::Result;
use crate::ops::Op;
use crate::tensor::Tensor;

#[derive(Debug)]
pub(super) struct DryRun {
    /// A GPU's workspace for GEMMs, which lives as long as the device. Held only to occupy its size in the pool; `None`
    /// on the CPU.
    workspace: Option<Tensor>,
}

impl DryRun {
    pub(super) fn new(gpu: bool, pool: &Pool) -> Result<Self> {
        let workspace = gpu.then(|| Tensor::new(&pool.persistent(), DType::U8, GEMM_WORKSPACE));
        Ok(Self { workspace: workspace.transpose()? })
    }

    /// Allocates the scratch memory of a GPU's kernels for the duration of the operation.
    pub(super) fn run(&self, pool: &Pool, op: impl Op) -> Result<()> {
        match op.scratch() {
            bytes if bytes > 0 && self.workspace.is_some() => Tensor::new(pool, DType::U8, bytes).map(drop),
            _ => Ok(()),
        }
    }
}

/// Creates a pool without memory.
pub(super) fn pool(gpu: bool, options: Options) -> Pool {
    Pool::with_backing(if gpu { Space::Cuda } else { Space::Host }, Box::new(Nowhere), options)
}

/// Backing that maps nothing. Sizes are in the units of the CUDA and host pools.
#[derive(Debug)]
struct Nowhere;

impl Backing for Nowhere {
    fn capacity(&self) -> u64 {
        1 << 46
    }

    fn granularity(&self) -> u64 {
        2 << 20
    }

    fn is_contiguous(&self) -> bool {
        true
    }

    fn address(&self, offset: u64) -> u64 {
        (1 << 46) + offset
    }

    fn map(&mut self, _: u64, _: &[u64], _: Purpose) -> MapResult<()> {
        Ok(())
    }

    fn unmap(&mut self, _: u64, _: u64) -> MapResult<()> {
        Ok(())
    }

    fn stranded(&self) -> u64 {
        0
    }

    fn reclaim(&mut self) -> MapResult<()> {
        Ok(())
    }

    fn synchronize(&mut self) -> MapResult<()> {
        Ok(())
    }

    fn insert_wait(&mut self, _: StreamId, _: StreamId) -> MapResult<()> {
        Ok(())
    }

    fn memory_info(&self) -> Option<(u64, u64)> {
        None
    }
}
