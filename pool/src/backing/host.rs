//! The driver for host memory: one reserved address range, or separate allocations if no such range can be reserved.

use std::alloc::Layout;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::{DriverFailure, GRANULE, Purpose, Result, SegmentDriver, Streams, VirtualDriver};
use crate::stream::StreamId;

/// Memory of this process. It is zeroed when it is mapped, so host buffers always hold initialised bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host;

const GRANULARITY: u64 = 2 << 20;

impl Streams for Host {
    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    /// Work on host memory is complete when the call that submits it returns.
    fn insert_wait(&mut self, _: StreamId, _: StreamId) -> Result<()> {
        Ok(())
    }

    fn memory_info(&self) -> Option<(u64, u64)> {
        None
    }
}

impl VirtualDriver for Host {
    type Memory = ();

    fn granularity(&self) -> u64 {
        GRANULARITY
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64> {
        let (flags, length) = (MapFlags::PRIVATE | MapFlags::NORESERVE, length("mmap", bytes)?);
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of this process.
        let address = unsafe { mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::empty(), flags) };
        Ok(address.map_err(failed("mmap"))? as u64)
    }

    fn unreserve(&mut self, address: u64, bytes: u64) {
        // SAFETY: `reserve` returned the range, and nothing is mapped in it.
        let _ = unsafe { munmap(address as *mut _, bytes as usize) };
    }

    /// Host memory is allocated by `map`.
    fn create(&mut self, _: u64, _: Purpose) -> Result<()> {
        Ok(())
    }

    fn map(&mut self, address: u64, bytes: u64, (): ()) -> Result<()> {
        remap(address, bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::empty())
    }

    fn set_access(&mut self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> Result<()> {
        remap(address, bytes, ProtFlags::empty(), MapFlags::NORESERVE)
    }

    fn release(&mut self, (): (), _: u64) -> Result<()> {
        Ok(())
    }
}

/// Replaces the mapping of a range: the range stays reserved, but its memory is new.
fn remap(address: u64, bytes: u64, access: ProtFlags, flags: MapFlags) -> Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | flags;
    // SAFETY: the range is part of one that `reserve` returned, and no live buffer is in it.
    let result = unsafe { mmap_anonymous(address as *mut _, length("mmap", bytes)?, access, flags) };
    result.map(drop).map_err(failed("mmap"))
}

impl SegmentDriver for Host {
    fn granularity(&self) -> u64 {
        GRANULE
    }

    fn allocate(&mut self, bytes: u64) -> Result<u64> {
        let layout = layout(bytes)?;
        // SAFETY: the size is not zero: the allocator requests positive multiples of the granule.
        let address = unsafe { std::alloc::alloc_zeroed(layout) };
        if address.is_null() {
            let reason = format!("the host cannot allocate {bytes} bytes");
            return Err(DriverFailure { call: "alloc_zeroed", reason });
        }
        Ok(address as u64)
    }

    fn free(&mut self, address: u64, bytes: u64) -> Result<()> {
        let layout = layout(bytes)?;
        // SAFETY: `allocate` returned the address for this size, and no buffer is in it any more.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        Ok(())
    }
}

fn layout(bytes: u64) -> Result<Layout> {
    Layout::from_size_align(length("alloc_zeroed", bytes)?, GRANULE as usize)
        .map_err(|error| DriverFailure { call: "alloc_zeroed", reason: error.to_string() })
}

fn length(call: &'static str, bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| DriverFailure { call, reason: format!("{bytes} bytes exceed the address space") })
}

fn failed(call: &'static str) -> impl Fn(rustix::io::Errno) -> DriverFailure {
    move |error| DriverFailure { call, reason: error.to_string() }
}
