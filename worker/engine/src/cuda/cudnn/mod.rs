//! Attention by cuDNN, where the library is installed and has kernels for the shape.
//!
//! - `descriptor`: one object of the library's backend API, and its refusals;
//! - `graph`: operations on tensors, made into a plan;
//! - `attention`: the two graphs;
//! - this file: the library, its handle, and the plans made so far.
//!
//! Backward does not repeat its bits: blocks of keys add to the gradient of queries in the order in which they come to
//! an end. The form of the pattern that does repeat them writes and reads something for every pair of a query and a key
//! (a workspace of 805 MB for GPT-2 124M at 32 sequences), about what cuDNN gains: deterministic runs take this crate's
//! own kernels instead.
//!
//! Plans are made, and their kernels loaded, when a shape first comes by. From then on an execution only enqueues, so
//! that it can be captured.

mod attention;
mod descriptor;
mod graph;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::cudnn::sys::{self, cudnnHandle_t};
use cudarc::driver::CudaStream;

pub(super) use attention::{AttentionPlan, Direction, Operands};
use descriptor::Refusal;
use graph::Target;

use crate::shapes::AttentionShape;

/// 9.15.1. Those before have wrong gradients for sequences that are no multiple of 128 unless the graph pads them, or
/// (before 9.6) want dq's sum cleared, or (9.10.0 and 9.10.1) are wrong in other ways, as cudnn-frontend's checks say.
const OLDEST: usize = 9_15_01;

/// A plan, or why there is none.
type Planned = Result<Rc<AttentionPlan>, String>;

/// The library on one stream.
#[derive(Debug)]
pub(super) struct Cudnn {
    /// Refusals are for good.
    plans: RefCell<HashMap<(AttentionShape, Direction), Planned>>,
    handle: Handle,
    /// The handle enqueues to it.
    _stream: Arc<CudaStream>,
}

impl Cudnn {
    /// Opens the library for this stream, whose context is the current one; or says why not.
    pub(super) fn open(stream: &Arc<CudaStream>) -> Result<Self, String> {
        // SAFETY: asking opens the library, whose initialisers have no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err("cuDNN is not installed (libcudnn.so.9 in LD_LIBRARY_PATH)".into());
        }
        // That file only passes calls on to others, and ends the process where this one is missing.
        // SAFETY: as above.
        if unsafe { libloading::Library::new("libcudnn_graph.so.9") }.is_err() {
            return Err("cuDNN is not installed in full (libcudnn_graph.so.9 in LD_LIBRARY_PATH)".into());
        }
        // SAFETY: the library is there, and has this function since its first version.
        let version = unsafe { sys::cudnnGetVersion() };
        if version < OLDEST {
            return Err(format!("cuDNN's version is {version}, below {OLDEST}"));
        }
        let handle = Handle::new(stream).map_err(|refusal| refusal.to_string())?;
        Ok(Self { plans: RefCell::default(), handle, _stream: stream.clone() })
    }

    /// The plan for a shape, made when it is first asked for, which takes up to seconds; or why there is none.
    pub(super) fn plan(&self, s: AttentionShape, direction: Direction) -> Planned {
        let make = || {
            let plan = AttentionPlan::new(s, direction, &Target::Handle(self.handle.0));
            plan.map(Rc::new).map_err(|refusal| refusal.to_string())
        };
        self.plans.borrow_mut().entry((s, direction)).or_insert_with(make).clone()
    }

    /// Enqueues a plan.
    ///
    /// # Safety
    /// The plan is of this library; the operands of its direction are addresses of as much memory as its shape says, and
    /// `scratch` of as many bytes as it wants, all of it allocated until the stream has passed this point.
    pub(super) unsafe fn execute(
        &self,
        plan: &AttentionPlan,
        operands: &Operands,
        scratch: u64,
    ) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { plan.execute(self.handle.0, operands, scratch) }.map_err(|refusal| refusal.to_string())
    }
}

/// The library's own state.
#[derive(Debug)]
struct Handle(cudnnHandle_t);

impl Handle {
    fn new(stream: &CudaStream) -> Result<Self, Refusal> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library writes the new handle.
        Refusal::check("cudnnCreate", unsafe { sys::cudnnCreate(&raw mut raw) })?;
        let handle = Self(raw);
        // SAFETY: both are alive, and the stream is of the context that the handle was made in.
        Refusal::check("cudnnSetStream", unsafe { sys::cudnnSetStream(raw, stream.cu_stream().cast()) })?;
        Ok(handle)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed nowhere else. A failure leaves nothing to be done.
        let _ = unsafe { sys::cudnnDestroy(self.0) };
    }
}
