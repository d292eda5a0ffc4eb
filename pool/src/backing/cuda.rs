//! Memory of a CUDA device, and pinned memory of the host, by the driver API.
//!
//! The driver's calls go through cudarc's raw bindings, which load the driver's library at run time. Calls are made in
//! the context's process alone: after a fork the child gets an error instead.

use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle,
    CUmemLocation, CUmemLocationType,
};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};

use super::{DriverFailure, Purpose, Result, SegmentDriver, Streams, VirtualDriver};
use crate::core::{MAX_STREAMS, StreamId};

/// Segments of plain allocations and of pinned memory.
const SEGMENT_GRANULARITY: u64 = 2 << 20;

/// The streams of one pool; each with an event that is recorded again and again: a wait takes the state at its own time.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    lanes: [OnceLock<Lane>; MAX_STREAMS],
}

/// A stream and its event.
type Lane = (Arc<CudaStream>, CudaEvent);

impl Lanes {
    /// The next stream. The allocator has counted it before.
    pub(crate) fn add(&self, stream: Arc<CudaStream>) -> Result<()> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let event = stream.context().new_event(Some(flags)).map_err(failed("cuEventCreate"))?;
        let lane = (stream, event);
        let left = self.lanes.iter().try_fold(lane, |lane, place| match place.set(lane) {
            Ok(()) => Err(()),
            Err(lane) => Ok(lane),
        });
        assert!(left.is_err(), "the allocator counts streams");
        Ok(())
    }

    /// A stream by its number.
    pub(crate) fn get(&self, stream: StreamId) -> Option<&Lane> {
        self.lanes.get(stream.index())?.get()
    }

    /// A stream that the allocator knows.
    fn known(&self, stream: StreamId) -> &Lane {
        match self.get(stream) {
            Some(lane) => lane,
            None => unreachable!("the allocator counts the streams that were added here"),
        }
    }
}

/// One context's device.
#[derive(Clone, Debug)]
pub(crate) struct Cuda {
    context: Arc<CudaContext>,
    lanes: Arc<Lanes>,
    granularity: u64,
    /// Whether network cards may read virtual memory.
    rdma: bool,
    process: u32,
}

impl Cuda {
    pub(crate) fn new(context: Arc<CudaContext>, lanes: Arc<Lanes>) -> Result<Self> {
        let rdma = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        let rdma = context.attribute(rdma).is_ok_and(|supported| supported == 1);
        let process = std::process::id();
        let mut cuda = Self { context, lanes, granularity: SEGMENT_GRANULARITY, rdma, process };
        if cuda.has_virtual_memory() {
            cuda.granularity = cuda.minimum()?;
        }
        Ok(cuda)
    }

    /// Whether physical memory and addresses can be had apart.
    pub(crate) fn has_virtual_memory(&self) -> bool {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        self.context.attribute(attribute).is_ok_and(|supported| supported == 1)
    }

    /// Makes the context current on this thread.
    fn enter(&self) -> Result<()> {
        if std::process::id() != self.process {
            let reason = "CUDA cannot be used after a fork: start the child with exec".to_owned();
            return Err(DriverFailure { call: "cuCtxSetCurrent", reason });
        }
        self.context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))
    }

    fn location(&self) -> CUmemLocation {
        let id = i32::try_from(self.context.ordinal()).unwrap_or(i32::MAX);
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
    }

    fn properties(&self, purpose: Purpose) -> CUmemAllocationProp {
        // SAFETY: a struct of integers, C enums with a value zero and pointers: zeros are valid, and the documented default.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = self.location();
        if purpose == Purpose::Registered {
            let handle = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            properties.requestedHandleTypes = handle;
            properties.allocFlags.gpuDirectRDMACapable = u8::from(self.rdma);
        }
        properties
    }

    /// What sizes of general and of registered memory are multiples of.
    fn minimum(&self) -> Result<u64> {
        self.enter()?;
        let flag = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut largest = SEGMENT_GRANULARITY;
        for purpose in [Purpose::General, Purpose::Registered] {
            let (mut granularity, properties) = (0, self.properties(purpose));
            // SAFETY: the context is current; the call reads the properties and writes one size.
            let result = unsafe {
                sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, flag)
            };
            result.result().map_err(failed("cuMemGetAllocationGranularity"))?;
            largest = largest.max(granularity as u64);
        }
        Ok(largest)
    }
}

impl Streams for Cuda {
    fn synchronize(&mut self) -> Result<()> {
        self.enter()?;
        self.context.synchronize().map_err(failed("cuCtxSynchronize"))
    }

    fn order(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        self.enter()?;
        let ((from, event), (to, _)) = (self.lanes.known(from), self.lanes.known(to));
        event.record(from).map_err(failed("cuEventRecord"))?;
        to.wait(event).map_err(failed("cuStreamWaitEvent"))
    }

    fn memory(&self) -> Option<(u64, u64)> {
        self.enter().ok()?;
        result::mem_get_info().ok().map(|(free, total)| (free as u64, total as u64))
    }
}

impl VirtualDriver for Cuda {
    type Memory = CUmemGenericAllocationHandle;

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: the context is current; the call writes one address.
        let result = unsafe { sys::cuMemAddressReserve(&raw mut address, bytes as usize, 0, 0, 0) };
        result.result().map_err(failed("cuMemAddressReserve")).map(|()| address)
    }

    /// The range stays reserved to the end of the process: giving it back is a driver call, which a drop must not make.
    fn unreserve(&mut self, _: u64, _: u64) {}

    fn create(&mut self, bytes: u64, purpose: Purpose) -> Result<Self::Memory> {
        self.enter()?;
        let (mut memory, properties) = (0, self.properties(purpose));
        // SAFETY: the context is current; the call reads the properties and writes one handle.
        let result = unsafe { sys::cuMemCreate(&raw mut memory, bytes as usize, &raw const properties, 0) };
        result.result().map_err(failed("cuMemCreate")).map(|()| memory)
    }

    fn map(&mut self, address: u64, bytes: u64, memory: Self::Memory) -> Result<()> {
        // SAFETY: the range lies in the reserved one and nothing is mapped there; the handle is of this size.
        let result = unsafe { sys::cuMemMap(address, bytes as usize, 0, memory, 0) };
        result.result().map_err(failed("cuMemMap"))
    }

    fn set_access(&mut self, address: u64, bytes: u64) -> Result<()> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: the range was mapped just now; the call reads one description.
        let result = unsafe { sys::cuMemSetAccess(address, bytes as usize, &raw const access, 1) };
        result.result().map_err(failed("cuMemSetAccess"))
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: exactly this range was mapped by one call, no buffer lies in it, and the device was waited for.
        unsafe { sys::cuMemUnmap(address, bytes as usize) }.result().map_err(failed("cuMemUnmap"))
    }

    fn release(&mut self, memory: Self::Memory, _: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: the handle came from `create`, is mapped nowhere, and is not used again.
        unsafe { sys::cuMemRelease(memory) }.result().map_err(failed("cuMemRelease"))
    }
}

impl SegmentDriver for Cuda {
    fn granularity(&self) -> u64 {
        SEGMENT_GRANULARITY
    }

    fn allocate(&mut self, bytes: u64) -> Result<u64> {
        self.enter()?;
        // SAFETY: the context is current and the size is above zero.
        unsafe { result::malloc_sync(bytes as usize) }.map_err(failed("cuMemAlloc"))
    }

    fn free(&mut self, address: u64, _: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: the address came from `allocate` and no buffer lies there; the call waits for the device itself.
        unsafe { result::free_sync(address) }.map_err(failed("cuMemFree"))
    }
}

/// Page-locked memory of the host, which the device copies from and to at full speed.
#[derive(Debug)]
pub(crate) struct Pinned(pub(crate) Cuda);

impl Streams for Pinned {
    fn synchronize(&mut self) -> Result<()> {
        self.0.synchronize()
    }

    /// Stream zero is the host, which waits itself.
    fn order(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        if to != StreamId::default() {
            return self.0.order(from, to);
        }
        self.0.enter()?;
        let (from, event) = self.0.lanes.known(from);
        event.record(from).map_err(failed("cuEventRecord"))?;
        event.synchronize().map_err(failed("cuEventSynchronize"))
    }

    fn memory(&self) -> Option<(u64, u64)> {
        None
    }
}

impl SegmentDriver for Pinned {
    fn granularity(&self) -> u64 {
        SEGMENT_GRANULARITY
    }

    fn allocate(&mut self, bytes: u64) -> Result<u64> {
        self.0.enter()?;
        // SAFETY: the context is current and the size is above zero.
        let address = unsafe { result::malloc_host(bytes as usize, 0) }.map_err(failed("cuMemHostAlloc"))?;
        // SAFETY: the driver gave this many bytes; from here on they are initialised.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes as usize) };
        Ok(address as u64)
    }

    fn free(&mut self, address: u64, _: u64) -> Result<()> {
        self.0.enter()?;
        // SAFETY: the address came from `allocate`, no buffer lies there, and the device was waited for.
        unsafe { result::free_host(address as *mut _) }.map_err(failed("cuMemFreeHost"))
    }
}

fn failed(call: &'static str) -> impl Fn(DriverError) -> DriverFailure {
    move |error| {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let reason = format!("{} ({:?})", text.unwrap_or_else(|_| "unknown error".into()), error.0);
        DriverFailure { call, reason }
    }
}
