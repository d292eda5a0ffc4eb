//! Common parts of launching our kernels for compute capability 9.0: kernels that are compiled on first use, and
//! descriptors of their operands (`headers/hopper.cuh`).

use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::rc::Rc;

use cudarc::driver::CudaFunction;
use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle, cuTensorMapEncodeTiled,
};
use xlaunch_pool::DType;

use super::compile::{Macro, Source};
use super::launch::{Arg, Kernels, Launch, VEC};
use crate::error::driver_error;
use crate::error::{EngineError, Result};
use crate::tensor::Slice;

/// Threads of a warpgroup.
pub(crate) const WARPGROUP: u32 = 128;
/// Threads of a block: one warpgroup that loads tiles and two that multiply.
pub(crate) const THREADS: u32 = 3 * WARPGROUP;
/// Rows of a tile, its depth, and the edge of the squares in which operands with k in their rows are loaded.
pub(crate) const TILE_M: usize = 128;
pub(crate) const TILE_K: usize = 64;
pub(crate) const SQUARE: usize = 64;
/// Bytes of a row of a tile: the width of the swizzle.
pub(crate) const TILE_ROW_BYTES: usize = 128;
/// Dynamic shared memory other than tiles: barriers, and space to align the start to 1,024 bytes.
pub(crate) const OTHER_SHARED: usize = 2048;

/// Bytes of the left operand in the rows of tiles whose blocks run one after another. They stay in the L2 cache (50
/// MiB) while the right operand passes through. H200, 8192 cubed: 785 TFLOP/s with 8 rows of tiles, 698 with 32.
const CACHED_BYTES: usize = 16 << 20;
const MIN_TILE_ROWS: usize = 8;
const MAX_TILE_ROWS: usize = 64;

/// A kernel and its compilation settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopperKernel {
    pub(crate) source: Source,
    pub(crate) name: &'static str,
    pub(crate) macros: &'static [Macro],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory, in bytes.
    pub(crate) shared: usize,
}

impl HopperKernel {
    /// Returns its source, with the macros.
    pub(crate) fn compilation(&self) -> (Source, Vec<Macro>) {
        (self.source, self.macros.to_vec())
    }
}

/// The kernels used so far.
#[derive(Debug)]
pub(crate) struct Hopper {
    kernels: Rc<Kernels>,
    /// Loaded kernels, by the address of their static.
    loaded: RefCell<HashMap<*const HopperKernel, CudaFunction>>,
}

impl Hopper {
    pub(crate) fn new(kernels: &Rc<Kernels>) -> Self {
        Self { kernels: kernels.clone(), loaded: RefCell::default() }
    }

    /// Returns whether this device can run the kernels and they can access these operands: they must be bf16, and their
    /// innermost dimensions, of these lengths, must consist of whole vectors. All dimensions must fit into an `int`.
    pub(crate) fn supports(&self, operands: &[Slice<'_>], inner: &[usize], other: &[usize]) -> bool {
        self.kernels.device().capability == (9, 0)
            && operands.iter().all(|x| x.dtype() == DType::Bf16 && x.address().is_multiple_of(16))
            && inner.iter().all(|len| len.is_multiple_of(VEC))
            && inner.iter().chain(other).all(|len| (1..i32::MAX as usize / 2).contains(len))
    }

    /// Returns the number of streaming multiprocessors, which is the number of blocks that run at a time.
    pub(crate) fn multiprocessors(&self) -> usize {
        self.kernels.device().multiprocessors as usize
    }

    /// Enqueues a kernel with this grid.
    ///
    /// # Safety
    /// Same as for [`Kernels::launch`].
    pub(crate) unsafe fn launch(
        &self,
        kernel: &'static HopperKernel,
        grid: (usize, usize, usize),
        args: &[Arg],
    ) -> Result<()> {
        let function = self.function(kernel)?;
        let launch = Launch { grid, block: (kernel.threads, 1), shared: kernel.shared };
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch_function(kernel.name, &function, launch, args) }
    }

    /// Returns the kernel, which is compiled or loaded on first use.
    fn function(&self, kernel: &'static HopperKernel) -> Result<CudaFunction> {
        let HopperKernel { source, name, macros, shared, .. } = *kernel;
        if let Some(function) = self.loaded.borrow().get(&std::ptr::from_ref(kernel)) {
            return Ok(function.clone());
        }
        let function = self.kernels.load(source, macros, &[name])?.remove(name);
        let function = function.ok_or_else(|| EngineError::no_kernel(name))?;
        self.kernels.allow_dynamic_shared(name, &function, shared)?;
        self.loaded.borrow_mut().insert(kernel, function.clone());
        Ok(function)
    }
}

/// Returns the number of rows of tiles, of a left operand whose rows have this many bytes, whose blocks run one after
/// another.
pub(crate) fn cached_tile_rows(depth_bytes: usize) -> usize {
    (CACHED_BYTES / (TILE_M * depth_bytes)).clamp(MIN_TILE_ROWS, MAX_TILE_ROWS)
}

/// Describes a dense array, innermost dimension first, that is loaded in boxes with the 128-byte swizzle. Elements
/// outside the array read as zero.
pub(crate) fn tensor_map(x: Slice<'_>, dims: [usize; 3], tile: [usize; 3]) -> Result<CUtensorMap> {
    strided_map(x, dims, [dims[0], dims[0] * dims[1]], tile)
}

/// Describes an array like [`tensor_map`], with the distances between elements in its second and third dimension. Its
/// elements are bf16 or FP8.
pub(crate) fn strided_map(
    x: Slice<'_>,
    dims: [usize; 3],
    strides: [usize; 2],
    tile: [usize; 3],
) -> Result<CUtensorMap> {
    let mut map = MaybeUninit::uninit();
    let element = if x.dtype() == DType::Bf16 {
        CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    } else {
        CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8
    };
    let strides = strides.map(|stride| (stride * x.dtype().size()) as u64);
    let dims = dims.map(|dim| dim as u64);
    let (tile, steps) = (tile.map(|len| len as u32), [1; 3]);
    // SAFETY: the arrays have as many elements as the rank says, and the map is valid for a write.
    let made = unsafe {
        cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            element,
            dims.len() as u32,
            x.address() as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    made.result()
        .map_err(|error| driver_error(format!("failed to describe {dims:?} in tiles {tile:?}"), error))?;
    // SAFETY: the call succeeded, so it has written the map.
    Ok(unsafe { map.assume_init() })
}
