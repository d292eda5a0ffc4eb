//! Weights in MXFP4 (Open Compute Project, Microscaling Formats, 2023), as in the published files of gpt-oss. Pure.
//!
//! Each block of 32 values of a row has a scale, a power of two. Values are 4-bit floating-point numbers with 2 bits of
//! exponent and 1 of mantissa; of the two in a byte, the first has the lower bits.

use std::ops::Range;

/// Ends of the names of the two tensors in place of one: blocks, and their scales.
pub(super) const ENDINGS: [&str; 2] = ["_blocks", "_scales"];

/// Values of a block, and its bytes.
const MXFP4_BLOCK: usize = 32;
const MXFP4_BYTES: usize = MXFP4_BLOCK / 2;

/// Values of the numbers without a sign, which is the highest of the four bits.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Number by which the bits of a scale exceed its exponent.
const SCALE_BIAS: i32 = 127;

/// Returns the shapes of both tensors for one of this shape, whose rows consist of whole blocks.
pub(super) fn shapes(shape: &[usize]) -> [Vec<usize>; 2] {
    let (cols, outer) = shape.split_last().map_or((0, shape), |(cols, outer)| (*cols, outer));
    // A row that ends within a block has no such shape.
    let blocks = if cols.is_multiple_of(MXFP4_BLOCK) { cols / MXFP4_BLOCK } else { 0 };
    let scales = [outer, &[blocks]].concat();
    [[&scales[..], &[MXFP4_BYTES]].concat(), scales]
}

/// Returns the bytes of whole blocks of values.
pub(super) fn bytes_of_blocks(values: &Range<usize>) -> Range<usize> {
    values.start / 2..values.end / 2
}

/// Returns the bytes of the scales of whole blocks of values.
pub(super) fn bytes_of_scales(values: &Range<usize>) -> Range<usize> {
    values.start / MXFP4_BLOCK..values.end / MXFP4_BLOCK
}

/// Decodes whole blocks with their scales.
pub(super) fn decode(blocks: &[u8], scales: &[u8]) -> Vec<f32> {
    let value = |bits: u8, scale: f32| {
        let magnitude = MAGNITUDES[usize::from(bits & 7)] * scale;
        if bits & 8 == 0 { magnitude } else { -magnitude }
    };
    let block = |(block, scale): (&[u8], &u8)| {
        let scale = 2.0_f32.powi(i32::from(*scale) - SCALE_BIAS);
        block.iter().flat_map(|byte| [value(byte & 15, scale), value(byte >> 4, scale)]).collect::<Vec<_>>()
    };
    blocks.chunks_exact(MXFP4_BYTES).zip(scales).flat_map(block).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `convert_moe_packed_tensors` of transformers 5.24 returns these; `tests/peers/model_families.py` compares more.
    #[test]
    fn blocks_have_the_values_of_their_codes_times_a_power_of_two() {
        let codes: Vec<u8> = (0..8).map(|code| 16 * (2 * code + 1) + 2 * code).chain([0; 8]).collect();
        let positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let of_codes =
            |scale: f32| positive.map(|x| x * scale).into_iter().chain(positive.map(|x| -x * scale));
        let zeros = [0.0; 16];
        for (bits, scale) in [(127, 1.0), (128, 2.0), (120, 1.0 / 128.0), (1, f32::MIN_POSITIVE)] {
            let found = decode(&[&codes[..], &codes].concat(), &[bits, 127]);
            let expected: Vec<f32> = of_codes(scale).chain(zeros).chain(of_codes(1.0)).chain(zeros).collect();
            assert_eq!(found, expected, "{bits}");
        }
        // The largest scale stands for no number.
        assert!(decode(&codes, &[255]).iter().any(|value| !value.is_finite()));
    }

    #[test]
    fn rows_consist_of_whole_blocks() {
        assert_eq!(shapes(&[4, 6, 64]), [vec![4, 6, 2, 16], vec![4, 6, 2]]);
        assert_eq!(shapes(&[4, 6, 80])[1], [4, 6, 0]);
        assert_eq!((bytes_of_blocks(&(64..96)), bytes_of_scales(&(64..96))), (32..48, 2..3));
    }
}
