//! Element types of training buffers.

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// bfloat16: the upper half of an F32, with 8 exponent and 7 mantissa bits.
    Bf16,
    /// 8-bit floating point with 4 exponent and 3 mantissa bits, largest number 448.
    Fp8E4m3,
    /// 8-bit floating point with 5 exponent and 2 mantissa bits, largest number 57,344.
    Fp8E5m2,
    /// 32-bit signed integers, such as token ids.
    I32,
    /// Bytes.
    U8,
}

impl DType {
    /// Returns the size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::U8 => 1,
        }
    }

    /// Returns the short name, as used in kernel names and configuration files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::I32 => "i32",
            Self::U8 => "u8",
        }
    }
}
