//! The pool: size classes of freed blocks over a driver, with the counts that tell what it does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;
use cudarc::driver::CudaContext;

use crate::buf::{Block, PoolBuf};
use crate::driver::Driver;

/// Every block starts and ends on a multiple of this many bytes.
pub(crate) const GRANULE: usize = 512;

/// Where a pool's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Addressable by this process.
    Host,
    /// Addressable by kernels of one CUDA context.
    Cuda,
}

/// Whether freed blocks are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Freed blocks are kept and handed out again.
    On,
    /// Every buffer is a driver allocation, and is given back to the driver at the next request.
    Off,
}

/// A request that could not be served. The pool stays usable.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The size does not fit the address space.
    #[error("a buffer of {requested} bytes is larger than any address space")]
    TooLarge {
        /// Bytes asked for.
        requested: usize,
    },
    /// The driver refused.
    #[error("failed to allocate {requested} bytes from the driver: {reason}")]
    Driver {
        /// Bytes asked for, rounded up.
        requested: usize,
        /// In the driver's words.
        reason: String,
    },
}

/// What a pool has done and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes in live buffers, rounded up.
    pub live: usize,
    /// Largest `live` so far.
    pub peak_live: usize,
    /// Bytes held from the driver.
    pub mapped: usize,
    /// Largest `mapped` so far.
    pub peak_mapped: usize,
    /// Buffers handed out.
    pub allocations: u64,
    /// Driver allocations made.
    pub driver_allocations: u64,
    /// Blocks given back to the driver.
    pub driver_releases: u64,
}

/// Hands out [`PoolBuf`]s. Clones share one pool.
#[derive(Clone, Debug)]
pub struct Pool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    driver: Driver,
    mode: Mode,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Freed blocks by size in bytes, the last freed on top: it is the likeliest to be in a cache.
    free: HashMap<usize, Vec<u64>>,
    stats: Stats,
}

impl Pool {
    /// A pool of host memory.
    pub fn host(mode: Mode) -> Self {
        Self::new(Driver::Host, mode)
    }

    /// A pool of the memory of this context's device.
    pub fn cuda(context: Arc<CudaContext>, mode: Mode) -> Self {
        Self::new(Driver::Cuda(context), mode)
    }

    fn new(driver: Driver, mode: Mode) -> Self {
        Self { inner: Arc::new(Inner { driver, mode, state: Mutex::default() }) }
    }

    /// Where the memory lies.
    pub fn space(&self) -> Space {
        self.inner.driver.space()
    }

    /// Counts so far.
    pub fn stats(&self) -> Stats {
        self.inner.lock().stats
    }

    /// A buffer of `len` elements with unspecified contents. An empty buffer is valid.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PoolBuf<T>, PoolError> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.max(1).checked_next_multiple_of(GRANULE))
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or(PoolError::TooLarge { requested: usize::MAX })?;
        let address = self.inner.take(bytes)?;
        Ok(PoolBuf::new(Block { pool: self.inner.clone(), address, bytes }, len))
    }

    /// Gives all freed blocks back to the driver; returns the bytes given back.
    pub fn trim(&self) -> Result<usize, PoolError> {
        let mut state = self.inner.lock();
        self.inner.release_free(&mut state)
    }
}

impl Inner {
    pub(crate) fn space(&self) -> Space {
        self.driver.space()
    }

    /// The state. A panic while it was locked cannot have broken it: every change is a few plain assignments.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, bytes: usize) -> Result<u64, PoolError> {
        let mut state = self.lock();
        if self.mode == Mode::Off {
            self.release_free(&mut state)?;
        }
        let address = match state.free.get_mut(&bytes).and_then(Vec::pop) {
            Some(address) => address,
            None => self.grow(&mut state, bytes)?,
        };
        let stats = &mut state.stats;
        stats.allocations += 1;
        stats.live += bytes;
        stats.peak_live = stats.peak_live.max(stats.live);
        Ok(address)
    }

    /// A new block from the driver; when it has none left, once more after giving freed blocks back.
    fn grow(&self, state: &mut State, bytes: usize) -> Result<u64, PoolError> {
        let address = match self.driver.allocate(bytes) {
            Ok(address) => address,
            Err(error) if self.release_free(state)? == 0 => return Err(error),
            Err(_) => self.driver.allocate(bytes)?,
        };
        let stats = &mut state.stats;
        stats.driver_allocations += 1;
        stats.mapped += bytes;
        stats.peak_mapped = stats.peak_mapped.max(stats.mapped);
        Ok(address)
    }

    fn release_free(&self, state: &mut State) -> Result<usize, PoolError> {
        let mut released = 0;
        for (bytes, blocks) in &mut state.free {
            while let Some(address) = blocks.pop() {
                state.stats.mapped -= bytes;
                state.stats.driver_releases += 1;
                released += bytes;
                // SAFETY: a block on the free list came from this driver with this size, and has no owner.
                unsafe { self.driver.release(address, *bytes)? };
            }
        }
        Ok(released)
    }

    /// Takes a block back from a dropped buffer. No driver call: see the crate's rules.
    pub(crate) fn put_back(&self, address: u64, bytes: usize) {
        let mut state = self.lock();
        state.stats.live -= bytes;
        state.free.entry(bytes).or_default().push(address);
    }
}

impl Drop for Inner {
    /// Host memory goes back to the host. Device memory is left to the end of its context: `Drop` never calls CUDA.
    fn drop(&mut self) {
        if self.driver.space() == Space::Host {
            let mut state = std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
            // Blocks exist only while a buffer holds this `Inner`: all are on the free list now. Nothing can fail.
            let _ = self.release_free(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_block_serves_the_next_request_of_its_class() {
        let pool = Pool::host(Mode::On);
        let first = pool.alloc::<f32>(100).unwrap();
        let address = first.address();
        drop(first);
        let second = pool.alloc::<f32>(128).unwrap();
        assert_eq!((second.address(), second.len()), (address, 128));
        assert_eq!(pool.stats().driver_allocations, 1);
    }

    #[test]
    fn books_balance_and_trim_returns_everything_unused() {
        let pool = Pool::host(Mode::On);
        let kept = pool.alloc::<u8>(1).unwrap();
        drop(pool.alloc::<u8>(5000).unwrap());
        let stats = pool.stats();
        assert_eq!((stats.live, stats.mapped, stats.peak_live), (512, 512 + 5120, 512 + 5120));
        assert_eq!(pool.trim().unwrap(), 5120);
        assert_eq!((pool.stats().live, pool.stats().mapped), (512, 512));
        drop(kept);
        assert_eq!(pool.stats().live, 0);
    }

    #[test]
    fn off_asks_the_driver_every_time() {
        let pool = Pool::host(Mode::Off);
        for _ in 0..3 {
            drop(pool.alloc::<f32>(64).unwrap());
        }
        let stats = pool.stats();
        assert_eq!((stats.driver_allocations, stats.driver_releases), (3, 2));
    }

    #[test]
    fn an_impossible_size_is_refused_and_the_pool_lives_on() {
        let pool = Pool::host(Mode::On);
        assert!(matches!(pool.alloc::<f32>(usize::MAX / 2), Err(PoolError::TooLarge { .. })));
        assert!(pool.alloc::<f32>(1 << 60).is_err());
        assert_eq!(pool.alloc::<f32>(0).unwrap().len(), 0);
        assert_eq!(pool.stats().live, 0);
    }
}
