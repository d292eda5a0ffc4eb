//! Tables of rotary angles.
//!
//! If only a part of each head is rotated, R of its D/2 pairs are rotated, and the others have the angle 0. A pair is
//! always element i with i + D/2, so the rotated elements are 0 to R and D/2 to D/2 + R. Models in Hugging Face's
//! layout have them at the start of the head.
//!
//! Two scalings depend on the length of the context: in training that is T, in generation the length of a prompt and of
//! the text that is asked for. As in transformers, it counts for all of its positions.

use std::f64::consts::{PI, TAU};
use std::iter::repeat_n;

use xlaunch_engine::{DType, EngineError, Result, Tensor};
use xlaunch_spec::model::{ModelShape, Positions, RopeScaling};

use super::backend_handle::BackendHandle;

/// Cosines and sines of the rotary angles, F32 `[T, D]`.
#[derive(Debug)]
pub(super) struct Rope {
    /// `None` with learned positions.
    table: Option<Tensor>,
    /// Table of blocks with a window, if it differs.
    windowed: Option<Tensor>,
}

impl Rope {
    /// Creates the tables for contexts of up to `length` tokens.
    pub(super) fn new(backend: &BackendHandle, shape: &ModelShape, length: usize) -> Result<Self> {
        let create = |windowed| {
            let table = table(shape, windowed, length);
            let tensor = backend.alloc_persistent(DType::F32, table.len())?;
            backend.write_f32(tensor.all(), &table)?;
            Ok::<_, EngineError>(tensor)
        };
        let is_rotary = shape.positions == Positions::Rotary;
        let differs = is_rotary && shape.windowed_rope_theta != 0.0;
        Ok(Self {
            table: is_rotary.then(|| create(false)).transpose()?,
            windowed: differs.then(|| create(true)).transpose()?,
        })
    }

    /// Returns a block's table, if it rotates.
    pub(super) fn of_block(&self, shape: &ModelShape, block: usize) -> Option<&Tensor> {
        let windowed = self.windowed.as_ref().filter(|_| shape.window(block).is_some());
        windowed.or(self.table.as_ref()).filter(|_| shape.is_rotated(block))
    }
}

/// Computes `[length, D]`: D/2 cosines, then D/2 sines, of the angles `t f_i` with frequencies `f_i`, in contexts of
/// `length` tokens, for blocks with or without a window.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "positions are small, and rounding to f32 is intended"
)]
fn table(shape: &ModelShape, windowed: bool, length: usize) -> Vec<f32> {
    let (theta, scaling) = match shape.windowed_rope_theta {
        theta if windowed && theta != 0.0 => (theta, &RopeScaling::Default),
        _ => (shape.rope_theta, &shape.rope_scaling),
    };
    let (frequencies, factor) = (frequencies(shape, theta, scaling, length), amplitude(scaling));
    let still = shape.head_dim / 2 - frequencies.len();
    // PyTorch implementations round frequencies and angles to f32. Rounding here as well keeps loss curves comparable.
    let angle = |t: usize, frequency: f32| f64::from(t as f32 * frequency);
    let row = |t: usize| {
        let cosines = frequencies.iter().map(move |frequency| (factor * angle(t, *frequency).cos()) as f32);
        let sines = frequencies.iter().map(move |frequency| (factor * angle(t, *frequency).sin()) as f32);
        cosines.chain(repeat_n(1.0, still)).chain(sines).chain(repeat_n(0.0, still))
    };
    (0..length).flat_map(row).collect()
}

/// Returns the length that determines the angles of contexts of `length` tokens. Contexts for which it is the same have
/// the same angles.
pub(super) fn rotation_length(shape: &ModelShape, length: usize) -> usize {
    match shape.rope_scaling {
        RopeScaling::Dynamic { original_max_position_embeddings: original, .. } => length.max(original),
        RopeScaling::LongRope { original_max_position_embeddings: original, .. } => {
            length.clamp(original, original.saturating_add(1))
        }
        _ => 0,
    }
}

/// Returns the factor of queries and keys.
#[expect(clippy::cast_precision_loss, reason = "lengths are small")]
fn amplitude(scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Yarn { factor, attention_factor: 0.0, .. } => 0.1 * factor.ln() + 1.0,
        RopeScaling::LongRope {
            factor,
            original_max_position_embeddings: original,
            attention_factor: 0.0,
            ..
        } => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
            attention_factor
        }
        _ => 1.0,
    }
}

/// Computes `theta^(-2 i / W)` for each pair i of the W rotated elements of a head, scaled for contexts of this length.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "as for the table")]
fn frequencies(shape: &ModelShape, theta: f64, scaling: &RopeScaling, length: usize) -> Vec<f32> {
    let width = shape.rotated_width();
    let theta = match *scaling {
        RopeScaling::Dynamic { factor, original_max_position_embeddings: original }
            if length > original && width > 2 =>
        {
            let stretch = factor * length as f64 / original as f64 - (factor - 1.0);
            theta * stretch.powf(width as f64 / (width as f64 - 2.0))
        }
        _ => theta,
    };
    let scaled = |i: usize| {
        let frequency = f64::from(theta.powf(-((2 * i) as f64) / width as f64) as f32);
        match *scaling {
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
            RopeScaling::LongRope {
                original_max_position_embeddings: original,
                ref short_factor,
                ref long_factor,
                ..
            } => frequency / if length > original { long_factor } else { short_factor }[i],
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
        let plain = frequencies(&shape, shape.rope_theta, &RopeScaling::Default, shape.seq);
        let scaled = frequencies(&shape, shape.rope_theta, &shape.rope_scaling, shape.seq);
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
        let table = table(&shape, false, shape.seq);
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
        assert_eq!(table(&shape, true, 8), table(&plain, false, 8));
        assert_ne!(table(&shape, false, 8), table(&shape, true, 8));
        let same = ModelShape { windowed_rope_theta: 0.0, ..shape };
        assert_eq!(table(&same, true, 8), table(&same, false, 8));
    }

    #[test]
    fn longrope_has_other_factors_beyond_the_original_length() {
        let rope_scaling = RopeScaling::LongRope {
            factor: 4.0,
            original_max_position_embeddings: 16,
            attention_factor: 0.0,
            short_factor: vec![2.0; 32],
            long_factor: (1..=32).map(f64::from).collect(),
        };
        let shape = ModelShape { seq: 64, rope_scaling, ..preset("llama-1b") };
        let plain = frequencies(&shape, shape.rope_theta, &RopeScaling::Default, 64);
        let short = frequencies(&shape, shape.rope_theta, &shape.rope_scaling, 16);
        let long = frequencies(&shape, shape.rope_theta, &shape.rope_scaling, 17);
        assert!(plain.iter().zip(&short).all(|(plain, short)| plain / short == 2.0), "{short:?}");
        assert_eq!((plain[0] / long[0], plain[31] / long[31]), (1.0, 32.0));
        assert_eq!([1, 16, 17, 64].map(|length| rotation_length(&shape, length)), [16, 16, 17, 17]);
        // sqrt(1 + ln 4 / ln 16)
        assert!((table(&shape, false, 1)[0] - 1.5f32.sqrt()).abs() < 1e-6);
    }
}
