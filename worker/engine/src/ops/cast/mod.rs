//! Conversion between element types, or a copy if both are the same.

use cudarc::driver::result;
use xlaunch_pool::DType;

use super::{Cuda, Op};
use crate::cpu::{Access, Threads};
use crate::cuda::{KernelFile, VEC, args, driver_error, expect, source};
use crate::error::Result;
use crate::tensor::Slice;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("cast/kernel.cu"),
    kernels: &["cast_f32_bf16", "cast_bf16_f32"],
    macros: &[],
    dynamic_shared: &[],
};

/// `y = x`.
#[derive(Clone, Copy, Debug)]
pub struct Cast<'a> {
    /// (len,) F32 or Bf16.
    pub x: Slice<'a>,
    /// (len,) F32 or Bf16, rounded to nearest even.
    pub y: Slice<'a>,
}

impl Op for Cast<'_> {
    /// Copies, as the CPU has only F32 activations.
    fn cpu(self, _: &Threads) {
        let access = Access::new("cast");
        access.write(self.y, self.x.len()).copy_from_slice(access.read(self.x, self.x.len()));
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { x, y } = self;
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
        unsafe { gpu.launch(name, gpu.grid_for(len.div_ceil(VEC)), args![x, y, len]) }
    }
}
