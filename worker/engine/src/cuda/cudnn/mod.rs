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

/// Version 9.6.0. Before it, attention gradients are wrong unless the accumulator of dq is zeroed; see the version
/// checks in cudnn-frontend, also for the versions below.
const OLDEST_VERSION: usize = 9_06_00;
/// Versions whose attention gradients are wrong in some other cases.
const WRONG_VERSIONS: [usize; 2] = [9_10_00, 9_10_01];
/// Version 9.15.1. Before it, attention gradients are wrong for sequences that are not a multiple of
/// [`SEQUENCE_MULTIPLE`], unless the graph pads them.
const ANY_SEQUENCE_VERSION: usize = 9_15_01;
const SEQUENCE_MULTIPLE: usize = 128;

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
        let (version, path) = installed()?;
        if version < OLDEST_VERSION || WRONG_VERSIONS.contains(&version) {
            let (found, needed) = (version_text(version), version_text(ANY_SEQUENCE_VERSION));
            return Err(format!("cuDNN {found} in {path} has errors, install {needed} or newer"));
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

/// Returns the reason why the library must not be used for sequences of this length, if there is one.
pub(crate) fn sequence_problem(seq: usize) -> Option<String> {
    let (version, path) = installed().ok()?;
    let is_wrong = version < ANY_SEQUENCE_VERSION && !seq.is_multiple_of(SEQUENCE_MULTIPLE);
    is_wrong.then(|| {
        format!(
            "cuDNN {} in {path} needs sequences of a multiple of {SEQUENCE_MULTIPLE} tokens, install {} or newer",
            version_text(version),
            version_text(ANY_SEQUENCE_VERSION)
        )
    })
}

/// Returns the library's version, encoded as by `cudnnGetVersion`, and its path.
fn installed() -> Result<(usize, String), String> {
    let library = Library::get()?;
    // SAFETY: the function has no preconditions.
    Ok((unsafe { (library.version)() }, library.path.display().to_string()))
}

/// Formats a version such as 91501 as 9.15.1.
fn version_text(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::version_text;

    #[test]
    fn versions_are_shown_as_in_the_names_of_packages() {
        assert_eq!([91_501, 90_600, 91_400].map(version_text), ["9.15.1", "9.6.0", "9.14.0"]);
    }
}
