//! The numbers of both FP8 formats, as used by the CPU.

use xlaunch_pool::DType;

/// An 8-bit floating-point format: a sign, an exponent and a mantissa.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Format {
    mantissa_bits: u32,
    bias: u32,
    pub(crate) largest: f32,
}

const E4M3: Format = Format { mantissa_bits: 3, bias: 7, largest: 448.0 };
const E5M2: Format = Format { mantissa_bits: 2, bias: 15, largest: 57_344.0 };

/// Bits of an f32's mantissa, and the bias of its exponent.
const F32_MANTISSA_BITS: u32 = 23;
const F32_BIAS: u32 = 127;
const SIGN: u8 = 0x80;
/// Code of NaN in both formats.
const NAN: u8 = 0x7f;
/// The exponent of infinities and NaN in E5M2. E4M3 has no infinities; among the codes with all exponent bits set, only
/// [`NAN`] is not a number.
const E5M2_INFINITY: u8 = 0x7c;

/// Smaller maxima of a tensor are treated as this one, so that reciprocals of scales are finite.
pub(crate) const SMALLEST_MAX: f32 = 1e-30;

pub(crate) fn is_fp8(dtype: DType) -> bool {
    matches!(dtype, DType::Fp8E4m3 | DType::Fp8E5m2)
}

impl Format {
    /// Returns the format of an FP8 element type.
    pub(crate) fn of(dtype: DType) -> Self {
        assert!(is_fp8(dtype), "{} is not FP8", dtype.name());
        if dtype == DType::Fp8E4m3 { E4M3 } else { E5M2 }
    }

    /// Rounds to the nearest number, ties to even. Larger values become the largest number. NaN stays NaN.
    pub(crate) fn encode(self, x: f32) -> u8 {
        if x.is_nan() {
            return NAN;
        }
        let sign = if x.is_sign_negative() { SIGN } else { 0 };
        let x = x.abs().min(self.largest);
        let code = if x < self.unit() * f32::from(1_u8 << self.mantissa_bits) {
            // The result is a multiple of the unit. A value that is rounded up to the smallest normal number gets that
            // number's code.
            (x / self.unit()).round_ties_even() as u32
        } else {
            let (bits, dropped) = (x.to_bits(), F32_MANTISSA_BITS - self.mantissa_bits);
            let half = (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
            ((bits + half) >> dropped) - ((F32_BIAS - self.bias) << self.mantissa_bits)
        };
        sign | code as u8
    }

    /// Returns the number with this code.
    pub(crate) fn decode(self, code: u8) -> f32 {
        let magnitude = code & !SIGN;
        let mantissa = u32::from(code) & ((1 << self.mantissa_bits) - 1);
        let exponent = u32::from(magnitude) >> self.mantissa_bits;
        let x = match () {
            () if magnitude == NAN => f32::NAN,
            () if self == E5M2 && magnitude > E5M2_INFINITY => f32::NAN,
            () if self == E5M2 && magnitude == E5M2_INFINITY => f32::INFINITY,
            () if exponent == 0 => mantissa as f32 * self.unit(),
            () => f32::from_bits(
                (exponent + F32_BIAS - self.bias) << F32_MANTISSA_BITS
                    | mantissa << (F32_MANTISSA_BITS - self.mantissa_bits),
            ),
        };
        if code & SIGN == 0 { x } else { -x }
    }

    /// Returns the smallest positive number. All numbers below the normal ones are multiples of it.
    fn unit(self) -> f32 {
        f32::from_bits((F32_BIAS + 1 - self.bias - self.mantissa_bits) << F32_MANTISSA_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn formats_have_their_published_numbers() {
        // Table 1 of Micikevicius et al., 2022.
        for (format, largest, smallest_normal, smallest) in [
            (E4M3, 448.0, 2_f32.powi(-6), 2_f32.powi(-9)),
            (E5M2, 57_344.0, 2_f32.powi(-14), 2_f32.powi(-16)),
        ] {
            assert_eq!(format.decode(1), smallest);
            assert_eq!(format.decode(1 << format.mantissa_bits), smallest_normal);
            let finite = (0..SIGN).map(|code| format.decode(code)).filter(|x| x.is_finite());
            assert_eq!(finite.fold(0.0, f32::max), largest);
        }
        assert!(E4M3.decode(0x7f).is_nan() && E5M2.decode(0x7d).is_nan());
        assert_eq!(E5M2.decode(0xfc), f32::NEG_INFINITY);
    }

    #[test]
    fn every_number_is_its_own_nearest() {
        for format in [E4M3, E5M2] {
            for code in 0..=u8::MAX {
                let x = format.decode(code);
                let expected = if x.is_finite() { code } else { format.encode(x) };
                assert_eq!(format.encode(x), expected, "{format:?} {code}");
            }
            assert!(format.decode(format.encode(f32::NAN)).is_nan());
            assert_eq!(format.decode(format.encode(f32::NEG_INFINITY)), -format.largest);
        }
    }

    #[test]
    fn ties_are_rounded_to_even() {
        // Codes of neighbouring numbers differ by one, so an even code is an even number.
        for format in [E4M3, E5M2] {
            for code in 0..SIGN - 1 {
                let (low, high) = (format.decode(code), format.decode(code + 1));
                if high.is_finite() {
                    let even = if code % 2 == 0 { code } else { code + 1 };
                    assert_eq!(format.encode((low + high) / 2.0), even, "{format:?} {low} {high}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn no_number_is_nearer(x in -500.0_f32..500.0, scale in -20_i32..4) {
            for format in [E4M3, E5M2] {
                let x = (x * 2_f32.powi(scale)).clamp(-format.largest, format.largest);
                let error = |code| (f64::from(format.decode(code)) - f64::from(x)).abs();
                let nearest = (0..=u8::MAX).map(error).filter(|error| error.is_finite()).fold(f64::MAX, f64::min);
                prop_assert_eq!(error(format.encode(x)), nearest);
            }
        }
    }
}
