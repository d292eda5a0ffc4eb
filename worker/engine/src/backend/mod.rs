//! A device that operations run on: the CPU, one NVIDIA GPU, or none in a dry run.

mod dry;

use std::sync::Arc;

use cudarc::driver::CudaStream;
use xlaunch_pool::{DType, Options, Pool};

use crate::cpu::{Access, Threads};
use crate::cuda::{Gpu, graph};
use crate::error::{EngineError, Result};
use crate::handles::{Capture, PendingRead};
use crate::host_buffer::HostAllocator;
use crate::ops::{Cuda, KERNEL_FILES, Marks, MuonPiece, MuonPieces, Op, Work};
use crate::options::{CudaOptions, DeviceInfo};
use crate::profile::KernelSpan;
use crate::tensor::{Slice, Tensor};
use dry::DryRun;

/// An open device and its memory. Operations [run](Self::run) on it in order, on one stream.
///
/// On a GPU they only enqueue work, and only [`read_f32`](Self::read_f32) and [`PendingRead::wait`] wait for it. On the
/// CPU they have ended when they return. In a dry run they only allocate the memory that a GPU would need.
#[derive(Debug)]
pub struct Backend {
    device: Device,
    pool: Pool,
    activations: DType,
    info: DeviceInfo,
}

#[derive(Debug)]
enum Device {
    Cpu(Threads),
    Cuda(Box<Cuda>),
    Dry(DryRun),
}

impl Backend {
    /// Opens the CPU with `threads` threads, including the calling one if possible.
    ///
    /// Results are the same in every run and for every number of threads: work is split into blocks by size alone, and
    /// the sums of the blocks are added in order.
    pub fn cpu(threads: usize, pool: impl Into<Options>) -> Self {
        let threads = Threads::new(threads);
        let count = threads.count();
        let name = format!("CPU ({count} thread{})", if count == 1 { "" } else { "s" });
        let info = DeviceInfo { name, uuid: "cpu".into() };
        Self { device: Device::Cpu(threads), pool: Pool::host(pool), activations: DType::F32, info }
    }

    /// Opens GPU `ordinal` of this process. Its kernels are loaded on first use.
    ///
    /// # Errors
    /// If a library or the device is missing, or there is not enough memory.
    pub fn cuda(ordinal: usize, options: CudaOptions) -> Result<Self> {
        let gpu = Gpu::open(ordinal, options, &KERNEL_FILES)?;
        let (pool, activations, info) = (gpu.pool.clone(), gpu.activations, gpu.device.info.clone());
        Ok(Self { device: Device::Cuda(Box::new(Cuda::new(gpu))), pool, activations, info })
    }

    /// Opens a device without memory: operations do nothing, and the pool hands out addresses with no memory behind
    /// them. A job allocates the same buffers on it as on the real device, which is a GPU if `gpu`.
    ///
    /// # Errors
    /// If the device's own memory exceeds the limit of the pool.
    pub fn dry_run(gpu: bool, activations: DType, options: Options) -> Result<Self> {
        let pool = dry::pool(gpu, options);
        let device = Device::Dry(DryRun::new(gpu, &pool)?);
        let info = DeviceInfo { name: "dry run".into(), uuid: String::new() };
        Ok(Self { device, pool, activations, info })
    }

    /// Runs an operation.
    ///
    /// # Errors
    /// If a GPU refuses the work, or there is not enough memory for its scratch space.
    pub fn run(&self, op: impl Op) -> Result<()> {
        match &self.device {
            Device::Cpu(threads) => {
                op.cpu(threads);
                Ok(())
            }
            Device::Cuda(gpu) => op.cuda(gpu),
            Device::Dry(dry) => dry.run(&self.pool, op),
        }
    }

    /// Returns the name of the device, and its UUID.
    pub fn device(&self) -> &DeviceInfo {
        &self.info
    }

    /// Returns the element type of activations and of the parameters that forward and backward read.
    pub fn activation_dtype(&self) -> DType {
        self.activations
    }

    /// Returns the pool that tensors are allocated from.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the GPU; `None` if this is another device.
    pub(crate) fn gpu(&self) -> Option<&Cuda> {
        match &self.device {
            Device::Cuda(gpu) => Some(gpu),
            Device::Cpu(_) | Device::Dry(_) => None,
        }
    }

    /// Returns the GPU's compute stream. Collectives synchronise with it by events.
    pub fn stream(&self) -> Option<Arc<CudaStream>> {
        self.gpu().map(|gpu| gpu.device.stream.clone())
    }

    /// Returns whether operations only enqueue work, so that the host may run ahead of the device.
    pub fn is_asynchronous(&self) -> bool {
        self.gpu().is_some()
    }

    /// Returns whether the device multiplies FP8 operands.
    pub fn supports_fp8(&self) -> bool {
        self.gpu().is_none_or(|gpu| gpu.device.capability >= (8, 9))
    }

    /// Returns whether the device multiplies rows of experts in FP8.
    pub fn supports_fp8_experts(&self) -> bool {
        self.gpu().is_none_or(|gpu| gpu.hopper.supports(&[], &[], &[]))
    }

    /// Starts to time every kernel of a GPU.
    pub fn begin_profile(&self) {
        if let Some(gpu) = self.gpu() {
            gpu.device.profiler.begin();
        }
    }

    /// Ends the timing. Returns all launches in order.
    pub fn end_profile(&self) -> Result<Vec<KernelSpan>> {
        self.gpu().map_or(Ok(Vec::new()), |gpu| gpu.device.profiler.end())
    }

    /// Starts to capture: work enqueued to the compute stream, and to streams that are ordered after it by events, is
    /// recorded instead of run. On other devices than a GPU, returns false and does nothing.
    pub fn begin_capture(&self) -> Result<bool> {
        let Some(gpu) = self.gpu() else { return Ok(false) };
        gpu.gemm.wait_for_warm_up();
        graph::begin(&gpu.device).map(|()| true)
    }

    /// Ends the capture. Call it even after a failure: the stream would otherwise keep recording.
    pub fn end_capture(&self) -> Result<Capture> {
        let none = || EngineError::Cuda {
            what: "failed to end a capture".into(),
            reason: "none was started".into(),
        };
        let captured = graph::end(&self.gpu().ok_or_else(none)?.device)?;
        Ok(Capture::new(move || graph::launch(&captured)))
    }

    /// Starts to prepare a GPU for this work, which would otherwise wait at the first use of each operation. Call it
    /// once; it returns at once.
    pub fn prepare(&self, work: Work) {
        if let Some(gpu) = self.gpu() {
            gpu.prepare(work);
        }
    }

    /// Starts to count marks. Returns `None` on devices without marks, which ignore them.
    pub fn open_marks(&self) -> Result<Option<Marks>> {
        self.gpu().map(|gpu| gpu.marks.open(gpu)).transpose()
    }

    /// Returns an allocator of host memory for large [`read_f32`](Self::read_f32)s.
    pub fn host_allocator(&self) -> HostAllocator {
        self.gpu()
            .map_or_else(HostAllocator::default, |gpu| HostAllocator::pinned(gpu.device.context.clone()))
    }

    /// Allocates a tensor with unspecified contents.
    #[track_caller]
    pub fn alloc(&self, dtype: DType, len: usize) -> Result<Tensor> {
        Tensor::new(&self.pool, dtype, len)
    }

    /// Copies pieces of matrices to the device, where they stay.
    pub fn muon_pieces(&self, pieces: &[MuonPiece]) -> Result<MuonPieces> {
        let bytes = MuonPieces::bytes(pieces);
        let entries = Tensor::new(&self.pool.persistent(), DType::U8, bytes.len())?;
        self.write_u8(entries.all(), &bytes)?;
        Ok(MuonPieces::new(entries, pieces))
    }

    /// Sets every element to zero.
    pub fn zero(&self, x: Slice<'_>) -> Result<()> {
        match &self.device {
            Device::Cpu(_) => Access::new("zero").write_bytes(x).fill(0),
            Device::Cuda(gpu) => gpu.zero(x)?,
            Device::Dry(_) => {}
        }
        Ok(())
    }

    /// Copies host values into F32 memory. `values` may change as soon as this returns.
    pub fn write_f32(&self, x: Slice<'_>, values: &[f32]) -> Result<()> {
        self.write("write_f32", x, DType::F32, values.len(), bytemuck::cast_slice(values))
    }

    /// Copies host values into I32 memory. `values` may change as soon as this returns.
    pub fn write_i32(&self, x: Slice<'_>, values: &[i32]) -> Result<()> {
        self.write("write_i32", x, DType::I32, values.len(), bytemuck::cast_slice(values))
    }

    /// Copies host bytes into U8 memory. `values` may change as soon as this returns.
    pub fn write_u8(&self, x: Slice<'_>, values: &[u8]) -> Result<()> {
        self.write("write_u8", x, DType::U8, values.len(), values)
    }

    fn write(&self, name: &'static str, x: Slice<'_>, dtype: DType, len: usize, bytes: &[u8]) -> Result<()> {
        assert!(x.dtype() == dtype && x.len() == len, "{name}: {x:?} should hold {len} {}", dtype.name());
        match &self.device {
            Device::Cpu(_) => Access::new(name).write_bytes(x).copy_from_slice(bytes),
            // SAFETY: the slice holds `len` elements of that type, and `bytes` has the same size.
            Device::Cuda(gpu) => unsafe { gpu.staging.write(x.address(), bytes) }?,
            Device::Dry(_) => {}
        }
        Ok(())
    }

    /// Waits for all work enqueued so far, then copies F32 or Bf16 memory to the host as f32.
    pub fn read_f32(&self, x: Slice<'_>, values: &mut [f32]) -> Result<()> {
        match &self.device {
            Device::Cpu(_) => values.copy_from_slice(Access::new("read_f32").read(x, values.len())),
            Device::Cuda(gpu) => gpu.read_f32(x, values)?,
            Device::Dry(_) => values.fill(0.0),
        }
        Ok(())
    }

    /// Starts to copy F32 memory to the host, after all work enqueued so far, without waiting.
    pub fn begin_read(&self, x: Slice<'_>) -> Result<PendingRead> {
        if let Some(gpu) = self.gpu() {
            return gpu.begin_read(x);
        }
        let mut read = vec![0.0; x.len()];
        self.read_f32(x, &mut read)?;
        Ok(PendingRead::new(move |values| {
            values.copy_from_slice(&read);
            Ok(())
        }))
    }
}
