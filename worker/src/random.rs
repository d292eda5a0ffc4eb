//! Seeded random numbers: the same on every device, rank and platform.

pub(crate) use xlaunch_engine::random::{Random, mix};
use xlaunch_spec::ids::Digest;

/// Returns the stream of this seed and purpose. Streams of different purposes are independent.
pub(crate) fn stream(seed: u64, purpose: &str) -> Random {
    let digest = Digest::of(&[&seed.to_le_bytes(), purpose.as_bytes()].concat());
    Random::new(digest.0.iter().take(8).fold(0, |state, byte| state << 8 | u64::from(*byte)))
}
