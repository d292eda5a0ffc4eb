//! The checksum on threads.

use rayon::prelude::*;

use super::{CHECKSUM_DIGITS, Checksum, words};
use crate::cpu::{Access, Threads};

/// Words per task.
const CHECKSUM_BLOCK: usize = 1 << 14;
/// 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[expect(clippy::cast_possible_truncation, reason = "16 bits remain")]
pub(crate) fn run(t: &Threads, args: Checksum<'_>) {
    let a = Access::new("checksum");
    words(args.x);
    let (bytes, out) = (a.read_bytes(args.x), a.write(args.out, CHECKSUM_DIGITS));
    let sum = t.run(|| {
        let blocks = bytes.par_chunks(4 * CHECKSUM_BLOCK).enumerate();
        blocks.map(|(block, bytes)| block_sum(block * CHECKSUM_BLOCK, bytes)).reduce(|| 0, u64::wrapping_add)
    });
    for (digit, out) in out.iter_mut().enumerate() {
        *out = f32::from((sum >> (16 * digit)) as u16);
    }
}

/// Computes the sum over these words; the first one has index `first`.
fn block_sum(first: usize, bytes: &[u8]) -> u64 {
    let words = bytes.as_chunks::<4>().0.iter().map(|word| u64::from(u32::from_ne_bytes(*word)));
    let indexed = words.zip(first as u64..);
    indexed.fold(0, |sum, (word, i)| sum.wrapping_add(mix(word ^ i.wrapping_mul(GOLDEN))))
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
