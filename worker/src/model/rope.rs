//! Tables of rotary angles.
//!
//! If only a part of each head is rotated, R of its D/2 pairs are rotated, and the others have the angle 0. A pair is
//! always element i with i + D/2, so the rotated elements are 0 to R and D/2 to D/2 + R. Models in Hugging Face's
//! layout have them at the start of the head.

use std::f64::consts::{PI, TAU};
use std::iter::repeat_n;

use xlaunch_spec::model::{ModelShape, RopeScaling};

/// Computes `[T, D]`: D/2 cosines, then D/2 sines, of the angles `t f_i` with frequencies `f_i`, for blocks with or
/// without a window.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "positions are small, and rounding to f32 is intended"
)]
pub(super) fn table(shape: &ModelShape, windowed: bool) -> Vec<f32> {
    let (theta, scaling) = match shape.windowed_rope_theta {
        theta if windowed && theta != 0.0 => (theta, RopeScaling::Default),
        _ => (shape.rope_theta, shape.rope_scaling),
    };
    let (frequencies, factor) = (frequencies(shape, theta, scaling), amplitude(scaling));
    let still = shape.head_dim / 2 - frequencies.len();
    // PyTorch implementations round frequencies and angles to f32. Rounding here as well keeps loss curves comparable.
    let angle = |t: usize, frequency: f32| f64::from(t as f32 * frequency);
    let row = |t: usize| {
        let cosines = frequencies.iter().map(move |frequency| (factor * angle(t, *frequency).cos()) as f32);
        let sines = frequencies.iter().map(move |frequency| (factor * angle(t, *frequency).sin()) as f32);
        cosines.chain(repeat_n(1.0, still)).chain(sines).chain(repeat_n(0.0, still))
    };
    (0..shape.seq).flat_map(row).collect()
}

/// Returns the factor of queries and keys.
fn amplitude(scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::Yarn { factor, attention_factor: 0.0, .. } => 0.1 * factor.ln() + 1.0,
        RopeScaling::Yarn { attention_factor, .. } => attention_factor,
        _ => 1.0,
    }
}

/// Computes `theta^(-2 i / W)` for each pair i of the W rotated elements of a head, scaled.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "as for the table")]
fn frequencies(shape: &ModelShape, theta: f64, scaling: RopeScaling) -> Vec<f32> {
    let width = shape.rotated_width();
    let theta = match scaling {
        RopeScaling::Dynamic { factor, original_max_position_embeddings: original }
            if shape.seq > original && width > 2 =>
        {
            let stretch = factor * shape.seq as f64 / original as f64 - (factor - 1.0);
            theta * stretch.powf(width as f64 / (width as f64 - 2.0))
        }
        _ => theta,
    };
    let scaled = |i: usize| {
        let frequency = f64::from(theta.powf(-((2 * i) as f64) / width as f64) as f32);
        match scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                // The pair whose wavelength fits this often into the original context.
                let pair = |times: f64| {
                    width as f64 * (original as f64 / (times * 2.0 * PI)).ln() / (2.0 * theta.ln())
                };
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(width as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency / factor * stretched + frequency * (1.0 - stretched)
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                // Wavelengths longer than the original context are stretched, so that no angles occur that were not
                // seen in training; short ones, which encode local order, are unchanged.
                let (original, wavelength) = (original as f64, TAU / frequency);
                if wavelength > original / low {
                    frequency / factor
                } else if wavelength < original / high {
                    frequency
                } else {
                    let smooth = (original / wavelength - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    };
    (0..width / 2).map(|i| scaled(i) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlaunch_spec::model::PRESETS;

    fn preset(name: &str) -> ModelShape {
        PRESETS.iter().find(|(preset, _)| *preset == name).unwrap().1.clone()
    }

    #[test]
    fn llama_3_scaling_keeps_short_wavelengths_and_stretches_long_ones() {
        let shape = preset("llama-1b");
        let plain = frequencies(&shape, shape.rope_theta, RopeScaling::Default);
        let scaled = frequencies(&shape, shape.rope_theta, shape.rope_scaling);
        let original = 8192.0;
        let (mut kept, mut stretched, mut between) = (0, 0, 0);
        for (before, after) in plain.iter().zip(&scaled) {
            let wavelength = TAU / f64::from(*before);
            if wavelength < original / 4.0 {
                assert_eq!(before, after);
                kept += 1;
            } else if wavelength > original {
                assert!((before / after - 32.0).abs() < 1e-4, "{before} {after}");
                stretched += 1;
            } else {
                assert!(after < before && *after > before / 32.0, "{before} {after}");
                between += 1;
            }
        }
        assert!(kept > 10 && stretched > 10 && between > 0, "{kept} {stretched} {between}");
    }

    #[test]
    fn rest_of_a_partially_rotated_head_has_the_angle_0() {
        let shape = ModelShape { seq: 3, ..preset("pythia-160m") };
        let table = table(&shape, false);
        let row = &table[2 * 64..];
        let (cosines, sines) = row.split_at(32);
        assert_eq!(shape.rotated_width(), 16);
        assert!(
            cosines[8..].iter().all(|cosine| *cosine == 1.0) && sines[8..].iter().all(|sine| *sine == 0.0)
        );
        assert!(sines[..8].iter().all(|sine| *sine != 0.0), "{sines:?}");
        // The frequencies are those of a head that is as wide as the rotated part.
        assert!((f64::from(sines[4]) - (2.0 * 1e4f64.powf(-0.5)).sin()).abs() < 1e-7);
    }

    #[test]
    fn blocks_with_a_window_have_their_own_base_without_scaling() {
        let shape =
            ModelShape { seq: 8, rope_scaling: RopeScaling::Linear { factor: 8.0 }, ..preset("gemma3-1b") };
        let plain = ModelShape { rope_theta: 1e4, rope_scaling: RopeScaling::Default, ..shape.clone() };
        assert_eq!(table(&shape, true), table(&plain, false));
        assert_ne!(table(&shape, false), table(&shape, true));
        let same = ModelShape { windowed_rope_theta: 0.0, ..shape };
        assert_eq!(table(&same, true), table(&same, false));
    }
}
