//! Scalings of the rotary position embedding in `config.json`, each a table of keys. Pure.

use serde_json::{Map, Value, json};
use xlaunch_spec::model::{ModelShape, RopeScaling};

use super::ModelError;
use super::keys::Keys;

pub(super) const ORIGINAL: &str = "original_max_position_embeddings";
/// Key outside of the tables.
pub(super) const LENGTH: &str = "max_position_embeddings";
pub(super) const FACTOR: &str = "factor";
const ATTENTION_FACTOR: &str = "attention_factor";
const SHORT_FACTOR: &str = "short_factor";
const LONG_FACTOR: &str = "long_factor";
/// Keys of YaRN.
const YARN: &[&str] =
    &[FACTOR, ORIGINAL, "beta_fast", "beta_slow", ATTENTION_FACTOR, "mscale", "mscale_all_dim", "truncate"];
/// Keys of LongRoPE.
pub(super) const LONGROPE: &[&str] = &[FACTOR, ORIGINAL, ATTENTION_FACTOR, SHORT_FACTOR, LONG_FACTOR];
/// YaRN's defaults of `beta_fast` and `beta_slow`.
const BETAS: (f64, f64) = (32.0, 1.0);

/// Reads a scaling other than the default. Also returns the keys of this type; `None` if it is not known.
pub(super) fn read(
    keys: &Keys<'_>,
    named: &str,
    shape: &ModelShape,
    original: usize,
) -> Result<Option<(RopeScaling, &'static [&'static str])>, ModelError> {
    Ok(Some(match named {
        "linear" => (RopeScaling::Linear { factor: keys.required_number(FACTOR)? }, &[FACTOR][..]),
        "dynamic" => {
            if original != shape.seq {
                let reason = format!("transformers uses max_position_embeddings, {}, instead", shape.seq);
                return Err(keys.refused(ORIGINAL, &reason));
            }
            let factor = keys.required_number(FACTOR)?;
            let scaling = RopeScaling::Dynamic { factor, original_max_position_embeddings: original };
            (scaling, &[FACTOR, ORIGINAL][..])
        }
        "yarn" => {
            let factor = keys.required_number(FACTOR)?;
            let scaling = RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast: keys.number("beta_fast", BETAS.0)?,
                beta_slow: keys.number("beta_slow", BETAS.1)?,
                attention_factor: attention_factor(keys, factor)?,
                truncate: keys.flag("truncate", true)?,
            };
            (scaling, YARN)
        }
        "llama3" => {
            let scaling = RopeScaling::Llama3 {
                factor: keys.required_number(FACTOR)?,
                low_freq_factor: keys.required_number("low_freq_factor")?,
                high_freq_factor: keys.required_number("high_freq_factor")?,
                original_max_position_embeddings: original,
            };
            (scaling, &[FACTOR, ORIGINAL, "low_freq_factor", "high_freq_factor"][..])
        }
        _ => return Ok(None),
    }))
}

/// Reads LongRoPE. In the files of most models, its factor is the quotient of two lengths.
#[expect(clippy::cast_precision_loss, reason = "lengths are small")]
pub(super) fn read_longrope(
    keys: &Keys<'_>,
    shape: &ModelShape,
    original: usize,
) -> Result<RopeScaling, ModelError> {
    let quotient = shape.seq as f64 / original.max(1) as f64;
    let factor = keys.number(FACTOR, quotient)?;
    if factor != quotient && keys.get(ATTENTION_FACTOR).is_none() {
        let reason =
            format!("versions of transformers differ in its use; {LENGTH} / {ORIGINAL} is {quotient}");
        return Err(keys.refused(FACTOR, &reason));
    }
    let factors = |key: &'static str| {
        let list = keys.list(key)?.ok_or_else(|| keys.refused(key, "it must be a list"))?;
        let factors = list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>();
        factors.ok_or_else(|| keys.error(key, "it must be a list of numbers".into()))
    };
    let attention_factor = match keys.get(ATTENTION_FACTOR) {
        Some(_) => keys.positive(ATTENTION_FACTOR, 1.0)?,
        None => 0.0,
    };
    Ok(RopeScaling::LongRope {
        // A model that is used for shorter contexts only has no larger amplitude.
        factor: factor.max(1.0),
        original_max_position_embeddings: original,
        attention_factor,
        short_factor: factors(SHORT_FACTOR)?,
        long_factor: factors(LONG_FACTOR)?,
    })
}

/// Reads YaRN's factor of queries and keys; 0 for the usual one. As in transformers, `mscale` and `mscale_all_dim`
/// count only together.
fn attention_factor(keys: &Keys<'_>, factor: f64) -> Result<f64, ModelError> {
    if keys.get(ATTENTION_FACTOR).is_some() {
        return keys.positive(ATTENTION_FACTOR, 1.0);
    }
    let (scale, all) = (keys.number("mscale", 0.0)?, keys.number("mscale_all_dim", 0.0)?);
    let scaled = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
    Ok(if scale == 0.0 || all == 0.0 { 0.0 } else { scaled(scale) / scaled(all) })
}

/// Returns the scaling of gpt-oss without any of these keys.
pub(super) fn default_of_gpt_oss() -> RopeScaling {
    RopeScaling::Yarn {
        factor: 32.0,
        original_max_position_embeddings: 4096,
        beta_fast: BETAS.0,
        beta_slow: BETAS.1,
        attention_factor: 0.0,
        truncate: false,
    }
}

/// Returns the keys of a scaling. The library warns of keys that a type lacks.
pub(super) fn parameters(scaling: &RopeScaling) -> Value {
    let mut parameters = json!(scaling);
    if let Some(table) = parameters.as_object_mut() {
        match *scaling {
            RopeScaling::Dynamic { .. } => drop(table.remove(ORIGINAL)),
            RopeScaling::LongRope { attention_factor, .. } => {
                // It follows from two lengths.
                table.remove(FACTOR);
                if attention_factor == 0.0 {
                    table.remove(ATTENTION_FACTOR);
                }
            }
            RopeScaling::Yarn { beta_fast, beta_slow, attention_factor, truncate, .. } => {
                for (key, is_default) in [
                    ("beta_fast", beta_fast == BETAS.0),
                    ("beta_slow", beta_slow == BETAS.1),
                    (ATTENTION_FACTOR, attention_factor == 0.0),
                    ("truncate", truncate),
                ] {
                    if is_default {
                        table.remove(key);
                    }
                }
            }
            _ => {}
        }
    }
    parameters
}

/// Returns the keys of LongRoPE that the class of Phi 3 accepts before version 5. It knows no amplitude: a model with
/// one is written for version 5 alone.
pub(super) fn before_version_5(parameters: &Value) -> Value {
    if parameters.get(ATTENTION_FACTOR).is_some() {
        return parameters.clone();
    }
    let keys = ["rope_type", SHORT_FACTOR, LONG_FACTOR].into_iter();
    keys.map(|key| (key.to_owned(), parameters[key].clone())).collect::<Map<_, _>>().into()
}

/// Returns the context length that a scaling targets, if it is a whole number in the range of lengths.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "it is in the range of lengths"
)]
pub(super) fn stretched_length(factor: f64, original: usize) -> Option<usize> {
    let length = factor * original as f64;
    let rounded = length.round();
    ((length - rounded).abs() < 1e-6 && length <= f64::from(1 << 20)).then_some(rounded as usize)
}
