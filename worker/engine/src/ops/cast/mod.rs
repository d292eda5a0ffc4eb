//! `y = x`, converting between F32 and Bf16 (round to nearest even), or copying if both have the same element type.

pub(crate) mod cpu;
pub(crate) mod cuda;
