//! Test support: a simulated device, an oracle for the allocator, and pools over the simulated device.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test file uses a part of this; a failed call fails the test"
)]

pub(crate) mod oracle;
pub(crate) mod sim;

use xlaunch_pool::backing::VirtualMemory;
use xlaunch_pool::{Options, Pool, PoolBuf, Space};

use sim::Sim;

pub(crate) const MIB: usize = 1 << 20;

/// Buffer sizes of a step in bytes.
pub(crate) const SIZES: [usize; 6] = [3 * MIB, 100, 5 * MIB, 700_000, 40_000, 9 * MIB];

/// Creates a pool of a simulated device, whose addresses must not be accessed.
pub(crate) fn sim_pool(total: usize, options: impl Into<Options>) -> (Pool, Sim) {
    let sim = Sim::new(total as u64);
    let backing = VirtualMemory::new(sim.clone(), 8 * total as u64).unwrap();
    (Pool::with_backing(Space::Cuda, Box::new(backing), options), sim)
}

/// Allocates like a training step, with scratch buffers among buffers that live until the backward pass. Returns the
/// addresses in order.
pub(crate) fn step(pool: &Pool, sizes: &[usize]) -> Vec<u64> {
    let mut addresses = Vec::new();
    let mut kept: Vec<PoolBuf<u8>> = Vec::new();
    for size in sizes {
        let scratch = pool.alloc::<u8>(size / 2 + 1).unwrap();
        kept.push(pool.alloc::<u8>(*size).unwrap());
        addresses.push(scratch.address());
        addresses.push(kept.last().unwrap().address());
    }
    while let Some(buf) = kept.pop() {
        addresses.push(pool.alloc::<u8>(buf.len()).unwrap().address());
    }
    addresses
}
