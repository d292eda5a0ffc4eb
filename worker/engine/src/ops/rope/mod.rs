//! Rotary position embedding (Su et al., 2021): the pair (i, i + D/2) of each query and key head is rotated by an angle
//! that grows with the position: `x' = x cos - y sin`, `y' = y cos + x sin`. Backward is the rotation in the opposite
//! direction.
//!
//! The table F32 (T, D) holds, per position, the cosines of the D/2 angles, then their sines. The rotation is part of
//! attention, not an operation of its own.

pub(crate) mod cpu;
pub(crate) mod cuda;

/// Direction of the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rotation {
    Forward,
    Back,
}

impl Rotation {
    /// Returns the factor of the sines.
    pub(crate) fn sign(self) -> f32 {
        match self {
            Self::Forward => 1.0,
            Self::Back => -1.0,
        }
    }
}
