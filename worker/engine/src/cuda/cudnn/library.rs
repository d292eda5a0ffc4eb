//! cuDNN's functions, loaded on first use. A missing library or function is an error, never a panic or abort.
//!
//! The versioned name is tried first: among several installations it selects the one whose other files have versioned
//! names as well.

use std::ffi::{c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendAttributeType_t as Type, cudnnBackendDescriptor_t,
    cudnnBackendDescriptorType_t as Kind, cudnnHandle_t,
};

/// Names under which packages, distributions and Python wheels install cuDNN.
const NAMES: [&str; 2] = ["libcudnn.so.9", "libcudnn.so"];
/// The file to which `libcudnn.so.9` forwards calls. If it is missing, cuDNN aborts the process at the first call, so
/// its presence is checked.
const GRAPH: &str = "libcudnn_graph.so.9";
/// Files that the library loads when it builds a plan for attention.
const ENGINES: [&str; 3] = [
    "libcudnn_heuristic.so.9",
    "libcudnn_engines_precompiled.so.9",
    "libcudnn_engines_runtime_compiled.so.9",
];
/// Environment variable with the path of the file to load. The agent sets it.
const PATH_VARIABLE: &str = "XLAUNCH_CUDNN";

/// `cudnnStatus_t` as an integer: newer versions have values that the binding's enum lacks.
pub(crate) type Status = i32;
pub(crate) const SUCCESS: Status = 0;

/// The functions in use, declared as in `cudnn_graph.h`; streams are `cudaStream_t`.
pub(crate) struct Library {
    pub(crate) version: unsafe extern "C" fn() -> usize,
    pub(crate) last_error: unsafe extern "C" fn(*mut c_char, usize),
    pub(crate) create: unsafe extern "C" fn(*mut cudnnHandle_t) -> Status,
    pub(crate) destroy: unsafe extern "C" fn(cudnnHandle_t) -> Status,
    pub(crate) set_stream: unsafe extern "C" fn(cudnnHandle_t, *mut c_void) -> Status,
    pub(crate) create_descriptor: unsafe extern "C" fn(Kind, *mut cudnnBackendDescriptor_t) -> Status,
    pub(crate) destroy_descriptor: unsafe extern "C" fn(cudnnBackendDescriptor_t) -> Status,
    pub(crate) set_attribute:
        unsafe extern "C" fn(cudnnBackendDescriptor_t, Attribute, Type, i64, *const c_void) -> Status,
    pub(crate) get_attribute:
        unsafe extern "C" fn(cudnnBackendDescriptor_t, Attribute, Type, i64, *mut i64, *mut c_void) -> Status,
    pub(crate) finalize: unsafe extern "C" fn(cudnnBackendDescriptor_t) -> Status,
    pub(crate) execute:
        unsafe extern "C" fn(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) -> Status,
    /// Path from which the library was loaded.
    pub(crate) path: PathBuf,
    /// Keep the functions above loaded.
    _files: [libloading::Library; 2],
}

/// Loads the library, and the files that it would load when it builds its first plan.
pub(crate) fn load_all() {
    let Ok(library) = Library::get() else { return };
    for file in ENGINES {
        // SAFETY: cuDNN's initialisers have no preconditions; the operator answers for files of these names.
        if let Ok(engine) = unsafe { libloading::Library::new(library.path.with_file_name(file)) } {
            // The library stays loaded until the process ends.
            std::mem::forget(engine);
        }
    }
}

impl Library {
    /// Returns the library, which is loaded once per process, or the reason why it could not be loaded.
    pub(crate) fn get() -> Result<&'static Self, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, String> {
        let custom = std::env::var(PATH_VARIABLE).ok();
        let mut tried = Vec::new();
        // A file that was selected is not replaced by another one.
        let names = custom.as_deref().map_or(NAMES.to_vec(), |path| vec![path]);
        for name in names {
            let beside = Path::new(name).with_file_name(GRAPH);
            // SAFETY: cuDNN's initialisers have no preconditions; the operator answers for files of these names.
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
            "cuDNN is not fully installed: looked for {}; see `xlaunch env`, or set {PATH_VARIABLE}",
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
            path: name.into(),
            _files: files,
        })
    }
}
