//! Matrix products by cuBLASLt.
//!
//! cuBLASLt counts in columns: a row-major [n, k] array is its k x n matrix. All three products of a linear layer are
//! written that way below. Descriptors and the choice of algorithm are made once per site (shape, types, alignment) and
//! kept; the first heuristic is taken. Workspace belongs to the handle's one stream, so one is enough.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Preference, cudaDataType,
};
use xlaunch_pool::{DType, Pool, PoolBuf};

use super::device::Device;
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
    bias: bool,
    input: Element,
    output: Element,
    add: bool,
    alignment: [u64; 3],
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

/// What is kept per site. The library's objects live as long as the process: there are a few dozen.
#[derive(Clone, Copy)]
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    c: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Matrix products on one device's stream.
pub(super) struct Gemm {
    device: Device,
    handle: sys::cublasLtHandle_t,
    compute: cublasComputeType_t,
    workspace: PoolBuf<u8>,
    plans: RefCell<HashMap<Site, Plan>>,
}

impl std::fmt::Debug for Gemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
    pub(super) fn new(device: &Device, precision: Precision, pool: &Pool) -> Result<Self> {
        let handle = result::create_handle().map_err(|error| failed("failed to open cuBLASLt", error))?;
        let compute = match precision {
            Precision::Fp32 | Precision::Bf16 => cublasComputeType_t::CUBLAS_COMPUTE_32F,
            Precision::Tf32 => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        };
        let workspace = pool.persistent().alloc(WORKSPACE)?;
        Ok(Self { device: device.clone(), handle, compute, workspace, plans: RefCell::default() })
    }

    /// `c = op(a) op(b) (+ bias along m) (+ c if add)`, sizes in the library's columns.
    ///
    /// # Safety
    /// Every slice holds what its sizes say, and `c` overlaps no other.
    #[expect(clippy::too_many_arguments, reason = "a product has three sizes and four operands")]
    pub(super) unsafe fn product(
        &self,
        m: usize,
        n: usize,
        k: usize,
        a: Operand<'_>,
        b: Operand<'_>,
        bias: Option<Slice<'_>>,
        c: Slice<'_>,
        add: bool,
    ) -> Result<()> {
        let site = Site {
            m,
            n,
            k,
            transpose_a: a.transpose,
            transpose_b: b.transpose,
            bias: bias.is_some(),
            input: Element::of(a.slice),
            output: Element::of(c),
            add,
            alignment: [a.slice, b.slice, c].map(alignment),
        };
        let known = self.plans.borrow().get(&site).copied();
        let plan = match known {
            Some(plan) => plan,
            None => {
                let plan = self.plan(site).map_err(|error| {
                    failed(&format!("failed to find an algorithm for a product of {m} x {n} x {k}"), error)
                })?;
                self.plans.borrow_mut().insert(site, plan);
                plan
            }
        };
        self.device.profiler.time(
            &self.device.stream,
            || format!("product {m} x {n} x {k}"),
            || {
                // SAFETY: the plan's objects are never destroyed; by the caller's promise the operands are as large as the
                // layouts say; the workspace has the size that the algorithm was chosen for.
                unsafe { self.enqueue(&plan, a.slice, b.slice, bias, c, add) }.map_err(|error| {
                    failed(&format!("failed to enqueue a product of {m} x {n} x {k}"), error)
                })
            },
        )
    }

    /// # Safety
    /// As [`product`](Self::product), with a plan of this site.
    unsafe fn enqueue(
        &self,
        plan: &Plan,
        a: Slice<'_>,
        b: Slice<'_>,
        bias: Option<Slice<'_>>,
        c: Slice<'_>,
        add: bool,
    ) -> std::result::Result<(), CublasError> {
        let (alpha, beta) = (1.0_f32, if add { 1.0_f32 } else { 0.0 });
        if let Some(bias) = bias {
            // SAFETY: the description is alive.
            unsafe { set(plan.description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.address()) }?;
        }
        // SAFETY: the caller's promise; scalars are on the host, where the description says they are.
        unsafe {
            result::matmul(
                self.handle,
                plan.description,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                a.address() as *const c_void,
                plan.a,
                b.address() as *const c_void,
                plan.b,
                c.address() as *const c_void,
                plan.c,
                c.address() as *mut c_void,
                plan.c,
                &raw const plan.algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE,
                self.device.stream.cu_stream().cast(),
            )
        }
    }

    fn plan(&self, site: Site) -> std::result::Result<Plan, CublasError> {
        let Site { m, n, k, .. } = site;
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
            if site.bias {
                let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            }
        }
        let preference = result::create_matmul_pref()?;
        let [align_a, align_b, align_c] = site.alignment.map(|bytes| u32::try_from(bytes).unwrap_or(16));
        // SAFETY: the preference was just made and is destroyed once, below; values have the attributes' types; all
        // layouts are alive.
        let heuristic = unsafe {
            prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
            prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_a)?;
            prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_b)?;
            prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_c)?;
            prefer(preference, Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_c)?;
            let heuristic =
                result::get_matmul_algo_heuristic(self.handle, description, a, b, c, c, preference);
            result::destroy_matmul_pref(preference)?;
            heuristic?
        };
        Ok(Plan { description, a, b, c, algorithm: heuristic.algo })
    }
}

/// The largest power of two that the address is a multiple of, as far as algorithms care.
fn alignment(slice: Slice<'_>) -> u64 {
    1 << slice.address().trailing_zeros().min(MAX_ALIGNMENT.trailing_zeros())
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

/// # Safety
/// The preference is alive and `T` is the attribute's type.
unsafe fn prefer<T>(
    preference: sys::cublasLtMatmulPreference_t,
    attribute: Preference,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise.
    unsafe {
        result::set_matmul_pref_attribute(
            preference,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

fn failed(what: &str, error: CublasError) -> EngineError {
    EngineError::Cuda { what: what.into(), reason: format!("{:?}", error.0) }
}
