//! Matrix products by cuBLASLt.
//!
//! cuBLASLt counts in columns: a row-major [n, k] array is its k x n matrix. All three products of a linear layer are
//! written that way below. Descriptors and the choice of algorithm (`choose`) are made once per site (shape, types,
//! epilogue, alignment) and kept. Workspace belongs to the one stream, so one is enough.

mod choose;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::rc::Rc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t as LtEpilogue, cublasLtMatmulDescAttributes_t as Attribute,
    cudaDataType,
};
use xlaunch_pool::{DType, Pool, PoolBuf};

use super::device::Device;
use super::fallback::FallbackLog;
use crate::backend::{EngineError, Precision, Result};
use crate::tensor::Slice;

/// What the library may use between its kernels; what its documentation advises for Hopper.
const WORKSPACE: usize = 32 << 20;
/// `cublasOperation_t`, which cudarc binds with the library that is not used here.
const OP_N: i32 = 0;
const OP_T: i32 = 1;
/// Largest alignment that algorithms ask for.
const MAX_ALIGNMENT: u64 = 256;

/// `c[m, n] (+)= op(a) op(b)` in the library's columns: a [m, k], b [k, n] after `op`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Site {
    m: usize,
    n: usize,
    k: usize,
    transpose_a: bool,
    transpose_b: bool,
    epilogue: LtEpilogue,
    input: Element,
    output: Element,
    /// Of a, b, c and GELU's input.
    alignment: [u64; 4],
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "product {} x {} x {}", self.m, self.n, self.k)?;
        match self.epilogue {
            LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS => f.write_str(", GELU"),
            LtEpilogue::CUBLASLT_EPILOGUE_DGELU => f.write_str(", GELU's slope"),
            LtEpilogue::CUBLASLT_EPILOGUE_DGELU_BGRAD => f.write_str(", GELU's slope, sums"),
            _ => Ok(()),
        }
    }
}

/// An element type that can be a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Element {
    F32,
    Bf16,
}

impl Element {
    fn of(slice: Slice<'_>) -> Self {
        if slice.dtype() == DType::Bf16 { Self::Bf16 } else { Self::F32 }
    }

    fn cuda(self) -> cudaDataType {
        match self {
            Self::F32 => cudaDataType::CUDA_R_32F,
            Self::Bf16 => cudaDataType::CUDA_R_16BF,
        }
    }
}

/// The library's description of a site. Its objects live as long as the process: there are a few dozen sites.
#[derive(Clone, Copy)]
struct Objects {
    description: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    c: sys::cublasLtMatrixLayout_t,
}

/// What is kept per site.
#[derive(Clone, Copy)]
struct Plan {
    objects: Objects,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The operands of one product.
#[derive(Clone, Copy)]
struct Call<'a> {
    a: Slice<'a>,
    b: Slice<'a>,
    epilogue: Epilogue<'a>,
    c: Slice<'a>,
    add: bool,
}

/// What is done to a product before it is written. Biases and their gradients lie along m; `h` lies as the output does.
#[derive(Clone, Copy)]
pub(super) enum Epilogue<'a> {
    /// Nothing.
    None,
    /// A bias is added.
    Bias(Slice<'a>),
    /// A bias is added, the sum is written to `h`, and its GELU to the output.
    Gelu { bias: Slice<'a>, h: Slice<'a> },
    /// The product is multiplied by GELU's slope at `h`; the output's sum along n is written to `dbias`, which has the
    /// output's element type.
    GeluSlope { h: Slice<'a>, dbias: Option<Slice<'a>> },
}

impl<'a> Epilogue<'a> {
    /// Its name in the library.
    fn kind(self) -> LtEpilogue {
        match self {
            Self::None => LtEpilogue::CUBLASLT_EPILOGUE_DEFAULT,
            Self::Bias(_) => LtEpilogue::CUBLASLT_EPILOGUE_BIAS,
            Self::Gelu { .. } => LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Self::GeluSlope { dbias: None, .. } => LtEpilogue::CUBLASLT_EPILOGUE_DGELU,
            Self::GeluSlope { dbias: Some(_), .. } => LtEpilogue::CUBLASLT_EPILOGUE_DGELU_BGRAD,
        }
    }

    /// The bias that is read, or its gradient that is written.
    fn bias(self) -> Option<Slice<'a>> {
        match self {
            Self::None => None,
            Self::Bias(bias) | Self::Gelu { bias, .. } => Some(bias),
            Self::GeluSlope { dbias, .. } => dbias,
        }
    }

    /// GELU's input, which is written forward and read backward.
    fn h(self) -> Option<Slice<'a>> {
        match self {
            Self::None | Self::Bias(_) => None,
            Self::Gelu { h, .. } | Self::GeluSlope { h, .. } => Some(h),
        }
    }
}

/// Matrix products on one device.
pub(super) struct Gemm {
    device: Device,
    handle: sys::cublasLtHandle_t,
    compute: cublasComputeType_t,
    /// Whether algorithms are timed; the library's first proposal is taken otherwise.
    timed: bool,
    fallback: Rc<FallbackLog>,
    workspace: PoolBuf<u8>,
    plans: RefCell<HashMap<Site, Plan>>,
}

impl fmt::Debug for Gemm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gemm({} sites)", self.plans.borrow().len())
    }
}

/// One operand: its memory, and whether it is read with rows and columns exchanged.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    slice: Slice<'a>,
    transpose: bool,
}

/// As it lies in memory, in the library's columns.
pub(super) fn plain(slice: Slice<'_>) -> Operand<'_> {
    Operand { slice, transpose: false }
}

/// With rows and columns exchanged.
pub(super) fn transposed(slice: Slice<'_>) -> Operand<'_> {
    Operand { slice, transpose: true }
}

impl Gemm {
    pub(super) fn new(
        device: &Device,
        precision: Precision,
        timed: bool,
        fallback: &Rc<FallbackLog>,
        pool: &Pool,
    ) -> Result<Self> {
        let handle = result::create_handle().map_err(|error| failed("failed to open cuBLASLt", error))?;
        let compute = match precision {
            Precision::Fp32 | Precision::Bf16 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
            Precision::Tf32 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        };
        let workspace = pool.persistent().alloc(WORKSPACE)?;
        let (device, fallback) = (device.clone(), fallback.clone());
        Ok(Self { device, handle, compute, timed, fallback, workspace, plans: RefCell::default() })
    }

    /// `c = epilogue(op(a) op(b)) (+ c if add)`, sizes in the library's columns. Only plain products are added.
    ///
    /// # Safety
    /// Every slice holds what its sizes say, and nothing that is written overlaps another.
    #[expect(clippy::too_many_arguments, reason = "a product has three sizes and four operands")]
    pub(super) unsafe fn product(
        &self,
        m: usize,
        n: usize,
        k: usize,
        a: Operand<'_>,
        b: Operand<'_>,
        epilogue: Epilogue<'_>,
        c: Slice<'_>,
        add: bool,
    ) -> Result<()> {
        let site = Site {
            m,
            n,
            k,
            transpose_a: a.transpose,
            transpose_b: b.transpose,
            epilogue: epilogue.kind(),
            input: Element::of(a.slice),
            output: Element::of(c),
            alignment: [a.slice, b.slice, c, epilogue.h().unwrap_or(c)].map(alignment),
        };
        let call = Call { a: a.slice, b: b.slice, epilogue, c, add };
        let plan = self.plan(&site, &call)?;
        self.device.profiler.time(
            &self.device.stream,
            || site.to_string(),
            || {
                // SAFETY: the plan is of this site; by the caller's promise the operands are as large as it says.
                unsafe { self.enqueue(&plan.objects, &plan.algorithm, &call) }
                    .map_err(|error| failed(&format!("failed to enqueue {site}"), error))
            },
        )
    }

    /// What is known of a site, found out where it is first met.
    fn plan(&self, site: &Site, call: &Call<'_>) -> Result<Plan> {
        if let Some(plan) = self.plans.borrow().get(site) {
            return Ok(*plan);
        }
        let objects = self
            .describe(site, call.epilogue)
            .map_err(|error| failed(&format!("failed to describe {site}"), error))?;
        let plan = Plan { objects, algorithm: choose::algorithm(self, site, &objects, call)? };
        self.plans.borrow_mut().insert(*site, plan);
        Ok(plan)
    }

    /// # Safety
    /// As [`product`](Self::product), with the description and an algorithm of this site.
    unsafe fn enqueue(
        &self,
        objects: &Objects,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        call: &Call<'_>,
    ) -> std::result::Result<(), CublasError> {
        let Call { a, b, epilogue, c, add } = *call;
        let (alpha, beta) = (1.0_f32, if add { 1.0_f32 } else { 0.0 });
        // SAFETY: the objects are never destroyed; the operands are as the caller promises; scalars are on the host, where
        // the description says they are; the workspace has the size that algorithms are chosen for.
        unsafe {
            point(objects.description, epilogue)?;
            result::matmul(
                self.handle,
                objects.description,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                a.address() as *const c_void,
                objects.a,
                b.address() as *const c_void,
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
        let layout = |rows: usize, cols: usize, transpose: bool, element: Element| {
            let (rows, cols) = if transpose { (cols, rows) } else { (rows, cols) };
            result::create_matrix_layout(element.cuda(), rows as u64, cols as u64, rows.cast_signed() as i64)
        };
        let operation = |transpose| {
            if transpose { OP_T } else { OP_N }
        };
        let description = result::create_matmul_desc(self.compute, cudaDataType::CUDA_R_32F)?;
        let a = layout(m, k, site.transpose_a, site.input)?;
        let b = layout(k, n, site.transpose_b, site.input)?;
        let c = layout(m, n, false, site.output)?;
        // SAFETY: the description was just made; each value has the type that the attribute asks for.
        unsafe {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(site.transpose_a))?;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(site.transpose_b))?;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &site.epilogue)?;
            if epilogue.h().is_some() {
                set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(m.cast_signed() as i64))?;
            }
            // Proposals depend on how these are aligned.
            point(description, epilogue)?;
        }
        Ok(Objects { description, a, b, c })
    }
}

/// The largest power of two that the address is a multiple of, as far as algorithms care.
fn alignment(slice: Slice<'_>) -> u64 {
    1 << slice.address().trailing_zeros().min(MAX_ALIGNMENT.trailing_zeros())
}

/// Tells a description where its epilogue's operands lie.
///
/// # Safety
/// The description is alive.
unsafe fn point(
    description: sys::cublasLtMatmulDesc_t,
    epilogue: Epilogue<'_>,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise; an address has the size of the pointer that the attribute is.
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
