//! Host memory: one range of reserved addresses, or allocations where such a range is not to be had.

use std::alloc::Layout;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::{DriverFailure, Purpose, Result, SegmentDriver, Streams, VirtualDriver};
use crate::core::{GRANULE, StreamId};

/// Memory of this process. Fresh memory reads as zero, so host buffers always hold initialised bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host;

const GRANULARITY: u64 = 2 << 20;

impl Streams for Host {
    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    /// Work on host memory is done when the call that gives it returns.
    fn order(&mut self, _: StreamId, _: StreamId) -> Result<()> {
        Ok(())
    }

    fn memory(&self) -> Option<(u64, u64)> {
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
        // SAFETY: a new mapping at a place of the kernel's choice touches no memory of this process.
        let address = unsafe { mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::empty(), flags) };
        Ok(address.map_err(failed("mmap"))? as u64)
    }

    fn unreserve(&mut self, address: u64, bytes: u64) {
        // SAFETY: the range was reserved by `reserve` and nothing is mapped in it.
        let _ = unsafe { munmap(address as *mut _, bytes as usize) };
    }

    /// Host memory comes with the mapping.
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

/// Puts a fresh mapping in place of the one that is there.
fn remap(address: u64, bytes: u64, access: ProtFlags, flags: MapFlags) -> Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | flags;
    // SAFETY: the allocator gives parts of the range that `reserve` reserved, which no live buffer lies in.
    let result = unsafe { mmap_anonymous(address as *mut _, length("mmap", bytes)?, access, flags) };
    result.map(drop).map_err(failed("mmap"))
}

impl SegmentDriver for Host {
    fn granularity(&self) -> u64 {
        GRANULE
    }

    fn allocate(&mut self, bytes: u64) -> Result<u64> {
        let layout = layout(bytes)?;
        // SAFETY: the layout has a size above zero: the allocator asks for positive multiples of the granule.
        let address = unsafe { std::alloc::alloc_zeroed(layout) };
        if address.is_null() {
            let reason = format!("the host has no {bytes} bytes left");
            return Err(DriverFailure { call: "alloc", reason });
        }
        Ok(address as u64)
    }

    fn free(&mut self, address: u64, bytes: u64) -> Result<()> {
        let layout = layout(bytes)?;
        // SAFETY: the allocator gives back what `allocate` gave, with its size, when no buffer lies in it.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        Ok(())
    }
}

fn layout(bytes: u64) -> Result<Layout> {
    Layout::from_size_align(length("alloc", bytes)?, GRANULE as usize)
        .map_err(|error| DriverFailure { call: "alloc", reason: error.to_string() })
}

fn length(call: &'static str, bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| DriverFailure { call, reason: format!("{bytes} bytes do not fit an address") })
}

fn failed(call: &'static str) -> impl Fn(rustix::io::Errno) -> DriverFailure {
    move |error| DriverFailure { call, reason: error.to_string() }
}
