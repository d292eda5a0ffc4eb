//! Sources of the allocator's memory.
//!
//! The allocator works in offsets of one long range; a [`Backing`] maps memory at parts of that range. Two back ends
//! implement it on top of thin drivers with one call per method:
//!
//! ```text
//! Core --offsets--> Backing = VirtualMemory (one reserved address range, memory mapped into it) over a VirtualDriver
//!                           | Segments      (every growth is a separate allocation)             over a SegmentDriver
//! ```
//! The handling of failed driver calls is implemented once, in the two back ends. The crate has drivers for CUDA device
//! memory, pinned host memory and pageable host memory; implement [`VirtualDriver`] or [`SegmentDriver`] for other
//! kinds.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod host;
mod segments;
mod virtual_memory;

pub use segments::Segments;
pub use virtual_memory::VirtualMemory;

use crate::stream::StreamId;

/// Every block starts and ends on a multiple of this many bytes.
pub const GRANULE: u64 = 512;

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {reason}")]
pub struct DriverFailure {
    /// The call, such as `cuMemCreate`.
    pub call: &'static str,
    /// The driver's description of the error.
    pub reason: String,
}

/// Result of a driver call.
pub type Result<T> = std::result::Result<T, DriverFailure>;

/// Use of mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Kernels and copies of this process.
    General,
    /// Additionally registration with a communication library: one physical allocation that network cards can access.
    Registered,
}

/// Memory that is mapped at parts of a range of offsets. Offsets and sizes are in bytes; those of mappings are
/// multiples of [`granularity`](Self::granularity).
pub trait Backing: Send {
    /// Returns the length of the range in bytes.
    fn capacity(&self) -> u64;

    /// Returns the unit of mappings in bytes; a multiple of [`GRANULE`].
    fn granularity(&self) -> u64;

    /// Returns whether neighbouring offsets have neighbouring addresses.
    fn is_contiguous(&self) -> bool;

    /// Returns the address of an offset at which memory is mapped.
    fn address(&self, offset: u64) -> u64;

    /// Maps consecutive `pieces` of these sizes, the first one at `offset`. If that fails, none of them is mapped.
    fn map(&mut self, offset: u64, pieces: &[u64], purpose: Purpose) -> Result<()>;

    /// Unmaps one piece and frees its memory. If it fails, the piece is still mapped.
    fn unmap(&mut self, offset: u64, bytes: u64) -> Result<()>;

    /// Returns the number of bytes that failed calls left allocated but unusable.
    fn stranded(&self) -> u64;

    /// Frees stranded bytes; stops at the first failure.
    fn reclaim(&mut self) -> Result<()>;

    /// Waits until all work that may use the memory has completed.
    fn synchronize(&mut self) -> Result<()>;

    /// Makes all later work of `to` wait for all work submitted to `from` so far.
    fn insert_wait(&mut self, from: StreamId, to: StreamId) -> Result<()>;

    /// Returns free and total bytes of the device, if the driver reports them.
    fn memory_info(&self) -> Option<(u64, u64)>;
}

/// The streams and the memory of a device, common to both kinds of driver.
pub trait Streams: Send {
    /// See [`Backing::synchronize`].
    fn synchronize(&mut self) -> Result<()>;

    /// See [`Backing::insert_wait`].
    fn insert_wait(&mut self, from: StreamId, to: StreamId) -> Result<()>;

    /// See [`Backing::memory_info`].
    fn memory_info(&self) -> Option<(u64, u64)>;
}

/// A device with virtual memory management: physical memory and addresses are allocated separately.
pub trait VirtualDriver: Streams {
    /// Handle of a physical allocation.
    type Memory: Copy + Send;

    /// Returns the unit of all sizes in bytes.
    fn granularity(&self) -> u64;

    /// Reserves a range of addresses without memory.
    fn reserve(&mut self, bytes: u64) -> Result<u64>;

    /// Releases a reserved range. Called at most once, when nothing is mapped in the range.
    fn unreserve(&mut self, address: u64, bytes: u64);

    /// Allocates physical memory.
    fn create(&mut self, bytes: u64, purpose: Purpose) -> Result<Self::Memory>;

    /// Maps physical memory at an address of a reserved range.
    fn map(&mut self, address: u64, bytes: u64, memory: Self::Memory) -> Result<()>;

    /// Makes a mapped range readable and writable by the device.
    fn set_access(&mut self, address: u64, bytes: u64) -> Result<()>;

    /// Unmaps the range of one call to [`map`](Self::map).
    fn unmap(&mut self, address: u64, bytes: u64) -> Result<()>;

    /// Frees physical memory that is not mapped.
    fn release(&mut self, memory: Self::Memory, bytes: u64) -> Result<()>;
}

/// A device that chooses the address of each allocation.
pub trait SegmentDriver: Streams {
    /// Returns the unit of all sizes in bytes.
    fn granularity(&self) -> u64;

    /// Allocates memory, aligned to [`GRANULE`], and returns its address.
    fn allocate(&mut self, bytes: u64) -> Result<u64>;

    /// Frees an allocation of this size.
    fn free(&mut self, address: u64, bytes: u64) -> Result<()>;
}
