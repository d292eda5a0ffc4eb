//! Building blocks of operations on an NVIDIA GPU.
//!
//! - `device`: libraries, context, stream;
//! - `compile`, `launch`: compile `.cu` files to machine code, and load and launch kernels by name;
//! - `on_demand`: kernels that are compiled on first use;
//! - `gemm`: matrix multiplication by cuBLASLt;
//! - `hopper`: our own GEMMs and attention on compute capability 9.0;
//! - `cudnn`: cuDNN's graph API;
//! - `graph`: capture into CUDA graphs;
//! - `profile`: times of kernels;
//! - `staging`: copies between host and device through pinned memory;
//! - `variants`: selects the variant of an operation; `variant_log`: prints the selection;
//! - this file: an open GPU, and checks of operands.
//!
//! All work is enqueued to one stream in the order of the calls, so memory that a dropped tensor returns to the pool
//! can be reused at once: its next user writes after its last reader. Operations check lengths and element types before
//! they enqueue anything, because kernels rely on them.

pub(crate) mod compile;
pub(crate) mod cudnn;
pub(crate) mod device;
pub(crate) mod gemm;
pub(crate) mod graph;
pub(crate) mod hopper;
pub(crate) mod launch;
pub(crate) mod on_demand;
pub(crate) mod profile;
pub(crate) mod staging;
pub(crate) mod variant_log;
pub(crate) mod variants;

use std::rc::Rc;

use bytemuck::Pod;
use cudarc::driver::result;
use half::bf16;
use xlaunch_pool::{DType, Pool, StreamId};

use crate::error::Result;
pub(crate) use crate::error::driver_error;
use crate::handles::PendingRead;
use crate::options::{CudaOptions, Precision};
use crate::tensor::{Slice, Tensor};
pub(crate) use compile::{BLOCK_THREADS, COLUMN_BLOCK, Macro, Source, source};
use device::Device;
pub use device::{compute_stream, default_mempool_high, initialise_driver, load_libraries};
use gemm::Gemm;
pub(crate) use gemm::WORKSPACE as GEMM_WORKSPACE;
use hopper::Hopper;
pub(crate) use launch::{Arg, KernelFile, Kernels, Launch, STATIC_SHARED, VEC, args};
use staging::Staging;
use variant_log::VariantLog;

/// An open GPU: its libraries, kernels and memory.
#[derive(Debug)]
pub struct Gpu {
    pub(crate) staging: Rc<Staging>,
    pub(crate) device: Device,
    pub(crate) precision: Precision,
    /// Element type of activations.
    pub(crate) activations: DType,
    pub(crate) deterministic: bool,
    pub(crate) kernels: Rc<Kernels>,
    pub(crate) gemm: Gemm,
    pub(crate) hopper: Hopper,
    pub(crate) variants: Rc<VariantLog>,
    pub(crate) pool: Pool,
}

impl Gpu {
    /// Opens GPU `ordinal` of this process with these kernels.
    pub(crate) fn open(
        ordinal: usize,
        options: CudaOptions,
        files: &'static [&'static KernelFile],
    ) -> Result<Self> {
        let CudaOptions { precision, deterministic, pool, log_fallback, warnings, .. } = options;
        let device = Device::open(ordinal)?;
        let pool = Pool::cuda(&device.stream, pool)?;
        let variants = Rc::new(VariantLog::new(log_fallback, warnings));
        let activations = precision.activations();
        let kernels = Rc::new(Kernels::new(&device, activations, files)?);
        Ok(Self {
            staging: Rc::new(Staging::new(&device)?),
            precision,
            activations,
            deterministic,
            hopper: Hopper::new(&kernels),
            gemm: Gemm::new(&device, precision, !deterministic, &variants, &pool)?,
            kernels,
            variants,
            device,
            pool,
        })
    }

    /// Allocates a tensor with unspecified contents.
    #[track_caller]
    pub(crate) fn alloc(&self, dtype: DType, len: usize) -> Result<Tensor> {
        Tensor::new(&self.pool, dtype, len)
    }

    /// Sets every element to zero.
    pub(crate) fn zero(&self, x: Slice<'_>) -> Result<()> {
        let (bytes, stream) = (x.len() * x.dtype().size(), self.device.stream.cu_stream());
        // SAFETY: the slice holds `bytes` bytes of this device; every type is valid with any bytes.
        unsafe { result::memset_d8_async(x.address(), 0, bytes, stream) }
            .map_err(|error| driver_error("failed to clear memory", error))
    }

    /// Waits for all work enqueued so far, then copies F32 or Bf16 memory to the host as f32.
    pub(crate) fn read_f32(&self, x: Slice<'_>, values: &mut [f32]) -> Result<()> {
        if !is_bf16(x) {
            return self.read(x, DType::F32, values);
        }
        let mut halves = vec![bf16::ZERO; values.len()];
        self.read(x, DType::Bf16, &mut halves)?;
        values.iter_mut().zip(halves).for_each(|(value, half)| *value = half.to_f32());
        Ok(())
    }

    fn read<T: Pod>(&self, x: Slice<'_>, dtype: DType, values: &mut [T]) -> Result<()> {
        expect(x, dtype, values.len());
        let failed = |error| driver_error("failed to read from the device", error);
        let stream = &self.device.stream;
        // SAFETY: the slice holds as many elements; `values` outlives the copy, which is waited for below.
        unsafe { result::memcpy_dtoh_async(values, x.address(), stream.cu_stream()) }.map_err(failed)?;
        stream.synchronize().map_err(failed)?;
        // Memory returned to the pools is free for any stream and for the host.
        self.pool.record_synchronize(StreamId::default());
        self.staging.host_waited();
        Ok(())
    }

    /// Starts to copy F32 memory to the host, after all work enqueued so far, without waiting.
    pub(crate) fn begin_read(&self, x: Slice<'_>) -> Result<PendingRead> {
        expect(x, DType::F32, x.len());
        // SAFETY: the slice holds as many bytes of this device; memory that its tensor returns to the pool is written
        // again by later work of the same stream only.
        let read = unsafe { self.staging.begin_read(x.address(), x.len() * DType::F32.size()) }?;
        let staging = self.staging.clone();
        Ok(PendingRead::new(move |values| {
            staging.end_read(read, |bytes| bytemuck::cast_slice_mut(values).copy_from_slice(bytes))
        }))
    }

    /// Returns a launch for grid-stride loops: enough blocks to fill the device, but not more than there are elements.
    pub(crate) fn grid_for(&self, len: usize) -> Launch {
        let most = self.device.multiprocessors as usize * 8;
        Launch::blocks(len.div_ceil(BLOCK_THREADS as usize).min(most), BLOCK_THREADS)
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// Same as for [`Kernels::launch`].
    pub(crate) unsafe fn launch(&self, name: &'static str, launch: Launch, args: &[Arg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch(name, launch, args) }
    }

    /// Checks an operand of the activations' element type.
    pub(crate) fn expect_act(&self, x: Slice<'_>, len: usize) {
        expect(x, self.activations, len);
    }

    /// Checks an optional operand of the activations' element type.
    pub(crate) fn expect_optional_act(&self, x: Option<Slice<'_>>, len: usize) {
        if let Some(x) = x {
            self.expect_act(x, len);
        }
    }
}

/// Panics unless `x` has this type and length; see the contract of [`Op`](crate::Op).
pub(crate) fn expect(x: Slice<'_>, dtype: DType, len: usize) {
    assert!(x.dtype() == dtype && x.len() == len, "expected {len} {}, got {x:?}", dtype.name());
}

/// Panics unless `x` can hold a parameter's gradient.
pub(crate) fn expect_grad(x: Slice<'_>, len: usize) {
    assert!(
        matches!(x.dtype(), DType::F32 | DType::Bf16) && x.len() == len && !x.is_lent(),
        "expected a gradient of {len} elements that is not lent to a collective, got {x:?}"
    );
}

pub(crate) fn is_bf16(x: Slice<'_>) -> bool {
    x.dtype() == DType::Bf16
}

/// Returns whether rows of `cols` elements of these arrays can be accessed as vectors of eight.
pub(crate) fn vectorizable(cols: usize, arrays: &[Slice<'_>]) -> bool {
    cols.is_multiple_of(VEC) && arrays.iter().all(|x| x.address().is_multiple_of(16))
}

/// Returns the number of threads of a block that processes a row as vectors: whole warps, at most [`BLOCK_THREADS`].
pub(crate) fn vec_threads(gpu: &Gpu, cols: usize) -> u32 {
    (cols.div_ceil(VEC) as u32).next_multiple_of(gpu.device.warp).min(BLOCK_THREADS)
}
