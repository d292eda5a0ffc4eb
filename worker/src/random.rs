//! Seeded random numbers: the same on every device, rank and platform.

use xlaunch_spec::ids::Digest;

/// SplitMix64's increment between states: 2^64 divided by the golden ratio.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of random 64-bit numbers: SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Creates the stream of this seed and purpose. Streams of different purposes are independent.
    pub(crate) fn new(seed: u64, purpose: &str) -> Self {
        let digest = Digest::of(&[&seed.to_le_bytes(), purpose.as_bytes()].concat());
        Self(digest.0.iter().take(8).fold(0, |state, byte| state << 8 | u64::from(*byte)))
    }

    /// Skips `count` numbers in constant time.
    pub(crate) fn skip(&mut self, count: u64) {
        self.0 = self.0.wrapping_add(INCREMENT.wrapping_mul(count));
    }

    /// Returns the next number.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(INCREMENT);
        mix(self.0)
    }

    /// Returns a number uniformly distributed in (0, 1].
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// SplitMix64's output function: a bijection that scatters neighbouring numbers.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
