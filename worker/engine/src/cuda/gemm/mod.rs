//! Matrix multiplication by cuBLASLt.
//!
//! cuBLASLt is column-major: it sees a row-major (n, k) array as a k x n matrix. Descriptors and the selected algorithm
//! (`select`, `timing`) are created once per site (shape, types, epilogue, alignment) and kept. All work goes to one
//! stream, so a single workspace suffices.

mod batch;
mod call;
mod select;
mod timing;
mod warm_up;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::rc::Rc;
use std::thread::JoinHandle;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t as LtEpilogue, cublasLtMatmulDescAttributes_t as Attribute,
    cudaDataType,
};
use xlaunch_pool::{DType, Pool, PoolBuf};

use super::device::Device;
use super::variant_log::VariantLog;
use crate::error::{EngineError, Result};
use crate::options::Precision;
use crate::tensor::Slice;
pub(crate) use batch::Batch;
pub(crate) use call::{Epilogue, GemmCall, Operand, plain, transposed};

/// Scratch memory for the library in bytes, as its documentation recommends for Hopper.
pub(crate) const WORKSPACE: usize = 32 << 20;
/// Values of `cublasOperation_t`, which cudarc binds with cuBLAS rather than cuBLASLt.
const OP_N: i32 = 0;
const OP_T: i32 = 1;
/// Largest alignment that algorithms distinguish, in bytes.
const MAX_ALIGNMENT: u64 = 256;

/// Everything that determines the choice of an algorithm: `c (m, n) (+)= op(a) op(b)`, column-major, with a (m, k), b
/// (k, n) after `op`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Site {
    m: usize,
    n: usize,
    k: usize,
    transpose_a: bool,
    transpose_b: bool,
    epilogue: LtEpilogue,
    inputs: [Element; 2],
    output: Element,
    /// Alignment of a, b, c and the GELU input, in bytes.
    alignment: [u64; 4],
    /// Distances between columns of a, b and c, where there are gaps.
    strides: [Option<usize>; 3],
}

impl Site {
    fn of(call: &GemmCall<'_>) -> Self {
        let GemmCall { m, n, k, a, b, epilogue, c, .. } = *call;
        Self {
            m,
            n,
            k,
            transpose_a: a.transpose,
            transpose_b: b.transpose,
            epilogue: epilogue.kind(),
            inputs: [a, b].map(|operand| Element::of(operand.slice)),
            output: Element::of(c),
            alignment: [a.slice, b.slice, c, epilogue.h().unwrap_or(c)].map(alignment),
            strides: [a.stride, b.stride, epilogue.stride()],
        }
    }

    fn is_fp8(&self) -> bool {
        self.inputs.iter().any(|input| matches!(input, Element::Fp8E4m3 | Element::Fp8E5m2))
    }

    /// Returns whether sums of FP8 products keep only the 14 bits of mantissa of the tensor cores' accumulators
    /// (DeepSeek-AI, 2024, section 3.3.2). For gradients, partial sums of a few products are added in F32, which takes
    /// longer.
    fn accumulates_fast(&self) -> bool {
        self.inputs == [Element::Fp8E4m3; 2]
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gemm {} x {} x {}", self.m, self.n, self.k)?;
        if self.is_fp8() {
            f.write_str(", FP8")?;
        }
        match self.epilogue {
            LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS => f.write_str(", GELU"),
            LtEpilogue::CUBLASLT_EPILOGUE_DGELU => f.write_str(", GELU gradient"),
            LtEpilogue::CUBLASLT_EPILOGUE_DGELU_BGRAD => f.write_str(", GELU and bias gradient"),
            _ => Ok(()),
        }
    }
}

/// An element type, hashable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Element {
    F32,
    Bf16,
    Fp8E4m3,
    Fp8E5m2,
}

impl Element {
    fn of(slice: Slice<'_>) -> Self {
        match slice.dtype() {
            DType::Bf16 => Self::Bf16,
            DType::Fp8E4m3 => Self::Fp8E4m3,
            DType::Fp8E5m2 => Self::Fp8E5m2,
            _ => Self::F32,
        }
    }

    fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 => 1,
        }
    }

    fn cuda(self) -> cudaDataType {
        match self {
            Self::F32 => cudaDataType::CUDA_R_32F,
            Self::Bf16 => cudaDataType::CUDA_R_16BF,
            Self::Fp8E4m3 => cudaDataType::CUDA_R_8F_E4M3,
            Self::Fp8E5m2 => cudaDataType::CUDA_R_8F_E5M2,
        }
    }
}

/// The library's description of a site. Its objects are never destroyed: there are only a few dozen sites.
#[derive(Clone, Copy)]
struct Objects {
    description: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    c: sys::cublasLtMatrixLayout_t,
}

#[derive(Clone, Copy)]
struct Plan {
    objects: Objects,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Matrix multiplication on one device.
pub(crate) struct Gemm {
    device: Device,
    handle: sys::cublasLtHandle_t,
    compute: cublasComputeType_t,
    /// True if algorithms are timed; otherwise the first one of the library's heuristic is used.
    timed: bool,
    last_at_limit: timing::LastAtLimit,
    variants: Rc<VariantLog>,
    workspace: PoolBuf<u8>,
    plans: RefCell<HashMap<Site, Plan>>,
    batches: RefCell<HashMap<(Site, Batch), Plan>>,
    warm_up: RefCell<Option<JoinHandle<()>>>,
}

impl Drop for Gemm {
    /// The process must not exit while a thread is inside the library.
    fn drop(&mut self) {
        self.wait_for_warm_up();
    }
}

impl fmt::Debug for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gemm({} sites)", self.plans.borrow().len())
    }
}

impl Gemm {
    pub(crate) fn new(
        device: &Device,
        precision: Precision,
        timed: bool,
        variants: &Rc<VariantLog>,
        pool: &Pool,
    ) -> Result<Self> {
        let handle = result::create_handle().map_err(|error| failed("failed to open cuBLASLt", error))?;
        let compute = match precision {
            Precision::Fp32 | Precision::Bf16 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
            Precision::Tf32 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        };
        let workspace = pool.persistent().alloc(WORKSPACE)?;
        let warm_up = warm_up::start(&device.context);
        Ok(Self {
            device: device.clone(),
            handle,
            compute,
            timed,
            last_at_limit: timing::LastAtLimit::default(),
            variants: variants.clone(),
            workspace,
            plans: RefCell::default(),
            batches: RefCell::default(),
            warm_up: RefCell::new(warm_up),
        })
    }

    /// Waits until the library has loaded its tables. What it calls meanwhile may invalidate a capture.
    pub(crate) fn wait_for_warm_up(&self) {
        // If the thread panicked, the panic was printed already.
        let _ = self.warm_up.take().map(JoinHandle::join);
    }

    /// Returns the library's scratch memory, which other work of the same stream may use.
    pub(crate) fn workspace(&self) -> &PoolBuf<u8> {
        &self.workspace
    }

    /// Enqueues a matrix multiplication.
    ///
    /// # Safety
    /// Every slice has the size that the call specifies, and nothing that is written overlaps another operand.
    pub(crate) unsafe fn run(&self, call: &GemmCall<'_>) -> Result<()> {
        let site = Site::of(call);
        let plan = self.plan(&site, call)?;
        // SAFETY: the plan is of this site; by the caller's promise the operands have the specified sizes.
        unsafe { self.enqueue_timed(&site, &plan, call) }
    }

    /// Enqueues a matrix multiplication as part of a profile.
    ///
    /// # Safety
    /// The same as for [`run`](Self::run); the plan must be of this call.
    unsafe fn enqueue_timed(&self, site: &Site, plan: &Plan, call: &GemmCall<'_>) -> Result<()> {
        self.device.profiler.time(
            &self.device.stream,
            || site.to_string(),
            || {
                // SAFETY: the caller's promise.
                unsafe { self.enqueue(&plan.objects, &plan.algorithm, call) }
                    .map_err(|error| failed(&format!("failed to enqueue {site}"), error))
            },
        )
    }

    /// Returns the plan of a site, which is made when the site is first seen.
    fn plan(&self, site: &Site, call: &GemmCall<'_>) -> Result<Plan> {
        if let Some(plan) = self.plans.borrow().get(site) {
            return Ok(*plan);
        }
        let objects = self
            .describe(site, call.epilogue)
            .map_err(|error| failed(&format!("failed to describe {site}"), error))?;
        let plan = Plan { objects, algorithm: select::algorithm(self, site, &objects, call)? };
        self.plans.borrow_mut().insert(*site, plan);
        Ok(plan)
    }

    /// # Safety
    /// The same as for [`run`](Self::run); description and algorithm must be of this site.
    unsafe fn enqueue(
        &self,
        objects: &Objects,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        call: &GemmCall<'_>,
    ) -> std::result::Result<(), CublasError> {
        let GemmCall { a, b, epilogue, c, accumulate, .. } = *call;
        let (alpha, beta) = (epilogue.factor(), if accumulate { 1.0_f32 } else { 0.0 });
        // SAFETY: the objects are never destroyed; the operands are as the caller promises; scalars are on the host,
        // the description's default pointer mode; the workspace has the size that algorithms are selected for.
        unsafe {
            set_epilogue_pointers(objects.description, epilogue)?;
            set_scale_pointers(objects.description, a, b)?;
            result::matmul(
                self.handle,
                objects.description,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                a.slice.address() as *const c_void,
                objects.a,
                b.slice.address() as *const c_void,
                objects.b,
                c.address() as *const c_void,
                objects.c,
                c.address() as *mut c_void,
                objects.c,
                std::ptr::from_ref(algorithm),
                self.workspace.address() as *mut c_void,
                WORKSPACE,
                self.device.stream.cu_stream().cast(),
            )
        }
    }

    fn describe(&self, site: &Site, epilogue: Epilogue<'_>) -> std::result::Result<Objects, CublasError> {
        let Site { m, n, k, .. } = *site;
        let layout = |[rows, cols]: [usize; 2], transpose: bool, element: Element, stride: Option<usize>| {
            let (rows, cols) = if transpose { (cols, rows) } else { (rows, cols) };
            let stride = stride.unwrap_or(rows).cast_signed() as i64;
            result::create_matrix_layout(element.cuda(), rows as u64, cols as u64, stride)
        };
        let [stride_a, stride_b, stride_c] = site.strides;
        let operation = |transpose| {
            if transpose { OP_T } else { OP_N }
        };
        let description = result::create_matmul_desc(self.compute, cudaDataType::CUDA_R_32F)?;
        let a = layout([m, k], site.transpose_a, site.inputs[0], stride_a)?;
        let b = layout([k, n], site.transpose_b, site.inputs[1], stride_b)?;
        let c = layout([m, n], false, site.output, stride_c)?;
        // SAFETY: the description was just made; each value has the type that the attribute asks for.
        unsafe {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(site.transpose_a))?;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(site.transpose_b))?;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &site.epilogue)?;
            if epilogue.h().is_some() {
                set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(m.cast_signed() as i64))?;
            }
            if site.is_fp8() {
                let fast = i8::from(site.accumulates_fast());
                set(description, Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast)?;
            }
            // The heuristic considers the alignment of these pointers.
            set_epilogue_pointers(description, epilogue)?;
        }
        Ok(Objects { description, a, b, c })
    }
}

/// Returns the largest power of two that divides the address, up to [`MAX_ALIGNMENT`].
fn alignment(slice: Slice<'_>) -> u64 {
    1 << slice.address().trailing_zeros().min(MAX_ALIGNMENT.trailing_zeros())
}

/// Writes the addresses of the epilogue's operands into a description.
///
/// # Safety
/// The description is alive.
unsafe fn set_epilogue_pointers(
    description: sys::cublasLtMatmulDesc_t,
    epilogue: Epilogue<'_>,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise; the attributes are pointers, and addresses have the same size.
    unsafe {
        if let Some(bias) = epilogue.bias() {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.address())?;
        }
        if let Some(h) = epilogue.h() {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &h.address())?;
        }
    }
    Ok(())
}

/// Writes the addresses of the operands' factors into a description.
///
/// # Safety
/// The description is alive.
unsafe fn set_scale_pointers(
    description: sys::cublasLtMatmulDesc_t,
    a: Operand<'_>,
    b: Operand<'_>,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise; the attributes are pointers, and addresses have the same size.
    unsafe {
        if let Some(scale) = a.scale {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scale.address())?;
        }
        if let Some(scale) = b.scale {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scale.address())?;
        }
    }
    Ok(())
}

/// # Safety
/// The description is alive and `T` is the attribute's type.
unsafe fn set<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: Attribute,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise.
    unsafe {
        result::set_matmul_desc_attribute(
            description,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

fn failed(what: &str, error: CublasError) -> EngineError {
    EngineError::Cuda { what: what.into(), reason: format!("{:?}", error.0) }
}
