//! cuDNN's graph API, if the library is installed. Operations decide which graphs are built.
//!
//! - `library`: its functions, loaded at run time;
//! - `descriptor`: one object of the backend API, and errors;
//! - `graph`: operations on tensors, built into a plan;
//! - this file: the library's handle.
//!
//! Building a plan also loads its kernels. Afterwards an execution only enqueues work, so it can be captured.

pub(crate) mod descriptor;
pub(crate) mod graph;
pub(crate) mod library;

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnHandle_t;
use cudarc::driver::CudaStream;

pub(crate) use descriptor::CudnnError;
use descriptor::library;
use library::Library;

/// Version 9.15.1. Earlier versions compute wrong attention gradients: for sequences that are not multiples of 128
/// unless the graph pads them, or (before 9.6) unless the accumulator of dq is zeroed, or (9.10.0 and 9.10.1) in other
/// cases; see the version checks in cudnn-frontend.
const OLDEST_VERSION: usize = 9_15_01;

/// A handle of the library that enqueues to one stream.
#[derive(Debug)]
pub(crate) struct Cudnn {
    handle: cudnnHandle_t,
    /// Must outlive the handle.
    _stream: Arc<CudaStream>,
}

// SAFETY: the library lets any one thread at a time use a handle.
unsafe impl Send for Cudnn {}

impl Cudnn {
    /// Opens the library for this stream, whose context is the current one. An error is the reason why it cannot be
    /// used.
    pub(crate) fn open(stream: &Arc<CudaStream>) -> Result<Self, String> {
        // SAFETY: the function has no preconditions.
        let version = unsafe { (Library::get()?.version)() };
        if version < OLDEST_VERSION {
            return Err(format!("cuDNN has version {version}, older than {OLDEST_VERSION}"));
        }
        Self::with_handle(stream).map_err(|error| error.to_string())
    }

    fn with_handle(stream: &Arc<CudaStream>) -> Result<Self, CudnnError> {
        let (library, mut handle) = (library()?, std::ptr::null_mut());
        // SAFETY: the library writes the new handle.
        CudnnError::check("cudnnCreate", unsafe { (library.create)(&raw mut handle) })?;
        let cudnn = Self { handle, _stream: stream.clone() };
        // SAFETY: both are alive, and the stream belongs to the context that the handle was created in.
        let status = unsafe { (library.set_stream)(handle, stream.cu_stream().cast()) };
        CudnnError::check("cudnnSetStream", status)?;
        Ok(cudnn)
    }

    /// Returns the library's handle, which is valid as long as `self`.
    pub(crate) fn handle(&self) -> cudnnHandle_t {
        self.handle
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        if let Ok(library) = library() {
            // SAFETY: created by the library and destroyed only here. A failure cannot be handled.
            unsafe { (library.destroy)(self.handle) };
        }
    }
}
