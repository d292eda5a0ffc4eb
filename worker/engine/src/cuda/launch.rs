//! The kernels of one device, loaded by file and launched by name.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;

use cudarc::driver::CudaFunction;
use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as MAX_SHARED;
use cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED_LIMIT;
use cudarc::driver::sys::{
    CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUtensorMap,
    cuLaunchKernelEx,
};
use cudarc::nvrtc::Ptx;
use xlaunch_pool::DType;

use super::compile::{self, BLOCK_THREADS, InBackground, Macro, Source};
use super::device::Device;
use crate::error::driver_error;
use crate::error::{EngineError, Result};
use crate::tensor::Slice;

/// Elements of a `Vec8`.
pub(crate) const VEC: usize = 8;

/// Shared memory of a block that is reserved for static allocations, in bytes.
pub(crate) const STATIC_SHARED: usize = 1024;

/// A kernel file whose macros are the same for every job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelFile {
    pub(crate) source: Source,
    /// Names of its kernels.
    pub(crate) kernels: &'static [&'static str],
    pub(crate) macros: &'static [Macro],
    /// Kernels that may dynamically use all of a block's shared memory except [`STATIC_SHARED`] bytes.
    pub(crate) dynamic_shared: &'static [&'static str],
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg {
    /// A pointer or an `i64`.
    Word(u64),
    /// A `float`.
    Float(f32),
    /// A `bool`.
    Flag(bool),
    /// A `TensorMap`.
    TensorMap(CUtensorMap),
}

impl From<Slice<'_>> for Arg {
    fn from(slice: Slice<'_>) -> Self {
        Self::Word(slice.address())
    }
}

/// `None` becomes a null pointer.
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

impl From<CUtensorMap> for Arg {
    fn from(map: CUtensorMap) -> Self {
        Self::TensorMap(map)
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

/// Builds the arguments of a kernel, converting each one to the type that is passed.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::cuda::Arg::from($arg)),*] };
}
pub(crate) use args;

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) grid: (usize, usize, usize),
    pub(crate) block: (u32, u32),
    /// Dynamic shared memory in bytes.
    pub(crate) shared: usize,
}

impl Launch {
    /// Launches `count` blocks.
    pub(crate) fn blocks(count: usize, threads: u32) -> Self {
        Self { grid: (count, 1, 1), block: (threads, 1), shared: 0 }
    }

    /// Launches the smallest number of blocks of `block` threads that has at least `count` threads.
    pub(crate) fn threads(count: usize, block: u32) -> Self {
        Self::blocks(count.div_ceil(block as usize), block)
    }

    /// Launches blocks of [`BLOCK_THREADS`] threads for `len` elements, `each` per thread and iteration: at most
    /// `most`, which share the elements, and at least one. Results do not depend on blocks without elements.
    pub(crate) fn sharing(len: usize, each: usize, most: usize) -> Self {
        Self::blocks(len.div_ceil(BLOCK_THREADS as usize * each).clamp(1, most), BLOCK_THREADS)
    }

    /// Launches `count` two-dimensional blocks.
    pub(crate) fn rows(count: usize, block: (u32, u32)) -> Self {
        Self { grid: (count, 1, 1), block, shared: 0 }
    }
}

/// Maximum number of blocks in each dimension of a grid, on devices of every compute capability. Attention has
/// sequences in the second or third dimension.
const MAX_GRID_X: usize = i32::MAX as usize;
const MAX_GRID_YZ: usize = 65_535;

/// The kernels of one device. A file is loaded when the first of its kernels is launched.
#[derive(Debug)]
pub(crate) struct Kernels {
    device: Device,
    activations: DType,
    files: &'static [&'static KernelFile],
    /// Maximum dynamic shared memory of a block, in bytes.
    max_dynamic_shared: usize,
    /// Kernels of `files` that are loaded.
    functions: RefCell<HashMap<&'static str, CudaFunction>>,
    compiling: OnceCell<InBackground>,
}

impl Kernels {
    pub(crate) fn new(
        device: &Device,
        activations: DType,
        files: &'static [&'static KernelFile],
    ) -> Result<Self> {
        let attribute = device.context.attribute(MAX_SHARED);
        let shared =
            attribute.map_err(|error| driver_error("failed to query the size of shared memory", error))?;
        let max_dynamic_shared = usize::try_from(shared).unwrap_or(0).saturating_sub(STATIC_SHARED);
        let (functions, compiling) = Default::default();
        Ok(Self { device: device.clone(), activations, files, max_dynamic_shared, functions, compiling })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Starts to compile these sources in this order on all cores, if the cache lacks them. A [`load`](Self::load) of
    /// one that is being compiled waits for it.
    pub(crate) fn compile_in_background(&self, sources: impl Iterator<Item = (Source, Vec<Macro>)>) {
        let sources = sources.map(|(source, macros)| (source, self.options(&macros))).collect();
        self.compiling.get_or_init(|| InBackground::new(self.device.arch.clone(), sources));
    }

    /// Loads the kernels of a source, which is compiled or taken from the cache.
    pub(crate) fn load(
        &self,
        source: Source,
        macros: &[Macro],
        names: &[&'static str],
    ) -> Result<HashMap<&'static str, CudaFunction>> {
        let options = self.options(macros);
        let module = compile::cubin(source, &self.device.arch, &options, |bytes| {
            let module = self.device.context.load_module(Ptx::from_binary(bytes));
            module.map_err(|error| driver_error(format!("failed to load {}", source.file), error))
        })?;
        let function = |name: &&'static str| {
            let function = module.load_function(name);
            let function =
                function.map_err(|error| driver_error(format!("failed to find kernel {name}"), error))?;
            Ok((*name, function))
        };
        names.iter().map(function).collect()
    }

    fn options(&self, macros: &[Macro]) -> Vec<String> {
        compile::options(&self.device.arch, self.device.warp, self.activations, macros)
    }

    /// Raises a kernel's limit of dynamic shared memory, which is 48 KiB by default.
    pub(crate) fn allow_dynamic_shared(
        &self,
        name: &str,
        function: &CudaFunction,
        bytes: usize,
    ) -> Result<()> {
        let limit = i32::try_from(bytes).unwrap_or(i32::MAX);
        function.set_attribute(SHARED_LIMIT, limit).map_err(|error| {
            driver_error(format!("failed to get {bytes} bytes of shared memory for {name}"), error)
        })
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The arguments are those that the kernel of this name declares, and every pointer is the address of as many
    /// elements as the kernel accesses, which stay allocated until the stream has passed this point.
    pub(crate) unsafe fn launch(&self, name: &'static str, launch: Launch, args: &[Arg]) -> Result<()> {
        let loaded = self.functions.borrow().get(name).cloned();
        let function = match loaded {
            Some(function) => function,
            None => self.load_file(name)?,
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch_function(name, &function, launch, args) }
    }

    /// Loads all kernels of the file that contains this one.
    fn load_file(&self, name: &str) -> Result<CudaFunction> {
        let file = self.files.iter().find(|file| file.kernels.contains(&name));
        let file = file.ok_or_else(|| EngineError::no_kernel(name))?;
        let loaded = self.load(file.source, file.macros, file.kernels)?;
        for name in file.dynamic_shared {
            let function = loaded.get(name).ok_or_else(|| EngineError::no_kernel(name))?;
            self.allow_dynamic_shared(name, function, self.max_dynamic_shared)?;
        }
        let found = loaded.get(name).cloned().ok_or_else(|| EngineError::no_kernel(name))?;
        self.functions.borrow_mut().extend(loaded);
        Ok(found)
    }

    /// Enqueues a kernel returned by [`load`](Self::load).
    ///
    /// # Safety
    /// Same as for [`launch`](Self::launch).
    pub(crate) unsafe fn launch_function(
        &self,
        name: &'static str,
        function: &CudaFunction,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let enqueue = || unsafe { self.enqueue(name, function, launch, args) };
        self.device.profiler.time(&self.device.stream, || name.to_owned(), enqueue)
    }

    /// Enqueues a kernel returned by [`load`](Self::load), whose time the caller records.
    ///
    /// # Safety
    /// Same as for [`launch`](Self::launch).
    pub(crate) unsafe fn enqueue(
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
        if x > MAX_GRID_X || y.max(z) > MAX_GRID_YZ {
            let limits = format!("CUDA allows {MAX_GRID_X} x {MAX_GRID_YZ} x {MAX_GRID_YZ}");
            return Err(failed(format!("a grid of {x} x {y} x {z} blocks is too large: {limits}")));
        }
        let size = |size: usize| u32::try_from(size).map_err(|_| failed(format!("{size} is too large")));
        let mut pointers: Vec<*mut c_void> = args
            .iter()
            .map(|arg| match arg {
                Arg::Word(word) => std::ptr::from_ref(word).cast_mut().cast(),
                Arg::Float(number) => std::ptr::from_ref(number).cast_mut().cast(),
                Arg::Flag(flag) => std::ptr::from_ref(flag).cast_mut().cast(),
                Arg::TensorMap(map) => std::ptr::from_ref(map).cast_mut().cast(),
            })
            .collect();
        let mut pdl = pdl_attribute();
        let config = CUlaunchConfig {
            gridDimX: size(x)?,
            gridDimY: size(y)?,
            gridDimZ: size(z)?,
            blockDimX: launch.block.0,
            blockDimY: launch.block.1,
            blockDimZ: 1,
            sharedMemBytes: size(launch.shared)?,
            hStream: self.device.stream.cu_stream(),
            attrs: &raw mut pdl,
            // Programmatic dependent launch exists from compute capability 9.0 on.
            numAttrs: u32::from(self.device.capability >= (9, 0)),
        };
        let (function, no_extra) = (function.cu_function(), std::ptr::null_mut());
        // SAFETY: the function belongs to a loaded module of this context; config and `pointers` refer to values that
        // live until the call has copied them; the rest is the caller's promise. An early start under PDL is not
        // observable: every kernel's first statement waits for its predecessor.
        unsafe { cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), no_extra) }
            .result()
            .map_err(|error| driver_error(format!("failed to launch {name}"), error))
    }
}

/// Enables programmatic dependent launch: the kernel may start before its predecessor has ended; see
/// `pdl_wait_and_launch` in ptx.cuh.
fn pdl_attribute() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}
