//! The kernels of one device: loaded by file, launched by name.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as MOST_SHARED;
use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED_LIMIT;
use cudarc::driver::sys::{
    CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, cuLaunchKernelEx,
};
use cudarc::driver::{CudaFunction, CudaModule, DriverError};
use cudarc::nvrtc::Ptx;
use xlaunch_pool::DType;

use super::attention::Path;
use super::compile;
pub(super) use super::compile::Source;
use super::device::{Device, cuda};
use crate::backend::{EngineError, Precision, Result};
use crate::tensor::Slice;

/// A kernel file, with the headers that it wants before it.
macro_rules! source {
    ($file:literal $(, after $header:literal)*) => {
        $crate::cuda::compile::Source {
            file: $file,
            text: concat!($(source!(text $header),)* source!(text $file)),
        }
    };
    (text $file:literal) => {
        concat!(
            "#line 1 \"",
            $file,
            "\"\n",
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/kernels/", $file))
        )
    };
}
pub(super) use source;

/// Files that are the same for every model.
pub(super) const COMMON: [(Source, &[&str]); 8] = [
    (source!("convert.cu"), &["cast_f32_bf16", "cast_bf16_f32"]),
    (
        source!("embed.cu"),
        &[
            "embed_fwd",
            "embed_count",
            "embed_starts",
            "embed_places",
            "embed_sort",
            "embed_bwd_tokens",
            "embed_bwd_joins",
            "embed_bwd_positions",
        ],
    ),
    (source!("norm.cu"), &["norm_fwd", "norm_bwd", "norm_fwd_any", "norm_bwd_any"]),
    (source!("rope.cu"), &["rope"]),
    (source!("activation.cu"), &["gelu_fwd", "gelu_bwd", "swiglu_fwd", "swiglu_bwd"]),
    (source!("classifier.cu"), &["classifier"]),
    (
        source!("reduce.cu"),
        &["sum_partials", "square_sum_partials", "sum_final", "column_sum_partials", "column_sum_final"],
    ),
    (source!("adamw.cu"), &["adamw"]),
];

/// The macro that gives kernels their element type of activations.
pub(super) fn act_macro(activations: DType) -> String {
    format!("ACT={}", if activations == DType::Bf16 { "bf16" } else { "float" })
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arg {
    /// A pointer or an `i64`.
    Word(u64),
    /// A `float`.
    Float(f32),
    /// A `bool`.
    Flag(bool),
}

impl From<Slice<'_>> for Arg {
    fn from(slice: Slice<'_>) -> Self {
        Self::Word(slice.address())
    }
}

/// A null pointer for none.
impl From<Option<Slice<'_>>> for Arg {
    fn from(slice: Option<Slice<'_>>) -> Self {
        Self::Word(slice.map_or(0, Slice::address))
    }
}

impl From<usize> for Arg {
    fn from(number: usize) -> Self {
        Self::Word(number as u64)
    }
}

impl From<f32> for Arg {
    fn from(number: f32) -> Self {
        Self::Float(number)
    }
}

impl From<bool> for Arg {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// The arguments of a kernel, each turned into what it is passed as.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::cuda::kernels::Arg::from($arg)),*] };
}
pub(super) use args;

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub(super) grid: (usize, usize, usize),
    pub(super) block: (u32, u32),
    /// Bytes of dynamic shared memory.
    pub(super) shared: usize,
}

impl Launch {
    /// A one-dimensional grid.
    pub(super) fn blocks(count: usize, threads: u32) -> Self {
        Self { grid: (count, 1, 1), block: (threads, 1), shared: 0 }
    }

    /// A one-dimensional grid of two-dimensional blocks.
    pub(super) fn rows(count: usize, block: (u32, u32)) -> Self {
        Self { grid: (count, 1, 1), block, shared: 0 }
    }

    /// A two-dimensional grid of blocks of 32 times 8 columns and 8 rows.
    pub(super) fn wide_columns(cols: usize, row_blocks: usize) -> Self {
        Self { grid: (cols.div_ceil(32 * 8), row_blocks, 1), block: (32, 8), shared: 0 }
    }
}

/// What a block may have of shared memory beside the dynamic part.
const STATIC_SHARED: i32 = 1024;

/// All kernels of one device.
#[derive(Debug)]
pub(super) struct Kernels {
    device: Device,
    precision: Precision,
    common: HashMap<&'static str, CudaFunction>,
    attention: RefCell<HashMap<(usize, &'static str), CudaFunction>>,
    /// Bytes of a row that the classifier can keep in shared memory.
    pub(super) classifier_shared: usize,
}

impl Kernels {
    pub(super) fn load(device: &Device, precision: Precision) -> Result<Self> {
        let activations = precision.activations();
        let mut common = HashMap::new();
        for (source, names) in COMMON {
            let module = module(device, source, &[act_macro(activations)])?;
            for name in names {
                common.insert(*name, function(&module, name)?);
            }
        }
        let classifier = common.get("classifier").ok_or_else(|| no_kernel("classifier"))?;
        let classifier_shared = allow_shared(device, classifier)
            .map_err(|error| cuda("failed to get shared memory for the classifier", error))?;
        let attention = RefCell::default();
        Ok(Self { device: device.clone(), precision, common, attention, classifier_shared })
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The arguments are what the kernel of this name declares, and every pointer leads to as many elements as the
    /// kernel touches, which stay allocated until the stream has passed this point.
    pub(super) unsafe fn launch(&self, name: &'static str, launch: Launch, args: &[Arg]) -> Result<()> {
        let function = self.common.get(name).ok_or_else(|| no_kernel(name))?;
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(name, function, launch, args) }
    }

    /// The attention kernels for heads of this width.
    pub(super) fn attention(&self, width: usize) -> Path {
        Path::of(self.precision, self.device.capability, width)
    }

    /// Enqueues an attention kernel for heads of this width, compiled when it is first asked for.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub(super) unsafe fn launch_attention(
        &self,
        name: &'static str,
        width: usize,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        let loaded = self.attention.borrow().get(&(width, name)).cloned();
        let function = match loaded {
            Some(function) => function,
            None => {
                self.load_attention(width)?;
                self.attention.borrow().get(&(width, name)).cloned().ok_or_else(|| no_kernel(name))?
            }
        };
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(name, &function, launch, args) }
    }

    fn load_attention(&self, width: usize) -> Result<()> {
        let path = self.attention(width);
        let (source, defines) = path.source();
        let module = module(&self.device, source, &defines)?;
        let (names, shared) = path.kernels();
        for name in names {
            let function = function(&module, name)?;
            self.attention.borrow_mut().insert((width, name), function);
        }
        for kernel in shared {
            let bytes = i32::try_from(path.shared(kernel)).unwrap_or(i32::MAX);
            let functions = self.attention.borrow();
            let function = functions.get(&(width, kernel.name())).ok_or_else(|| no_kernel(kernel.name()))?;
            function.set_attribute(SHARED_LIMIT, bytes).map_err(|error| {
                cuda(
                    format!("failed to get {bytes} bytes of shared memory for heads of width {width}"),
                    error,
                )
            })?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn enqueue(
        &self,
        name: &'static str,
        function: &CudaFunction,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        let (x, y, z) = launch.grid;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        let failed = |reason: String| EngineError::Cuda { what: format!("failed to launch {name}"), reason };
        let size = |size: usize| u32::try_from(size).map_err(|_| failed(format!("{size} is too large")));
        let mut pointers: Vec<*mut c_void> = args
            .iter()
            .map(|arg| match arg {
                Arg::Word(word) => std::ptr::from_ref(word).cast_mut().cast(),
                Arg::Float(number) => std::ptr::from_ref(number).cast_mut().cast(),
                Arg::Flag(flag) => std::ptr::from_ref(flag).cast_mut().cast(),
            })
            .collect();
        let stream = &self.device.stream;
        let mut early = early_launch();
        let config = CUlaunchConfig {
            gridDimX: size(x)?,
            gridDimY: size(y)?,
            gridDimZ: size(z)?,
            blockDimX: launch.block.0,
            blockDimY: launch.block.1,
            blockDimZ: 1,
            sharedMemBytes: size(launch.shared)?,
            hStream: stream.cu_stream(),
            attrs: &raw mut early,
            numAttrs: u32::from(self.device.capability >= (9, 0)),
        };
        let no_extra = std::ptr::null_mut();
        self.device.profiler.time(
            stream,
            || name.to_owned(),
            || {
                // SAFETY: the function belongs to a loaded module of this context; config and `pointers` lead to values that
                // live until the call has copied them; the rest is the caller's promise. Every kernel waits for the one
                // before it in its first line, so that an early launch is seen by nobody.
                unsafe {
                    cuLaunchKernelEx(
                        &raw const config,
                        function.cu_function(),
                        pointers.as_mut_ptr(),
                        no_extra,
                    )
                }
                .result()
                .map_err(|error| cuda(format!("failed to launch {name}"), error))
            },
        )
    }
}

/// Lets a kernel be launched while the one before it comes to its end: see `after_the_kernel_before` in the prelude.
/// Devices know of it from compute capability 9.0 on.
fn early_launch() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

/// Lets a kernel have all the dynamic shared memory that the device gives a block; returns how many bytes that is.
fn allow_shared(device: &Device, function: &CudaFunction) -> std::result::Result<usize, DriverError> {
    let bytes = (device.context.attribute(MOST_SHARED)? - STATIC_SHARED).max(0);
    function.set_attribute(SHARED_LIMIT, bytes)?;
    Ok(bytes.unsigned_abs() as usize)
}

fn no_kernel(name: &str) -> EngineError {
    EngineError::Cuda { what: format!("failed to find {name}"), reason: "no file has this kernel".into() }
}

fn module(device: &Device, source: Source, defines: &[String]) -> Result<Arc<CudaModule>> {
    compile::cubin(source, &device.arch, defines, |bytes| {
        device
            .context
            .load_module(Ptx::from_binary(bytes))
            .map_err(|error| cuda(format!("failed to load {}", source.file), error))
    })
}

fn function(module: &Arc<CudaModule>, name: &'static str) -> Result<CudaFunction> {
    module.load_function(name).map_err(|error| cuda(format!("failed to find kernel {name}"), error))
}
