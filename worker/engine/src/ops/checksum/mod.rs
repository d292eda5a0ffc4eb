//! A checksum of the bits of a tensor, to compare copies of it on several devices.
//!
//! `checksum = sum over i of mix(words[i] ^ i GOLDEN) mod 2^64`, with the memory read as 32-bit words, and mix and
//! GOLDEN of SplitMix64 (Steele et al., 2014). The sum does not depend on the order of its terms, so the result is the
//! same for every number of threads and on every device. mix is a bijection, so a change of a single word always
//! changes the sum.

pub(crate) mod cpu;
pub(crate) mod cuda;

use super::{Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// `out = checksum(x)`.
#[derive(Clone, Copy, Debug)]
pub struct Checksum<'a> {
    /// (len,) F32 or Bf16, a multiple of 4 bytes.
    pub x: Slice<'a>,
    /// ([`CHECKSUM_DIGITS`],) F32: the digits of the checksum in base 2^16, from the lowest, which F32 holds exactly.
    pub out: Slice<'a>,
}

impl Op for Checksum<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::run(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::run(gpu, self)
    }
}

/// Digits of a checksum.
pub const CHECKSUM_DIGITS: usize = 4;

/// Returns the number of 32-bit words.
fn words(x: Slice<'_>) -> usize {
    let bytes = x.len() * x.dtype().size();
    assert!(bytes.is_multiple_of(4), "checksum: {x:?}");
    bytes / 4
}
