//! Scaling of the rotary position embedding, with the names of Hugging Face's `config.json`.

use serde::{Deserialize, Serialize};

/// Scaling of the rotary wavelengths.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are documented at their variants")]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    Default,
    /// All wavelengths are multiplied by `factor`.
    Linear { factor: f64 },
    /// The base grows with the sequence length beyond `original_max_position_embeddings`.
    Dynamic { factor: f64, original_max_position_embeddings: usize },
    /// YaRN (Peng et al., 2023): wavelengths are multiplied by `factor` if fewer than `beta_slow` of them fit into
    /// `original_max_position_embeddings`, stay if more than `beta_fast` do, and are interpolated between. Queries and
    /// keys are multiplied by `attention_factor`; 0 stands for `0.1 ln(factor) + 1`. With `truncate`, the limits of the
    /// interpolation are rounded to whole pairs.
    Yarn {
        factor: f64,
        original_max_position_embeddings: usize,
        #[serde(default = "beta_fast")]
        beta_fast: f64,
        #[serde(default = "beta_slow")]
        beta_slow: f64,
        #[serde(default)]
        attention_factor: f64,
        #[serde(default = "truncate")]
        truncate: bool,
    },
    /// Llama 3.1: with `s = original_max_position_embeddings`, wavelengths above `s / low_freq_factor` are multiplied
    /// by `factor`, those below `s / high_freq_factor` stay, and those between are interpolated.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
    /// LongRoPE (Ding et al., 2024): the wavelength of each rotated pair is multiplied by its own factor, in contexts
    /// longer than `original_max_position_embeddings` one of `long_factor`, in others one of `short_factor`. Queries
    /// and keys are multiplied by `attention_factor`; 0 stands for
    /// `sqrt(1 + ln(factor) / ln(original_max_position_embeddings))`.
    LongRope {
        factor: f64,
        original_max_position_embeddings: usize,
        #[serde(default)]
        attention_factor: f64,
        short_factor: Vec<f64>,
        long_factor: Vec<f64>,
    },
}

/// Defaults of YaRN's authors.
fn beta_fast() -> f64 {
    32.0
}

fn beta_slow() -> f64 {
    1.0
}

fn truncate() -> bool {
    true
}
