//! One NVIDIA GPU.
//!
//! - `device`: libraries, context, stream;
//! - `attention`: which attention kernels, in which tiles;
//! - `cudnn`: attention by cuDNN, where it is installed;
//! - `compile`, `kernels`: `../kernels/*.cu` to machine code, loaded and launched by name;
//! - `gemm`: matrix products by cuBLASLt;
//! - `graph`: launches recorded once;
//! - `fallback`: which of several ways an operation went, for a log;
//! - `profile`: where the device's time goes;
//! - `staging`: host to device through pinned memory;
//! - `norm`, `embed`, `gelu`, `sums`: the operations of these families;
//! - `ops`: all operations, the checks and launches of the others;
//! - this file: the back end and the checks.
//!
//! Everything is enqueued to one stream, in the order of the calls, so memory that a dropped tensor returns to the pool
//! may be handed out again at once: whoever gets it writes behind its last reader. [`read_f32`](crate::Backend::read_f32) alone waits.
//! Each operation checks lengths and element types before it enqueues anything: kernels trust them.

mod attention;
mod compile;
mod cudnn;
mod device;
mod embed;
mod fallback;
mod gelu;
mod gemm;
mod graph;
mod kernels;
mod norm;
mod ops;
mod profile;
mod staging;
mod sums;
#[cfg(test)]
mod tests;

use std::cell::OnceCell;
use std::rc::Rc;

use xlaunch_pool::{DType, Options, Pool, StreamId};

use crate::backend::{Precision, Result};
use crate::tensor::Slice;
use cudnn::Cudnn;
use device::Device;
pub use device::{compute_stream, default_mempool_high};
use fallback::FallbackLog;
use gemm::Gemm;
pub use graph::Graph;
use kernels::{Arg, Kernels, Launch};
use staging::Staging;

/// Threads of a block, unless a kernel asks for a shape of its own.
const THREADS: u32 = 256;

/// How to open a GPU.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Arithmetic of matrix products, and with it the activations' type.
    pub precision: Precision,
    /// Whether every operation gives the same bits each time, on any host: cuDNN's attention does not, and which algorithm
    /// computes a product the fastest, another host may find otherwise.
    pub deterministic: bool,
    /// Where memory comes from.
    pub pool: Options,
    /// Whether to say on stderr, once per operation and shape, which of several ways it went and why.
    pub log_fallback: bool,
}

impl CudaOptions {
    /// The fastest way in everything, without a log.
    pub fn new(precision: Precision, pool: impl Into<Options>) -> Self {
        Self { precision, deterministic: false, pool: pool.into(), log_fallback: false }
    }
}

/// One GPU.
#[derive(Debug)]
pub struct CudaBackend {
    device: Device,
    activations: DType,
    kernels: Kernels,
    gemm: Gemm,
    deterministic: bool,
    /// Opened when attention first asks for it; or why it goes without.
    cudnn: OnceCell<std::result::Result<Cudnn, String>>,
    gelu: gelu::Choices,
    fallback: Rc<FallbackLog>,
    staging: Rc<Staging>,
    pool: Pool,
}

impl CudaBackend {
    /// Opens GPU `ordinal` of this process and compiles or loads its kernels.
    ///
    /// # Errors
    /// A missing library, a missing device, kernels that do not compile, no memory.
    pub fn open(ordinal: usize, options: CudaOptions) -> Result<Self> {
        let CudaOptions { precision, deterministic, pool, log_fallback } = options;
        let device = Device::open(ordinal)?;
        let pool = Pool::cuda(&device.stream, pool)?;
        let fallback = Rc::new(FallbackLog::new(log_fallback));
        Ok(Self {
            deterministic,
            cudnn: OnceCell::new(),
            kernels: Kernels::load(&device, precision)?,
            gemm: Gemm::new(&device, precision, !deterministic, &fallback, &pool)?,
            gelu: gelu::Choices::default(),
            fallback,
            staging: Rc::new(Staging::new(&device)?),
            device,
            activations: precision.activations(),
            pool,
        })
    }

    /// Enough blocks to fill the device, no more than there is work.
    fn spread(&self, len: usize) -> Launch {
        let most = self.device.multiprocessors as usize * 8;
        Launch::blocks(len.div_ceil(THREADS as usize).min(most), THREADS)
    }

    /// # Safety
    /// As [`Kernels::launch`].
    unsafe fn launch(&self, name: &'static str, launch: Launch, args: &[Arg]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch(name, launch, args) }
    }

    /// Checks an operand of the activations' type.
    fn act(&self, x: Slice<'_>, len: usize) {
        expect(x, self.activations, len);
    }

    /// Checks an optional operand of the activations' type.
    fn maybe_act(&self, x: Option<Slice<'_>>, len: usize) {
        if let Some(x) = x {
            self.act(x, len);
        }
    }

    /// All work given so far is done: the pools' memory is free for any stream and for the host.
    fn host_waited(&self) {
        self.pool.record_synchronize(StreamId::default());
        self.staging.host_waited();
    }

    fn write(&self, x: Slice<'_>, dtype: DType, len: usize, bytes: &[u8]) -> Result<()> {
        expect(x, dtype, len);
        // SAFETY: the slice holds `len` elements of that type, which are these bytes.
        unsafe { self.staging.write(x.address(), bytes) }
    }
}

/// Panics unless `x` has this type and length: see the contract of [`Backend`](crate::Backend).
fn expect(x: Slice<'_>, dtype: DType, len: usize) {
    assert!(x.dtype() == dtype && x.len() == len, "expected {len} {}, got {x:?}", dtype.name());
}

/// Panics unless `x` can hold a parameter's gradient.
fn expect_grad(x: Slice<'_>, len: usize) {
    assert!(
        matches!(x.dtype(), DType::F32 | DType::Bf16) && x.len() == len && !x.is_lent(),
        "expected a gradient of {len} elements that no collective works on, got {x:?}"
    );
}

fn is_bf16(x: Slice<'_>) -> bool {
    x.dtype() == DType::Bf16
}

/// Threads of a block that take a row eight by eight: whole warps, no more than [`THREADS`].
fn eights(cols: usize) -> u32 {
    (cols.div_ceil(8).next_multiple_of(32) as u32).min(THREADS)
}
