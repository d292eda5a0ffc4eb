//! The handle to the back end, through which everything long-lived is allocated.

use std::fmt;
use std::ops::Deref;
use std::rc::Rc;

use xlaunch_engine::{Backend, DType, Result, Tensor};

/// Handle to the back end, shared by all parts of one worker.
#[derive(Clone)]
pub struct BackendHandle {
    backend: Rc<Backend>,
    windows: bool,
}

impl BackendHandle {
    /// Creates the first handle to `backend`.
    pub fn new(backend: Backend) -> Self {
        Self { backend: Rc::new(backend), windows: false }
    }

    /// Sets whether tensors for collectives should become NCCL windows: see [`crate::nccl_windows`]. Default: false.
    #[must_use]
    pub fn with_windows(mut self, windows: bool) -> Self {
        self.windows = windows;
        self
    }

    /// Returns whether tensors of [`alloc_collective`](Self::alloc_collective) should be registered as windows.
    pub fn has_windows(&self) -> bool {
        self.windows
    }

    /// Allocates a long-lived tensor with unspecified contents. The pool keeps it apart from short-lived ones.
    #[track_caller]
    pub fn alloc_persistent(&self, dtype: DType, len: usize) -> Result<Tensor> {
        Tensor::new(&self.pool().persistent(), dtype, len)
    }

    /// Allocates a long-lived tensor for collectives, with unspecified contents. With windows, it is placed in a
    /// segment that can be registered.
    #[track_caller]
    pub fn alloc_collective(&self, dtype: DType, len: usize) -> Result<Tensor> {
        if self.windows {
            Tensor::new(&self.pool().registered(), dtype, len)
        } else {
            self.alloc_persistent(dtype, len)
        }
    }
}

impl fmt::Debug for BackendHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BackendHandle({})", self.backend.device().name)
    }
}

impl Deref for BackendHandle {
    type Target = Backend;

    fn deref(&self) -> &Self::Target {
        &self.backend
    }
}
