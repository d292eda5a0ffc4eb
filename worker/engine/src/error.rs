//! Errors of the engine.

use cudarc::driver::DriverError;
use xlaunch_pool::PoolError;

/// Result of an engine call.
pub type Result<T> = std::result::Result<T, EngineError>;

/// Reason why an engine call failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A shared library is missing.
    #[error("failed to load {library}: looked for {looked_for}")]
    Library {
        /// Name, such as "the CUDA driver".
        library: &'static str,
        /// File names and directories that were tried.
        looked_for: String,
    },
    /// The device does not exist or cannot be opened.
    #[error("failed to open GPU {ordinal}: {reason}")]
    Device {
        /// Number of the device within this process.
        ordinal: usize,
        /// The driver's message.
        reason: String,
    },
    /// A kernel file did not compile.
    #[error("failed to compile {file} for {arch}: {log}")]
    Compile {
        /// Path of the source below `src/ops`.
        file: &'static str,
        /// Architecture, such as `sm_90`.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// The device or one of its libraries reported an error. The context may be unusable afterwards.
    #[error("{what}: {reason}")]
    Cuda {
        /// The failed operation, such as "failed to launch norm_fwd".
        what: String,
        /// The library's message.
        reason: String,
    },
    /// The pool could not allocate memory.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl EngineError {
    /// Reports a kernel that is in no loaded file: a mistake in a list of kernels.
    pub(crate) fn no_kernel(name: &str) -> Self {
        Self::Cuda { what: format!("failed to find kernel {name}"), reason: "no file has it".into() }
    }
}

/// The error of a call of the driver. `what` says what failed.
pub(crate) fn driver_error(what: impl Into<String>, error: DriverError) -> EngineError {
    EngineError::Cuda { what: what.into(), reason: driver_message(error) }
}

/// Formats the driver's message and name of an error.
pub(crate) fn driver_message(error: DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    format!("{} ({:?})", text.unwrap_or_else(|_| "unknown error".into()), error.0)
}
