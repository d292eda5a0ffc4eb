//! Where the allocator's memory comes from.
//!
//! The allocator decides in offsets of one long address range; a [`Backing`] puts memory behind parts of it.
//!
//! ```text
//! Core --offsets--> Backing = Virtual   (one reserved range, memory mapped into it)   over a VirtualDriver: CUDA, Host, Sim
//!                           | Segments  (every growth is an allocation of its own)    over a SegmentDriver: CUDA, pinned, Sim
//! ```
//! Drivers are thin: one call each. What must hold when a call fails is written once, here.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod host;
mod segments;
pub mod sim;
mod virtual_memory;

pub use segments::Segments;
pub use virtual_memory::Virtual;

use crate::core::StreamId;

/// A driver call that failed, in the driver's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {reason}")]
pub struct DriverFailure {
    /// The call, such as `cuMemCreate`.
    pub call: &'static str,
    /// Why.
    pub reason: String,
}

/// Result of a driver call.
pub type Result<T> = std::result::Result<T, DriverFailure>;

/// What mapped memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Kernels and copies of this process.
    General,
    /// Also registration with a communication library: one physical allocation, open to network cards.
    Registered,
}

/// Memory behind a range of addresses. Offsets and sizes are in bytes and multiples of [`granularity`](Self::granularity).
pub trait Backing: Send {
    /// Length of the address range.
    fn capacity(&self) -> u64;

    /// What offsets and sizes of mappings are multiples of; itself a multiple of [`GRANULE`](crate::core::GRANULE).
    fn granularity(&self) -> u64;

    /// Whether neighbouring offsets are neighbouring addresses wherever memory is mapped.
    fn contiguous(&self) -> bool;

    /// The address of a mapped offset.
    fn address(&self, offset: u64) -> u64;

    /// Puts memory behind `pieces` of these lengths, one after the other from `offset` on; all or, on failure, none.
    fn map(&mut self, offset: u64, pieces: &[u64], purpose: Purpose) -> Result<()>;

    /// Takes the memory of one piece away. On failure it is still there.
    fn unmap(&mut self, offset: u64, bytes: u64) -> Result<()>;

    /// Bytes that a failed call left held without a use.
    fn stranded(&self) -> u64;

    /// Gives stranded bytes back; as much as goes without a failure.
    fn reclaim(&mut self) -> Result<()>;

    /// Waits until all work that may use the memory is done.
    fn synchronize(&mut self) -> Result<()>;

    /// Makes all further work of `to` wait for all work of `from` so far.
    fn order(&mut self, from: StreamId, to: StreamId) -> Result<()>;

    /// Free and total bytes of the device, where it tells.
    fn memory(&self) -> Option<(u64, u64)>;
}

/// Order between the streams of a device.
pub trait Streams: Send {
    /// As [`Backing::synchronize`].
    fn synchronize(&mut self) -> Result<()>;

    /// As [`Backing::order`].
    fn order(&mut self, from: StreamId, to: StreamId) -> Result<()>;

    /// As [`Backing::memory`].
    fn memory(&self) -> Option<(u64, u64)>;
}

/// A device with virtual memory: physical memory and addresses are separate.
pub trait VirtualDriver: Streams {
    /// Names physical memory.
    type Memory: Copy + Send;

    /// What sizes are multiples of.
    fn granularity(&self) -> u64;

    /// A range of addresses without memory.
    fn reserve(&mut self, bytes: u64) -> Result<u64>;

    /// Gives a range back. Called once, when nothing is mapped in it.
    fn unreserve(&mut self, address: u64, bytes: u64);

    /// Physical memory.
    fn create(&mut self, bytes: u64, purpose: Purpose) -> Result<Self::Memory>;

    /// Puts memory behind addresses.
    fn map(&mut self, address: u64, bytes: u64, memory: Self::Memory) -> Result<()>;

    /// Lets the device read and write there.
    fn set_access(&mut self, address: u64, bytes: u64) -> Result<()>;

    /// Takes the memory from the addresses again.
    fn unmap(&mut self, address: u64, bytes: u64) -> Result<()>;

    /// Gives physical memory back.
    fn release(&mut self, memory: Self::Memory, bytes: u64) -> Result<()>;
}

/// A device that allocates memory with addresses of its choice.
pub trait SegmentDriver: Streams {
    /// What sizes are multiples of.
    fn granularity(&self) -> u64;

    /// Memory, aligned to [`GRANULE`](crate::core::GRANULE).
    fn allocate(&mut self, bytes: u64) -> Result<u64>;

    /// Gives it back.
    fn free(&mut self, address: u64, bytes: u64) -> Result<()>;
}
