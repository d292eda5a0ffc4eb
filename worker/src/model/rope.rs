//! Table of rotary angles for a model's shape.

use std::f64::consts::TAU;

use xlaunch_spec::model::{ModelShape, RopeScaling};

/// Computes `[T, D]`: D/2 cosines, then D/2 sines, of the angles `t f_i` with frequencies `f_i`.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "positions are small, and rounding to f32 is intended"
)]
pub(super) fn table(shape: &ModelShape) -> Vec<f32> {
    let frequencies = frequencies(shape);
    // PyTorch implementations round frequencies and angles to f32. Rounding here as well keeps loss curves comparable.
    let angle = |t: usize, frequency: f32| f64::from(t as f32 * frequency);
    (0..shape.seq)
        .flat_map(|t| {
            let cosines = frequencies.iter().map(move |frequency| angle(t, *frequency).cos() as f32);
            cosines.chain(frequencies.iter().map(move |frequency| angle(t, *frequency).sin() as f32))
        })
        .collect()
}

/// Computes `theta^(-2 i / D)` for each pair i, scaled as the shape requires.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "as for the table")]
fn frequencies(shape: &ModelShape) -> Vec<f32> {
    let width = shape.head_width();
    let frequency = |i: usize| shape.rope_theta.powf(-((2 * i) as f64) / width as f64) as f32;
    (0..width / 2)
        .map(|i| match &shape.rope_scaling {
            None => frequency(i),
            Some(scaling) => scaled(f64::from(frequency(i)), scaling) as f32,
        })
        .collect()
}

/// Llama 3's scaling of one frequency. Wavelengths longer than the original context are stretched by `factor`, so that
/// no angles occur that were not seen in training; short ones, which encode local order, are unchanged.
#[expect(clippy::cast_precision_loss, reason = "sequence lengths are small")]
fn scaled(frequency: f64, scaling: &RopeScaling) -> f64 {
    let RopeScaling { factor, low_freq_factor: low, high_freq_factor: high, .. } = *scaling;
    let (original, wavelength) = (scaling.original_max_position_embeddings as f64, TAU / frequency);
    if wavelength > original / low {
        frequency / factor
    } else if wavelength < original / high {
        frequency
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlaunch_spec::model::PRESETS;

    #[test]
    fn llama_3_scaling_keeps_short_wavelengths_and_stretches_long_ones() {
        let shape = &PRESETS.iter().find(|(name, _)| *name == "llama-1b").unwrap().1;
        let scaling = shape.rope_scaling.unwrap();
        let plain = frequencies(&ModelShape { rope_scaling: None, ..shape.clone() });
        let scaled = frequencies(shape);
        let original = scaling.original_max_position_embeddings as f64;
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
}
