//! The NCCL library, loaded on first use. A missing library or function is an error, never a panic: cudarc's own loader
//! panics, and does not try `libnccl.so.2`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId, ncclWindow_t};

use crate::collective::{CommError, Result};

/// Names under which packages, distributions and Python wheels install NCCL.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Environment variable with the path of the file to load. The agent sets it.
const PATH_VARIABLE: &str = "XLAUNCH_NCCL";

/// The functions in use, as declared in `nccl.h`. Streams (`cudaStream_t`) are passed as `*mut c_void`.
pub(super) struct Library {
    pub(super) get_unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> ncclResult_t,
    pub(super) comm_init_rank:
        unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> ncclResult_t,
    pub(super) all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclRedOp_t,
        ncclComm_t,
        *mut c_void,
    ) -> ncclResult_t,
    pub(super) reduce_scatter: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclRedOp_t,
        ncclComm_t,
        *mut c_void,
    ) -> ncclResult_t,
    pub(super) reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclRedOp_t,
        c_int,
        ncclComm_t,
        *mut c_void,
    ) -> ncclResult_t,
    pub(super) all_gather: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclComm_t,
        *mut c_void,
    ) -> ncclResult_t,
    pub(super) broadcast: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        c_int,
        ncclComm_t,
        *mut c_void,
    ) -> ncclResult_t,
    /// `None` before NCCL 2.18.
    pub(super) comm_split: Option<CommSplit>,
    group_start: unsafe extern "C" fn() -> ncclResult_t,
    group_end: unsafe extern "C" fn() -> ncclResult_t,
    pub(super) comm_get_async_error: unsafe extern "C" fn(ncclComm_t, *mut ncclResult_t) -> ncclResult_t,
    pub(super) comm_finalize: unsafe extern "C" fn(ncclComm_t) -> ncclResult_t,
    pub(super) comm_destroy: unsafe extern "C" fn(ncclComm_t) -> ncclResult_t,
    pub(super) comm_abort: unsafe extern "C" fn(ncclComm_t) -> ncclResult_t,
    /// `None` before NCCL 2.27. All ranks of a communicator have the same version, which NCCL enforces.
    pub(super) windows: Option<WindowCalls>,
    get_error_string: unsafe extern "C" fn(ncclResult_t) -> *const c_char,
    get_last_error: unsafe extern "C" fn(ncclComm_t) -> *const c_char,
    /// Keeps the functions above mapped.
    _library: libloading::Library,
}

/// `ncclCommSplit`: communicator, color, key, new communicator, and settings (`ncclConfig_t`; null for the defaults).
pub(super) type CommSplit =
    unsafe extern "C" fn(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut c_void) -> ncclResult_t;

/// The functions that register and deregister windows.
pub(super) struct WindowCalls {
    pub(super) register:
        unsafe extern "C" fn(ncclComm_t, *mut c_void, usize, *mut ncclWindow_t, c_int) -> ncclResult_t,
    pub(super) deregister: unsafe extern "C" fn(ncclComm_t, ncclWindow_t) -> ncclResult_t,
}

impl WindowCalls {
    fn find(library: &libloading::Library) -> Option<Self> {
        // SAFETY: the type of the field is the declaration in `nccl.h`.
        let register = *unsafe { library.get(b"ncclCommWindowRegister\0") }.ok()?;
        // SAFETY: as above.
        let deregister = *unsafe { library.get(b"ncclCommWindowDeregister\0") }.ok()?;
        Some(Self { register, deregister })
    }
}

impl Library {
    /// Returns the library, which is loaded once per process.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self> {
        let path = std::env::var(PATH_VARIABLE).ok();
        // A file that was selected is not replaced by another one.
        match path.as_deref() {
            Some(path) => Self::open([path].into_iter()),
            None => Self::open(NAMES.into_iter()),
        }
    }

    /// Loads the first of these names that exists.
    fn open<'a>(names: impl Iterator<Item = &'a str>) -> Result<Self> {
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: NCCL's initialisers have no preconditions. The operator vouches that a file of this name is NCCL.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Self::resolve(library, name),
                Err(error) => tried.push(format!("{name} ({error})")),
            }
        }
        Err(CommError::Library {
            looked_for: format!("{}; see `xlaunch env`, or set {PATH_VARIABLE}", tried.join(", ")),
        })
    }

    fn resolve(library: libloading::Library, name: &str) -> Result<Self> {
        macro_rules! function {
            ($symbol:literal) => {
                // SAFETY: the type of the field is the declaration in `nccl.h`, stable since NCCL 2.14.
                *unsafe { library.get($symbol) }.map_err(|error| CommError::Library {
                    looked_for: format!("{name}, which is too old: {error}"),
                })?
            };
        }
        Ok(Self {
            get_unique_id: function!(b"ncclGetUniqueId\0"),
            comm_init_rank: function!(b"ncclCommInitRank\0"),
            all_reduce: function!(b"ncclAllReduce\0"),
            reduce_scatter: function!(b"ncclReduceScatter\0"),
            reduce: function!(b"ncclReduce\0"),
            all_gather: function!(b"ncclAllGather\0"),
            broadcast: function!(b"ncclBroadcast\0"),
            // SAFETY: the type is the declaration in `nccl.h`.
            comm_split: unsafe { library.get::<CommSplit>(b"ncclCommSplit\0") }.ok().map(|symbol| *symbol),
            group_start: function!(b"ncclGroupStart\0"),
            group_end: function!(b"ncclGroupEnd\0"),
            comm_get_async_error: function!(b"ncclCommGetAsyncError\0"),
            comm_finalize: function!(b"ncclCommFinalize\0"),
            comm_destroy: function!(b"ncclCommDestroy\0"),
            comm_abort: function!(b"ncclCommAbort\0"),
            windows: WindowCalls::find(&library),
            get_error_string: function!(b"ncclGetErrorString\0"),
            get_last_error: function!(b"ncclGetLastError\0"),
            _library: library,
        })
    }

    /// Makes these calls as one operation with a single kernel. Returns the first failure.
    pub(super) fn group(&self, mut calls: impl ExactSizeIterator<Item = ncclResult_t>) -> ncclResult_t {
        if calls.len() < 2 {
            return calls.next().unwrap_or(ncclResult_t::ncclSuccess);
        }
        // SAFETY: the function has no preconditions.
        let started = unsafe { (self.group_start)() };
        if has_failed(started) {
            return started;
        }
        let failed = calls.find(|result| has_failed(*result));
        // SAFETY: a group was started. It is ended after a failure as well: otherwise it would include all later calls.
        let ended = unsafe { (self.group_end)() };
        failed.unwrap_or(ended)
    }

    /// Converts a failure to an error with NCCL's texts.
    pub(super) fn check(&self, what: &'static str, result: ncclResult_t) -> Result<()> {
        if !has_failed(result) {
            return Ok(());
        }
        // SAFETY: the function returns a static string for any value.
        let text = unsafe { text_at((self.get_error_string)(result)) };
        // SAFETY: the function ignores its argument, and returns a buffer of the library that always ends with 0.
        let details = unsafe { text_at((self.get_last_error)(std::ptr::null_mut())) };
        Err(error(what, result, &text, &details))
    }
}

pub(super) fn has_failed(result: ncclResult_t) -> bool {
    !matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress)
}

/// Copies a C string that lives as long as the library; returns an empty string for null.
///
/// # Safety
/// `text` is null or such a string.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the error for a result, with NCCL's text for it and the last warning of NCCL in this process, which may be
/// empty. If a CUDA call of NCCL failed, the fault is with this rank's GPU; no peer was lost.
fn error(what: &'static str, result: ncclResult_t, text: &str, details: &str) -> CommError {
    let text = if text.is_empty() { format!("error {}", result as u32) } else { text.to_owned() };
    let reason = match details.lines().next().map(str::trim) {
        None | Some("") => text,
        Some(details) => format!("{text}: {details}"),
    };
    match result {
        ncclResult_t::ncclUnhandledCudaError => CommError::Cuda { what, reason },
        _ => CommError::Nccl { what, reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_without_window_functions_has_no_windows() {
        // This test program lacks both functions, as NCCL before 2.27 does.
        let program = libloading::Library::from(libloading::os::unix::Library::this());
        assert!(WindowCalls::find(&program).is_none());
    }

    #[test]
    fn failed_cuda_call_of_nccl_is_a_fault_of_the_gpu() {
        let what = "a collective failed";
        let text = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
        let details = "Cuda failure 700 'an illegal memory access was encountered'\n";
        let cuda = error(what, ncclResult_t::ncclUnhandledCudaError, text, details);
        assert!(matches!(cuda, CommError::Cuda { .. }), "{cuda:?}");
        let expected = format!("{what}: CUDA says {text}: {}", details.trim());
        assert_eq!(cuda.to_string(), expected);
        let lost = error(what, ncclResult_t::ncclRemoteError, "remote process exited", "");
        assert!(matches!(lost, CommError::Nccl { .. }), "{lost:?}");
        assert_eq!(lost.to_string(), format!("{what}: NCCL says remote process exited"));
        let unknown = error(what, ncclResult_t::ncclSystemError, "", "");
        assert_eq!(unknown.to_string(), format!("{what}: NCCL says error 2"));
    }

    #[test]
    fn missing_library_is_an_error_that_lists_what_was_tried() {
        let names = ["/nowhere/libnccl.so.2", "libnccl-missing.so"];
        let text = Library::open(names.into_iter()).err().unwrap().to_string();
        assert!(names.iter().all(|name| text.contains(name)) && text.contains(PATH_VARIABLE), "{text}");
    }
}
