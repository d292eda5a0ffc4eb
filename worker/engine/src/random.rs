//! Random numbers that are the same on every machine: uniform ones by SplitMix64 (Steele, Lea and Flood, 2014), and
//! normal ones by the Box-Muller transform.
//!
//! The transform uses additions, multiplications, divisions and square roots alone, whose results IEEE 754 defines: the
//! sines and logarithms of math libraries differ in their last bits. Its loops are compiled for the available vector
//! unit, which makes a model of a billion parameters several times faster to initialise.

use std::f64::consts::{FRAC_PI_2, LN_2};

use crate::cpu::math::simd;

/// SplitMix64's increment between states: 2^64 divided by the golden ratio.
pub(crate) const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Pairs of normal numbers that are computed side by side: four AVX-512 registers.
const SIDE_BY_SIDE: usize = 32;

/// A stream of random 64-bit numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the stream that starts at this state.
    pub fn new(state: u64) -> Self {
        Self(state)
    }

    /// Skips `count` numbers in constant time.
    #[inline(always)]
    pub fn skip(&mut self, count: u64) {
        self.0 = self.0.wrapping_add(INCREMENT.wrapping_mul(count));
    }

    /// Returns the next number.
    #[inline(always)]
    pub fn bits(&mut self) -> u64 {
        self.skip(1);
        mix(self.0)
    }

    /// Returns a number uniformly distributed in (0, 1].
    #[inline(always)]
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Fills a slice with normal numbers of this deviation. The numbers 2k and 2k + 1 of the stream become the values
    /// 2k and 2k + 1, so a longer sequence may be filled in parts of even lengths.
    pub fn fill_normal(self, values: &mut [f32], deviation: f32) {
        simd!({
            let mut random = self;
            for values in values.chunks_mut(2 * SIDE_BY_SIDE) {
                let (mut cosines, mut sines) = ([0.0; SIDE_BY_SIDE], [0.0; SIDE_BY_SIDE]);
                for lane in 0..SIDE_BY_SIDE {
                    let mut random = random.clone();
                    random.skip(2 * lane as u64);
                    (cosines[lane], sines[lane]) = normal_pair(random.uniform(), random.uniform());
                }
                for (lane, pair) in values.chunks_mut(2).enumerate() {
                    for (value, normal) in pair.iter_mut().zip([cosines[lane], sines[lane]]) {
                        *value = normal * deviation;
                    }
                }
                random.skip(2 * SIDE_BY_SIDE as u64);
            }
        });
    }
}

/// SplitMix64's output function: a bijection that scatters neighbouring numbers.
#[inline(always)]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Turns two uniform numbers in (0, 1] into two normal ones.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is intended")]
fn normal_pair(first: f64, second: f64) -> (f32, f32) {
    let radius = (-2.0 * ln(first)).sqrt();
    let (sin, cos) = sin_cos_of_turns(second);
    ((radius * cos) as f32, (radius * sin) as f32)
}

/// `ln(x)` of a normal number in (0, 1], with a relative error below 1e-15.
///
/// `x = m 2^e` with `m` between `sqrt(1/2)` and `sqrt(2)`, and `ln(m) = 2 artanh(s)`, `s = (m - 1) / (m + 1)`, by its
/// series.
#[inline(always)]
fn ln(x: f64) -> f64 {
    const MANTISSA_BITS: u32 = f64::MANTISSA_DIGITS - 1;
    const BIAS: u64 = 1023;
    /// The bits of `sqrt(1/2)`.
    const LEAST: u64 = 0x3fe6_a09e_667f_3bcd;
    /// The low mantissa bits of a number from here to twice as much hold its integer part.
    const TWO_TO_52: f64 = 4_503_599_627_370_496.0;
    let biased = (x.to_bits() + ((BIAS << MANTISSA_BITS) - LEAST)) >> MANTISSA_BITS;
    let m = f64::from_bits(x.to_bits() + (BIAS << MANTISSA_BITS) - (biased << MANTISSA_BITS));
    let e = f64::from_bits(TWO_TO_52.to_bits() | biased) - (TWO_TO_52 + BIAS as f64);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let series = [19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0].iter();
    let p = series.fold(1.0 / 21.0, |p, n| p * z + 1.0 / n);
    e * LN_2 + (2.0 * s + 2.0 * s * z * p)
}

/// Returns sine and cosine of `x` turns, `x` from 0 to 1, with errors below 1e-15.
#[inline(always)]
fn sin_cos_of_turns(x: f64) -> (f64, f64) {
    /// Added to a small number, rounds it to an integer and leaves that in the low mantissa bits.
    const ROUNDING: f64 = 1.5 * 4_503_599_627_370_496.0;
    let shifted = 4.0 * x + ROUNDING;
    let quadrant = shifted.to_bits();
    let angle = (4.0 * x - (shifted - ROUNDING)) * FRAC_PI_2;
    let z = angle * angle;
    // Taylor series as products: 1 - z/(1*2) (1 - z/(3*4) (1 - ...)).
    let terms = [16.0, 14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0].iter();
    let (sin, cos) = terms.fold((1.0, 1.0), |(sin, cos), n| {
        (1.0 - sin * z * (1.0 / (n * (n + 1.0))), 1.0 - cos * z * (1.0 / (n * (n - 1.0))))
    });
    let sin = sin * angle;
    let (sin, cos) = if quadrant & 1 == 0 { (sin, cos) } else { (cos, sin) };
    // The sine is negative in quadrants 2 and 3, the cosine in quadrants 1 and 2.
    let negated_if = |bit: u64, value: f64| f64::from_bits(value.to_bits() ^ (bit << 63));
    (negated_if(quadrant >> 1 & 1, sin), negated_if((quadrant + 1) >> 1 & 1, cos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_sines_and_cosines_are_accurate() {
        let mut random = Random::new(1);
        let ends = [2f64.powi(-53), 0.5f64.sqrt(), 1.0 - 2f64.powi(-53), 1.0];
        let quadrants = (0..=8).map(|eighth| f64::from(eighth) / 8.0);
        let turns = (0..1_000_000).map(|_| random.uniform());
        for x in turns.chain(ends).chain(quadrants.skip(1)) {
            assert!((ln(x) - x.ln()).abs() <= 1e-15 * x.ln().abs(), "ln({x}) = {}", ln(x));
            let ((sin, cos), (s, c)) = (sin_cos_of_turns(x), (std::f64::consts::TAU * x).sin_cos());
            assert!((sin - s).abs() < 1e-15 && (cos - c).abs() < 1e-15, "{x}: {sin}, {cos}");
        }
    }

    /// The values of version 0.3, so that a seed keeps its weights.
    #[test]
    fn normal_numbers_stay_the_same_in_parts_and_of_any_length() {
        let mut whole = [0.0; 201];
        Random::new(1).fill_normal(&mut whole, 0.5);
        for len in [0, 1, 2, 63, 64, 65, 200] {
            let mut part = vec![0.0; len];
            Random::new(1).fill_normal(&mut part, 0.5);
            assert_eq!(part, whole[..len]);
        }
        let mut end = [0.0; 201 - 66];
        let mut random = Random::new(1);
        random.skip(66);
        random.fill_normal(&mut end, 0.5);
        assert_eq!(end, whole[66..]);
        let mut random = Random::new(1);
        for pair in whole.chunks(2) {
            let radius = (-2.0 * random.uniform().ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * random.uniform()).sin_cos();
            let expected = [(radius * cos) as f32 * 0.5, (radius * sin) as f32 * 0.5];
            assert_eq!(pair, &expected[..pair.len()]);
        }
    }
}
