//! One GPU of this process: its context and stream, and checks that its libraries are installed.

use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUmemPool_attribute, cuMemPoolGetAttribute};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};

use super::{cudnn, profile::Profiler};
use crate::error::{EngineError, Result, driver_message};
use crate::options::DeviceInfo;

/// Warp size of all NVIDIA GPUs, with which kernels are compiled if no device is open.
pub(crate) const NVIDIA_WARP: u32 = 32;

/// A context on one device, and the stream to which all work is enqueued.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) info: DeviceInfo,
    /// Such as `sm_90a`.
    pub(crate) arch: String,
    /// Compute capability, major and minor.
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: u32,
    /// Threads of a warp.
    pub(crate) warp: u32,
    pub(crate) profiler: Rc<Profiler>,
}

impl Device {
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        find_libraries()?;
        let failed = |error: DriverError| EngineError::Device { ordinal, reason: driver_message(error) };
        let context = CudaContext::new(ordinal).map_err(failed)?;
        // SAFETY: nothing relies on cudarc's event tracking: no CudaSlice is ever created, and all work of this back
        // end goes to one stream, with which collectives synchronise by events of their own.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed)?;
        let (major, minor) = context.compute_capability().map_err(failed)?;
        let attribute = |attribute| context.attribute(attribute).map_err(failed);
        let count = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let warp = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?;
        let uuid = context.uuid().map_err(failed)?;
        let info = DeviceInfo { name: context.name().map_err(failed)?, uuid: uuid_text(uuid.bytes) };
        Ok(Self {
            stream,
            info,
            arch: arch((major, minor)),
            capability: (major, minor),
            multiprocessors: u32::try_from(count).unwrap_or(1).max(1),
            warp: u32::try_from(warp).unwrap_or(NVIDIA_WARP),
            profiler: Rc::default(),
            context,
        })
    }
}

/// Returns the compiler's name of a compute capability; for Hopper, with the instructions that only it has.
fn arch((major, minor): (i32, i32)) -> String {
    let own = if (major, minor) == (9, 0) { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}

/// Loads the libraries without calling them, so that opening a GPU does not have to wait for that. A missing library is
/// reported when a GPU is opened.
pub fn load_libraries() {
    let _ = find_libraries();
    cudnn::library::load_all();
}

/// Initialises the driver, so that opening a GPU does not have to wait for that. Errors are reported when a GPU is
/// opened.
pub fn initialise_driver() {
    if find_libraries().is_ok() {
        let _ = result::init();
    }
}

/// Creates a stream on GPU `ordinal`, for programs that use the pool without the engine's operations.
///
/// # Errors
/// The same as for [`Backend::cuda`](crate::Backend::cuda).
pub fn compute_stream(ordinal: usize) -> Result<Arc<CudaStream>> {
    Device::open(ordinal).map(|device| device.stream)
}

/// Returns the high-water mark, in bytes, of the driver's default memory pool of GPU `ordinal` in this process: memory
/// that was allocated by `cudaMallocAsync` instead of this crate's pool.
///
/// # Errors
/// The same as for [`Backend::cuda`](crate::Backend::cuda).
pub fn default_mempool_high(ordinal: usize) -> Result<u64> {
    let device = Device::open(ordinal)?;
    let failed = |error: DriverError| EngineError::Device { ordinal, reason: driver_message(error) };
    let (attribute, mut high) = (CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0_u64);
    // SAFETY: the device is open; the attribute is a u64, which the call writes.
    unsafe {
        result::device::get_default_mem_pool(device.context.cu_device())
            .and_then(|pool| cuMemPoolGetAttribute(pool, attribute, (&raw mut high).cast()).result())
    }
    .map_err(failed)?;
    Ok(high)
}

/// Checks that all libraries are present, as cudarc panics on the first use of a missing one.
fn find_libraries() -> Result<()> {
    let missing = |library, looked_for: &str| EngineError::Library { library, looked_for: looked_for.into() };
    // SAFETY: the check opens the library, whose initialisers have no preconditions; here and below.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(missing("the CUDA driver", "libcuda.so, libcuda.so.1 in the loader's path"));
    }
    // SAFETY: as above.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(missing("NVRTC", "libnvrtc.so, libnvrtc.so.13, libnvrtc.so.12; see `xlaunch env`"));
    }
    // SAFETY: as above.
    if !unsafe { cudarc::cublaslt::sys::is_culib_present() } {
        return Err(missing(
            "cuBLASLt",
            "libcublasLt.so, libcublasLt.so.13, libcublasLt.so.12; see `xlaunch env`",
        ));
    }
    Ok(())
}

/// Formats a UUID like NVML and nvidia-smi do.
fn uuid_text(bytes: impl IntoIterator<Item = std::ffi::c_char>) -> String {
    use std::fmt::Write;
    let mut text = String::from("GPU-");
    for (i, byte) in bytes.into_iter().enumerate() {
        let separator = if matches!(i, 4 | 6 | 8 | 10) { "-" } else { "" };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{:02x}", byte as u8);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hopper_is_compiled_for_with_its_own_instructions() {
        assert_eq!([(8, 6), (9, 0), (10, 0)].map(arch), ["sm_86", "sm_90a", "sm_100"]);
    }

    #[test]
    fn uuid_is_formatted_like_nvidia_smi() {
        let bytes = (0..16).map(|i| (i * 16) as std::ffi::c_char);
        assert_eq!(uuid_text(bytes), "GPU-00102030-4050-6070-8090-a0b0c0d0e0f0");
    }
}
