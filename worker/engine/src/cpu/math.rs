//! Scalar functions and sums that the compiler vectorises, and dispatch to the available vector unit.

/// Evaluates an expression compiled for the available vector unit (AVX-512, AVX2 or the target's baseline).
///
/// Only code that is inlined into pulp's dispatch is compiled for that unit; elsewhere every fused multiply-add is a
/// library call. Therefore this is a macro, which can put the attribute on the closure. The token makes the closure
/// `FnOnce` only, so that no `FnMut` wrapper, which might not be inlined, sits between it and the dispatch.
macro_rules! simd {
    ($body:expr) => {{
        let token = $crate::cpu::math::Once;
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let _moved: $crate::cpu::math::Once = token;
                $body
            },
        )
    }};
}
pub(crate) use simd;

/// Token moved out of a [`simd`] closure to make it `FnOnce`.
pub(crate) struct Once;

/// `e^x`, with a relative error below 2e-7 if the result is a normal number; 0 below -87.3.
///
/// Cody-Waite reduction to `|r| <= ln(2)/2` and a polynomial of degree 6. Adding a float near 2^23 rounds to the
/// integer n and leaves n in the low mantissa bits, from which the scale 2^n is built without a conversion instruction.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.3, 88.7);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.987_569_1e-4_f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r * r, r + 1.0);
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x < -87.3 { 0.0 } else { p * scale }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `tanh(x)`, absolute error below 3e-7.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    2.0f32.mul_add(sigmoid(2.0 * x), -1.0)
}

/// `tanh(x)`, relative error below 3e-7.
#[inline(always)]
pub(crate) fn tanh_relative(x: f32) -> f32 {
    /// `tanh(x) = x P(x^2)` up to 0.55, fitted for the least relative error. The other formula loses digits there.
    const POLYNOMIAL: [f32; 5] = [0.016_148_75, -0.052_499_25, 0.133_173_85, -0.333_327_17, 0.999_999_94];
    let (size, square) = (x.abs(), x * x);
    let small = x * POLYNOMIAL.iter().fold(0.0_f32, |p, coefficient| p.mul_add(square, *coefficient));
    let large = 1.0 - 2.0 / (exp(2.0 * size) + 1.0);
    if size < 0.55 { small } else { large.copysign(x) }
}

/// Number of partial sums: two AVX-512 registers, which hides the latency of additions.
const LANES: usize = 32;

/// Sum of `f(i)` over `0..len`, in an order that depends on `len` alone.
#[inline(always)]
pub(crate) fn sum(len: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let whole = len / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += f(start + lane);
        }
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    (whole..len).fold(lanes[0], |total, i| total + f(i))
}

/// Sum of the elements.
#[inline(always)]
pub(crate) fn total(x: &[f32]) -> f32 {
    sum(x.len(), |i| x[i])
}

/// Dot product.
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let y = &y[..x.len()];
    sum(x.len(), |i| x[i] * y[i])
}

/// Largest element; negative infinity if there is none.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_tanh_are_accurate() {
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2e-7, "exp({x}) = {}", exp(x));
        }
        for i in -20_000..20_000 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).tanh();
            assert!((f64::from(tanh(x)) - exact).abs() < 3e-7, "tanh({x})");
            let error = (f64::from(tanh_relative(x)) - exact).abs();
            assert!(error <= 3e-7 * exact.abs(), "tanh({x}) = {}", tanh_relative(x));
        }
        assert!(tanh_relative(f32::NAN).is_nan());
        assert_eq!((exp(-1000.0), exp(f32::NEG_INFINITY), exp(0.0)), (0.0, 0.0, 1.0));
    }

    #[test]
    fn sums_cover_every_element_of_any_length() {
        for len in 0..100_usize {
            let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
            assert_eq!(total(&x), (len * len.saturating_sub(1) / 2) as f32);
            assert_eq!(max(&x), x.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
