//! Objects of cuDNN's backend API, and the library's errors.
//!
//! Everything in that API is a descriptor: created with a type, given attributes, finalised, destroyed. Attributes and
//! their types are listed in the documentation of the cuDNN graph library.

use std::ffi::{CStr, c_char, c_void};

use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Attribute, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptor_t, cudnnBackendDescriptorType_t as Kind,
};

use super::library::{Library, SUCCESS, Status};

/// An error of the library. In most cases it has no kernel for a shape or a device.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{call}: {reason}")]
pub(crate) struct CudnnError {
    call: &'static str,
    reason: String,
}

impl CudnnError {
    pub(crate) fn new(call: &'static str, reason: impl Into<String>) -> Self {
        Self { call, reason: reason.into() }
    }

    /// Turns the status of the latest call into an error with the library's message.
    pub(crate) fn check(call: &'static str, status: Status) -> Result<(), Self> {
        if status == SUCCESS {
            return Ok(());
        }
        let mut message = [0_u8; 512];
        // SAFETY: the library writes a string of at most `message.len()` bytes, including its end.
        unsafe { (library()?.last_error)(message.as_mut_ptr().cast::<c_char>(), message.len()) };
        let text = CStr::from_bytes_until_nul(&message).unwrap_or_default().to_string_lossy();
        let words: Vec<&str> = text.split_whitespace().collect();
        Err(Self::new(call, format!("status {status}: {}", words.join(" "))))
    }
}

/// Returns the library. Opening a [`Cudnn`](super::Cudnn) has shown that it is installed.
pub(crate) fn library() -> Result<&'static Library, CudnnError> {
    Library::get().map_err(|reason| CudnnError::new("dlopen", reason))
}

/// A type of attribute values.
///
/// # Safety
/// Values of `TYPE` have the layout of `Self`.
pub(crate) unsafe trait Value {
    const TYPE: Type;
}

macro_rules! values {
    ($($value:ty => $kind:ident),* $(,)?) => {
        // SAFETY: the header describes each attribute type as values of this C type.
        $(unsafe impl Value for $value { const TYPE: Type = Type::$kind; })*
    };
}

values! {
    i64 => CUDNN_TYPE_INT64,
    f32 => CUDNN_TYPE_FLOAT,
    bool => CUDNN_TYPE_BOOLEAN,
    u8 => CUDNN_TYPE_CHAR,
    *mut c_void => CUDNN_TYPE_VOID_PTR,
    Descriptor => CUDNN_TYPE_BACKEND_DESCRIPTOR,
    sys::cudnnHandle_t => CUDNN_TYPE_HANDLE,
    sys::cudnnDataType_t => CUDNN_TYPE_DATA_TYPE,
    sys::cudnnPointwiseMode_t => CUDNN_TYPE_POINTWISE_MODE,
    sys::cudnnReduceTensorOp_t => CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
    sys::cudnnBackendHeurMode_t => CUDNN_TYPE_HEUR_MODE,
}

/// A descriptor. It has the same layout as the library's own pointer, so that a slice of descriptors is an array of
/// pointers.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Descriptor(cudnnBackendDescriptor_t);

// SAFETY: a descriptor is an object in host memory that the library lets any one thread at a time use.
unsafe impl Send for Descriptor {}

impl Descriptor {
    pub(crate) fn new(kind: Kind) -> Result<Self, CudnnError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library writes the new descriptor.
        CudnnError::check("cudnnBackendCreateDescriptor", unsafe {
            (library()?.create_descriptor)(kind, &raw mut raw)
        })?;
        Ok(Self(raw))
    }

    /// Sets an attribute. The library copies the values but keeps references, so a descriptor among them must outlive
    /// this one.
    pub(crate) fn set<T: Value>(&self, attribute: Attribute, values: &[T]) -> Result<(), CudnnError> {
        // SAFETY: this descriptor is alive; the array has `values.len()` values, laid out as the type says. The library
        // checks that the attribute has that type.
        let status = unsafe {
            (library()?.set_attribute)(
                self.0,
                attribute,
                T::TYPE,
                values.len() as i64,
                values.as_ptr().cast::<c_void>(),
            )
        };
        CudnnError::check("cudnnBackendSetAttribute", status)
    }

    /// Checks all attributes together. No attribute can be set afterwards.
    pub(crate) fn finalize(self) -> Result<Self, CudnnError> {
        // SAFETY: this descriptor is alive.
        CudnnError::check("cudnnBackendFinalize", unsafe { (library()?.finalize)(self.0) })?;
        Ok(self)
    }

    /// Reads at most `values.len()` values of an attribute and returns their number; for an empty slice, returns the
    /// number of existing values.
    pub(crate) fn get<T: Value>(&self, attribute: Attribute, values: &mut [T]) -> Result<usize, CudnnError> {
        let mut count = 0;
        let array = if values.is_empty() { std::ptr::null_mut() } else { values.as_mut_ptr() };
        // SAFETY: as for `set`; the library writes at most `values.len()` values.
        let status = unsafe {
            (library()?.get_attribute)(
                self.0,
                attribute,
                T::TYPE,
                values.len() as i64,
                &raw mut count,
                array.cast::<c_void>(),
            )
        };
        CudnnError::check("cudnnBackendGetAttribute", status)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns the library's own pointer.
    pub(crate) fn raw(&self) -> cudnnBackendDescriptor_t {
        self.0
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if let Ok(library) = library() {
            // SAFETY: created by the library and destroyed only here. A failure cannot be handled.
            unsafe { (library.destroy_descriptor)(self.0) };
        }
    }
}
