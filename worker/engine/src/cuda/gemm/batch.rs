//! Several matrix multiplications of the same shape in one call.
//!
//! The library's choice of an algorithm depends on their number. Results must not: the same matrix is multiplied in
//! batches of different sizes, depending on the number of ranks. So the algorithm is always that for a full batch: the
//! first of the library's heuristic, since smaller batches have no operands on which to time a full one.

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtMatrixLayoutAttribute_t as Attribute};

use super::{Element, Gemm, GemmCall, Objects, Plan, Site, failed, select};
use crate::error::Result;

/// A number of multiplications whose operands follow each other without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Batch {
    /// Number of multiplications.
    pub(crate) count: usize,
    /// The largest number for these sizes.
    pub(crate) full: usize,
}

impl Gemm {
    /// Enqueues a batch of matrix multiplications without an epilogue.
    ///
    /// # Safety
    /// Every slice has the size that the call specifies, times the number of multiplications, and nothing that is
    /// written overlaps another operand.
    pub(crate) unsafe fn run_batch(&self, call: &GemmCall<'_>, batch: Batch) -> Result<()> {
        let mut site = Site::of(call);
        // The operands of later multiplications may be aligned less.
        for (alignment, (len, element)) in site.alignment.iter_mut().zip(operands(&Site::of(call))) {
            *alignment = (*alignment).min(1 << (len * element.size()).trailing_zeros().min(u64::BITS - 1));
        }
        site.alignment[3] = site.alignment[2];
        let plan = self.batch_plan(&site, call, batch)?;
        // SAFETY: the plan is of this site and batch; by the caller's promise the operands have the specified sizes.
        unsafe { self.enqueue_timed(&site, &plan, call) }
    }

    fn batch_plan(&self, site: &Site, call: &GemmCall<'_>, batch: Batch) -> Result<Plan> {
        if let Some(plan) = self.batches.borrow().get(&(*site, batch)) {
            return Ok(*plan);
        }
        let describe = |count| {
            let objects = self.describe(site, call.epilogue).and_then(|objects| {
                set_batch(site, objects, count)?;
                Ok(objects)
            });
            objects.map_err(|error| failed(&format!("failed to describe a batch of {site}"), error))
        };
        let algorithm = select::first(self, site, &describe(batch.full)?)?;
        let plan = Plan { objects: describe(batch.count)?, algorithm };
        self.batches.borrow_mut().insert((*site, batch), plan);
        Ok(plan)
    }
}

/// Returns the numbers of elements and the types of a, b and c.
fn operands(site: &Site) -> [(usize, Element); 3] {
    let Site { m, n, k, inputs: [a, b], output, .. } = *site;
    [(m * k, a), (k * n, b), (m * n, output)]
}

fn set_batch(site: &Site, objects: Objects, count: usize) -> std::result::Result<(), CublasError> {
    let count = i32::try_from(count).unwrap_or(i32::MAX);
    for (layout, (len, _)) in [objects.a, objects.b, objects.c].into_iter().zip(operands(site)) {
        // SAFETY: the layout was just made; each value has the type that the attribute asks for.
        unsafe {
            set(layout, Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
            let len = len.cast_signed() as i64;
            set(layout, Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &len)?;
        }
    }
    Ok(())
}

/// # Safety
/// The layout is alive and `T` is the attribute's type.
unsafe fn set<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: Attribute,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: the caller's promise.
    unsafe {
        result::set_matrix_layout_attribute(
            layout,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}
