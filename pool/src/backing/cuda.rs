//! Drivers for CUDA device memory and for pinned host memory, based on the CUDA driver API.
//!
//! Calls go through cudarc's raw bindings, which load the driver library at run time. CUDA does not survive a fork, so
//! calls in a process other than the one that created the driver fail before they reach CUDA.

use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle,
    CUmemLocation, CUmemLocationType,
};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};

use super::{DriverFailure, Purpose, Result, SegmentDriver, Streams, VirtualDriver};
use crate::stream::{MAX_STREAMS, StreamId};

/// Granularity of `cuMemAlloc` segments and of pinned memory, in bytes.
const SEGMENT_GRANULARITY: u64 = 2 << 20;

/// The CUDA streams of one pool by [`StreamId`]. Each has one event that is recorded again for every wait: a wait
/// refers to the state of the event at the time of the call, so earlier waits are not affected.
#[derive(Debug, Default)]
pub(crate) struct StreamTable {
    streams: [OnceLock<(Arc<CudaStream>, CudaEvent)>; MAX_STREAMS],
}

impl StreamTable {
    /// Adds the next stream. The caller has checked that there are fewer than [`MAX_STREAMS`].
    pub(crate) fn add(&self, stream: Arc<CudaStream>) -> Result<()> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let event = stream.context().new_event(Some(flags)).map_err(failed("cuEventCreate"))?;
        let not_added =
            self.streams.iter().try_fold((stream, event), |stream, slot| match slot.set(stream) {
                Ok(()) => Err(()),
                Err(stream) => Ok(stream),
            });
        assert!(not_added.is_err(), "the allocator counts streams");
        Ok(())
    }

    pub(crate) fn get(&self, stream: StreamId) -> Option<&Arc<CudaStream>> {
        self.streams.get(stream.index())?.get().map(|(stream, _)| stream)
    }

    /// Returns a stream that the allocator knows, and its event.
    fn with_event(&self, stream: StreamId) -> &(Arc<CudaStream>, CudaEvent) {
        match self.streams[stream.index()].get() {
            Some(stream) => stream,
            None => unreachable!("the allocator counts the streams that are added here"),
        }
    }
}

/// The device of one context.
#[derive(Clone, Debug)]
pub(crate) struct Cuda {
    context: Arc<CudaContext>,
    streams: Arc<StreamTable>,
    granularity: u64,
    /// True if network cards can access memory of the virtual memory API.
    rdma: bool,
    /// The process that created the context.
    process: u32,
}

impl Cuda {
    pub(crate) fn new(context: Arc<CudaContext>, streams: Arc<StreamTable>) -> Result<Self> {
        let rdma = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        let rdma = context.attribute(rdma).is_ok_and(|supported| supported == 1);
        let process = std::process::id();
        let mut cuda = Self { context, streams, granularity: SEGMENT_GRANULARITY, rdma, process };
        if cuda.has_virtual_memory() {
            cuda.granularity = cuda.minimum_granularity()?;
        }
        Ok(cuda)
    }

    /// Returns whether the device supports the virtual memory API.
    pub(crate) fn has_virtual_memory(&self) -> bool {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        self.context.attribute(attribute).is_ok_and(|supported| supported == 1)
    }

    /// Makes the context current on this thread, because drops and calls may come from any thread.
    fn enter(&self) -> Result<()> {
        if std::process::id() != self.process {
            let reason = "CUDA cannot be used in a forked child: start the child with exec".to_owned();
            return Err(DriverFailure { call: "cuCtxSetCurrent", reason });
        }
        self.context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))
    }

    fn location(&self) -> CUmemLocation {
        let id = i32::try_from(self.context.ordinal()).unwrap_or(i32::MAX);
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
    }

    fn properties(&self, purpose: Purpose) -> CUmemAllocationProp {
        // SAFETY: a struct of integers, C enums with a variant of value zero, and pointers: zeros are valid, and are
        // the documented default.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = self.location();
        if purpose == Purpose::Registered {
            // NCCL shares registered memory between processes, so its handles must be exportable.
            let handle = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            properties.requestedHandleTypes = handle;
            properties.allocFlags.gpuDirectRDMACapable = u8::from(self.rdma);
        }
        properties
    }

    /// Returns the granularity that fits both general and registered memory, in bytes.
    fn minimum_granularity(&self) -> Result<u64> {
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

    fn insert_wait(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        self.enter()?;
        let ((from, event), (to, _)) = (self.streams.with_event(from), self.streams.with_event(to));
        event.record(from).map_err(failed("cuEventRecord"))?;
        to.wait(event).map_err(failed("cuStreamWaitEvent"))
    }

    fn memory_info(&self) -> Option<(u64, u64)> {
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

    /// The range stays reserved until the process ends: releasing it is a driver call, which a drop must not make.
    fn unreserve(&mut self, _: u64, _: u64) {}

    fn create(&mut self, bytes: u64, purpose: Purpose) -> Result<Self::Memory> {
        self.enter()?;
        let (mut memory, properties) = (0, self.properties(purpose));
        // SAFETY: the context is current; the call reads the properties and writes one handle.
        let result = unsafe { sys::cuMemCreate(&raw mut memory, bytes as usize, &raw const properties, 0) };
        result.result().map_err(failed("cuMemCreate")).map(|()| memory)
    }

    fn map(&mut self, address: u64, bytes: u64, memory: Self::Memory) -> Result<()> {
        // SAFETY: the range is part of the reserved one, nothing is mapped in it, and the handle has this size.
        let result = unsafe { sys::cuMemMap(address, bytes as usize, 0, memory, 0) };
        result.result().map_err(failed("cuMemMap"))
    }

    fn set_access(&mut self, address: u64, bytes: u64) -> Result<()> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: the range was just mapped; the call reads one descriptor.
        let result = unsafe { sys::cuMemSetAccess(address, bytes as usize, &raw const access, 1) };
        result.result().map_err(failed("cuMemSetAccess"))
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: one call mapped exactly this range, no buffer is in it, and the device was synchronised.
        unsafe { sys::cuMemUnmap(address, bytes as usize) }.result().map_err(failed("cuMemUnmap"))
    }

    fn release(&mut self, memory: Self::Memory, _: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: `create` returned the handle; it is not mapped and not used again.
        unsafe { sys::cuMemRelease(memory) }.result().map_err(failed("cuMemRelease"))
    }
}

impl SegmentDriver for Cuda {
    fn granularity(&self) -> u64 {
        SEGMENT_GRANULARITY
    }

    fn allocate(&mut self, bytes: u64) -> Result<u64> {
        self.enter()?;
        // SAFETY: the context is current and the size is not zero.
        unsafe { result::malloc_sync(bytes as usize) }.map_err(failed("cuMemAlloc"))
    }

    fn free(&mut self, address: u64, _: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: `allocate` returned the address, no buffer is there, and cuMemFree synchronises the device itself.
        unsafe { result::free_sync(address) }.map_err(failed("cuMemFree"))
    }
}

/// Page-locked host memory, which the device copies from and to at full speed.
#[derive(Debug)]
pub(crate) struct Pinned(pub(crate) Cuda);

impl Streams for Pinned {
    fn synchronize(&mut self) -> Result<()> {
        self.0.synchronize()
    }

    /// Stream 0 stands for the host, which waits for the stream itself.
    fn insert_wait(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        if to != StreamId::default() {
            return self.0.insert_wait(from, to);
        }
        self.0.enter()?;
        let (from, event) = self.0.streams.with_event(from);
        event.record(from).map_err(failed("cuEventRecord"))?;
        event.synchronize().map_err(failed("cuEventSynchronize"))
    }

    fn memory_info(&self) -> Option<(u64, u64)> {
        None
    }
}

impl SegmentDriver for Pinned {
    fn granularity(&self) -> u64 {
        SEGMENT_GRANULARITY
    }

    fn allocate(&mut self, bytes: u64) -> Result<u64> {
        self.0.enter()?;
        // SAFETY: the context is current and the size is not zero.
        let address = unsafe { result::malloc_host(bytes as usize, 0) }.map_err(failed("cuMemHostAlloc"))?;
        // SAFETY: the driver allocated this many bytes; zeroing them makes them initialised.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes as usize) };
        Ok(address as u64)
    }

    fn free(&mut self, address: u64, _: u64) -> Result<()> {
        self.0.enter()?;
        // SAFETY: `allocate` returned the address, no buffer is there, and the device was synchronised.
        unsafe { result::free_host(address as *mut _) }.map_err(failed("cuMemFreeHost"))
    }
}

pub(crate) fn failed(call: &'static str) -> impl Fn(DriverError) -> DriverFailure {
    move |error| {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let reason = format!("{} ({:?})", text.unwrap_or_else(|_| "unknown error".into()), error.0);
        DriverFailure { call, reason }
    }
}
