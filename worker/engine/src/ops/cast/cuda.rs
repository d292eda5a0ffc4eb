//! Conversion kernels, and a device copy for equal element types.

use cudarc::driver::result;
use xlaunch_pool::DType;

use super::Cast;
use crate::cuda::{Gpu, KernelFile, args, driver_error, expect, source};
use crate::error::Result;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("cast/kernel.cu"),
    kernels: &["cast_f32_bf16", "cast_bf16_f32"],
    macros: &[],
    dynamic_shared: &[],
};

pub(crate) fn cast(gpu: &Gpu, Cast { x, y }: Cast<'_>) -> Result<()> {
    let len = x.len();
    let name = match (x.dtype(), y.dtype()) {
        (DType::F32, DType::Bf16) => "cast_f32_bf16",
        (DType::Bf16, DType::F32) => "cast_bf16_f32",
        _ => {
            expect(y, x.dtype(), len);
            let (bytes, stream) = (len * x.dtype().size(), gpu.device.stream.cu_stream());
            // SAFETY: both slices hold `bytes` bytes of this device.
            return unsafe { result::memcpy_dtod_async(y.address(), x.address(), bytes, stream) }
                .map_err(|error| driver_error("failed to copy on the device", error));
        }
    };
    expect(y, y.dtype(), len);
    // SAFETY: both slices hold `len` elements of the types in the kernel's name.
    unsafe { gpu.launch(name, gpu.grid_for(len), args![x, y, len]) }
}
