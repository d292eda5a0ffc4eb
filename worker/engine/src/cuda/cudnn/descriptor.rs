//! One object of cuDNN's backend API, and what the library says when it refuses.
//!
//! Everything in that API is a descriptor: made of a kind, given attributes, made final, destroyed. Attributes and their
//! types are listed in the documentation of the cuDNN graph library.

use std::ffi::{CStr, c_char, c_void};

use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Attribute, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptor_t, cudnnBackendDescriptorType_t as Kind, cudnnStatus_t as Status,
};

/// Why the library did not do something: a shape or a device that it has no kernel for, mostly.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{call}: {reason}")]
pub(super) struct Refusal {
    call: &'static str,
    reason: String,
}

impl Refusal {
    pub(super) fn new(call: &'static str, reason: impl Into<String>) -> Self {
        Self { call, reason: reason.into() }
    }

    /// An error of the call just made, in the library's own words.
    pub(super) fn check(call: &'static str, status: Status) -> Result<(), Self> {
        if status == Status::CUDNN_STATUS_SUCCESS {
            return Ok(());
        }
        let mut message = [0_u8; 512];
        // SAFETY: the library writes a string of at most so many bytes, its end included.
        let text = unsafe {
            sys::cudnnGetLastErrorString(message.as_mut_ptr().cast::<c_char>(), message.len());
            CStr::from_bytes_until_nul(&message)
        };
        let text = text.unwrap_or_default().to_string_lossy();
        Err(Self::new(call, format!("{status:?} {}", text.split_whitespace().collect::<Vec<_>>().join(" "))))
    }
}

/// A type of values that attributes have.
///
/// # Safety
/// `TYPE` stands for values that are laid out as `Self`.
pub(super) unsafe trait Value {
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

/// A descriptor, laid out as the library's own pointer to it, so that a slice of these is an array of those.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct Descriptor(cudnnBackendDescriptor_t);

impl Descriptor {
    pub(super) fn new(kind: Kind) -> Result<Self, Refusal> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library writes the new descriptor.
        Refusal::check("cudnnBackendCreateDescriptor", unsafe {
            sys::cudnnBackendCreateDescriptor(kind, &raw mut raw)
        })?;
        Ok(Self(raw))
    }

    /// The library copies the values; a descriptor among them has to outlive this one.
    pub(super) fn set<T: Value>(&self, attribute: Attribute, values: &[T]) -> Result<(), Refusal> {
        // SAFETY: this descriptor is alive; there are so many values, laid out as the type says. The library checks that
        // the attribute is one of that type.
        let status = unsafe {
            sys::cudnnBackendSetAttribute(
                self.0,
                attribute,
                T::TYPE,
                values.len() as i64,
                values.as_ptr().cast::<c_void>(),
            )
        };
        Refusal::check("cudnnBackendSetAttribute", status)
    }

    /// No attribute can be set from here on; those set are checked together.
    pub(super) fn finalize(self) -> Result<Self, Refusal> {
        // SAFETY: this descriptor is alive.
        Refusal::check("cudnnBackendFinalize", unsafe { sys::cudnnBackendFinalize(self.0) })?;
        Ok(self)
    }

    /// Reads at most so many values of an attribute, and says how many were read; for none, how many there are.
    pub(super) fn get<T: Value>(&self, attribute: Attribute, values: &mut [T]) -> Result<usize, Refusal> {
        let mut count = 0;
        let array = if values.is_empty() { std::ptr::null_mut() } else { values.as_mut_ptr() };
        // SAFETY: as for `set`; the library writes at most so many values.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                self.0,
                attribute,
                T::TYPE,
                values.len() as i64,
                &raw mut count,
                array.cast::<c_void>(),
            )
        };
        Refusal::check("cudnnBackendGetAttribute", status)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The library's own pointer.
    pub(super) fn raw(&self) -> cudnnBackendDescriptor_t {
        self.0
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed nowhere else. A failure leaves nothing to be done.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}
