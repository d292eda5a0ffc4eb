//! The element types that training buffers hold.

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// The upper half of a single: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// Token ids.
    I32,
    /// Bytes.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }

    /// Short name, as in kernels and configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "fp32",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::U8 => "u8",
        }
    }
}
