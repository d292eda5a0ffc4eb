//! cuDNN's functions, loaded when a back end first wants them. No absence of a library or function panics or aborts.
//!
//! The name with the version comes first: of several installations, the one whose other files are found under that name too.

use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::OnceLock;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendAttributeType_t as Type, cudnnBackendDescriptor_t,
    cudnnBackendDescriptorType_t as Kind, cudnnHandle_t,
};

/// Names under which packages, distributions and Python wheels install cuDNN.
const NAMES: [&str; 2] = ["libcudnn.so.9", "libcudnn.so"];
/// The file that the first only passes calls on to; the process ends at the first call where it is missing.
const GRAPH: &str = "libcudnn_graph.so.9";
/// A path that comes first.
const PATH_VARIABLE: &str = "XLAUNCH_CUDNN";

/// `cudnnStatus_t`, of which newer versions know more values.
pub(super) type Status = i32;
pub(super) const SUCCESS: Status = 0;

/// The functions in use, as `cudnn_graph.h` declares them; streams are `cudaStream_t`.
pub(super) struct Library {
    pub(super) version: unsafe extern "C" fn() -> usize,
    pub(super) last_error: unsafe extern "C" fn(*mut c_char, usize),
    pub(super) create: unsafe extern "C" fn(*mut cudnnHandle_t) -> Status,
    pub(super) destroy: unsafe extern "C" fn(cudnnHandle_t) -> Status,
    pub(super) set_stream: unsafe extern "C" fn(cudnnHandle_t, *mut c_void) -> Status,
    pub(super) create_descriptor: unsafe extern "C" fn(Kind, *mut cudnnBackendDescriptor_t) -> Status,
    pub(super) destroy_descriptor: unsafe extern "C" fn(cudnnBackendDescriptor_t) -> Status,
    pub(super) set_attribute:
        unsafe extern "C" fn(cudnnBackendDescriptor_t, Attribute, Type, i64, *const c_void) -> Status,
    pub(super) get_attribute:
        unsafe extern "C" fn(cudnnBackendDescriptor_t, Attribute, Type, i64, *mut i64, *mut c_void) -> Status,
    pub(super) finalize: unsafe extern "C" fn(cudnnBackendDescriptor_t) -> Status,
    pub(super) execute:
        unsafe extern "C" fn(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) -> Status,
    /// Keep the functions above in memory.
    _files: [libloading::Library; 2],
}

impl Library {
    /// The library, loaded once per process, or why it is not.
    pub(super) fn get() -> Result<&'static Self, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, String> {
        let own = std::env::var(PATH_VARIABLE).ok();
        let mut tried = Vec::new();
        for name in own.iter().map(String::as_str).chain(NAMES) {
            let beside = Path::new(name).with_file_name(GRAPH);
            // SAFETY: cuDNN's initialisers have no preconditions; a file of this name that is not cuDNN is the operator's.
            let opened = unsafe {
                libloading::Library::new(name)
                    .and_then(|library| Ok([library, libloading::Library::new(&beside)?]))
            };
            match opened {
                Ok(files) => return Self::resolve(files, name),
                Err(error) => tried.push(format!("{name} ({error})")),
            }
        }
        Err(format!(
            "cuDNN is not installed in full: looked for {}; {PATH_VARIABLE} or LD_LIBRARY_PATH can say where it is",
            tried.join(", ")
        ))
    }

    fn resolve(files: [libloading::Library; 2], name: &str) -> Result<Self, String> {
        macro_rules! function {
            ($symbol:literal) => {
                // SAFETY: the type of the field is the declaration in `cudnn_graph.h`, the same since cuDNN 8.
                *unsafe { files[0].get($symbol) }.map_err(|error| format!("{name} is too old: {error}"))?
            };
        }
        Ok(Self {
            version: function!(b"cudnnGetVersion\0"),
            last_error: function!(b"cudnnGetLastErrorString\0"),
            create: function!(b"cudnnCreate\0"),
            destroy: function!(b"cudnnDestroy\0"),
            set_stream: function!(b"cudnnSetStream\0"),
            create_descriptor: function!(b"cudnnBackendCreateDescriptor\0"),
            destroy_descriptor: function!(b"cudnnBackendDestroyDescriptor\0"),
            set_attribute: function!(b"cudnnBackendSetAttribute\0"),
            get_attribute: function!(b"cudnnBackendGetAttribute\0"),
            finalize: function!(b"cudnnBackendFinalize\0"),
            execute: function!(b"cudnnBackendExecute\0"),
            _files: files,
        })
    }
}
