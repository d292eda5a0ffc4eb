//! A checksum of the bits of a tensor, to compare copies of it on several devices.
//!
//! `checksum = sum over i of mix(words[i] ^ i INCREMENT) mod 2^64`, with the memory read as 32-bit words, and mix and
//! INCREMENT of SplitMix64 (Steele et al., 2014). The sum does not depend on the order of its terms, so the result is
//! the same for every number of threads and on every device. mix is a bijection, so a change of a single word always
//! changes the sum.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::{Cuda, Op};
use crate::cpu::{Access, Threads};
use crate::cuda::{BLOCK_THREADS, KernelFile, Launch, Macro, args, expect, source};
use crate::error::Result;
use crate::random::{INCREMENT, mix};
use crate::tensor::Slice;

/// Digits of a checksum.
pub const CHECKSUM_DIGITS: usize = 4;
/// Words per task on the CPU.
const CHECKSUM_BLOCK: usize = 1 << 14;
/// Most blocks of the first stage on a GPU: one partial sum per block, then their sum.
const CHECKSUM_BLOCKS: usize = 1024;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("checksum/kernel.cu"),
    kernels: &["checksum_partials", "checksum_final"],
    macros: &[Macro::int("CHECKSUM_DIGITS", CHECKSUM_DIGITS)],
    dynamic_shared: &[],
};

/// `out = checksum(x)`.
#[derive(Clone, Copy, Debug)]
pub struct Checksum<'a> {
    /// (len,) F32 or Bf16, a multiple of 4 bytes.
    pub x: Slice<'a>,
    /// ([`CHECKSUM_DIGITS`],) F32: the digits of the checksum in base 2^16, from the lowest, which F32 holds exactly.
    pub out: Slice<'a>,
}

impl Op for Checksum<'_> {
    #[expect(clippy::cast_possible_truncation, reason = "16 bits remain")]
    fn cpu(self, threads: &Threads) {
        let a = Access::new("checksum");
        words(self.x);
        let (bytes, out) = (a.read_bytes(self.x), a.write(self.out, CHECKSUM_DIGITS));
        let sum = threads.run(|| {
            let blocks = bytes.par_chunks(4 * CHECKSUM_BLOCK).enumerate();
            blocks
                .map(|(block, bytes)| block_sum(block * CHECKSUM_BLOCK, bytes))
                .reduce(|| 0, u64::wrapping_add)
        });
        for (digit, out) in out.iter_mut().enumerate() {
            *out = f32::from((sum >> (16 * digit)) as u16);
        }
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let words = words(self.x);
        expect(self.out, DType::F32, CHECKSUM_DIGITS);
        let partials = gpu.alloc(DType::U8, CHECKSUM_BLOCKS * size_of::<u64>())?;
        let launch = Launch::sharing(words, 1, CHECKSUM_BLOCKS);
        // SAFETY: x holds this number of words; there is one partial sum per block.
        unsafe { gpu.launch("checksum_partials", launch, args![self.x, partials.all(), words]) }?;
        let args = args![partials.all(), launch.grid.0, self.out];
        // SAFETY: the first stage has written as many sums; `out` was checked above.
        unsafe { gpu.launch("checksum_final", Launch::blocks(1, BLOCK_THREADS), args) }
    }
}

/// Returns the number of 32-bit words.
fn words(x: Slice<'_>) -> usize {
    let bytes = x.len() * x.dtype().size();
    assert!(bytes.is_multiple_of(4), "checksum: {x:?}");
    bytes / 4
}

/// Computes the sum over these words; the first one has index `first`.
fn block_sum(first: usize, bytes: &[u8]) -> u64 {
    let words = bytes.as_chunks::<4>().0.iter().map(|word| u64::from(u32::from_ne_bytes(*word)));
    let indexed = words.zip(first as u64..);
    indexed.fold(0, |sum, (word, i)| sum.wrapping_add(mix(word ^ i.wrapping_mul(INCREMENT))))
}
