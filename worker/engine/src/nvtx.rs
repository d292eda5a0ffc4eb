//! Named ranges of a thread for an attached profiler, through NVTX.
//!
//! Nsight Systems and other profilers set `NVTX_INJECTION64_PATH` to the library that receives ranges; without it
//! nothing is loaded. NVTX itself consists of C headers; CUDA's `libnvtx3interop.so` exports the functions that they
//! define.

use std::ffi::{CString, c_char, c_int};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Variable set by an attached profiler.
const ATTACHED: &str = "NVTX_INJECTION64_PATH";
const LIBRARIES: [&str; 2] = ["libnvtx3interop.so.1", "libnvtx3interop.so"];

struct Functions {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
}

/// Ends its range when dropped.
#[derive(Debug)]
#[must_use = "the range ends when this is dropped"]
pub struct Range {
    /// Makes the type `!Send`: a range must end on the thread on which it began.
    thread: PhantomData<*const ()>,
}

/// Begins a range on this thread; `None` if no profiler is attached or the library is missing.
pub fn range(name: &str) -> Option<Range> {
    let functions = functions()?;
    let name = CString::new(name).ok()?;
    // SAFETY: the text ends with a zero byte and is copied by the call.
    unsafe { (functions.push)(name.as_ptr()) };
    Some(Range { thread: PhantomData })
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(functions) = functions() {
            // SAFETY: no preconditions; ranges of a thread are nested, as guards are.
            unsafe { (functions.pop)() };
        }
    }
}

fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| std::env::var_os(ATTACHED).and_then(|_| load())).as_ref()
}

fn load() -> Option<Functions> {
    // SAFETY: the library's initialisers have no preconditions.
    let library = LIBRARIES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok())?;
    // SAFETY: NVTX declares the function with this type.
    let push = *unsafe { library.get(b"nvtxRangePushA\0") }.ok()?;
    // SAFETY: as above.
    let pop = *unsafe { library.get(b"nvtxRangePop\0") }.ok()?;
    // Never unloaded: the functions are used until the process ends.
    std::mem::forget(library);
    Some(Functions { push, pop })
}
