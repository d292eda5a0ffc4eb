//! The rotary position embedding in `config.json`: base, scaling, and the part of each head that is rotated. Pure.
//!
//! Since transformers 5 they are in `rope_parameters`, before that in `rope_theta`, `rope_scaling` and keys that depend
//! on the family. Both are read, and must agree; both are written. In families whose blocks with a window have another
//! base, `rope_parameters` has a table for each kind of blocks.

use serde_json::{Map, Value, json};
use xlaunch_spec::model::{ModelShape, RopeScaling};

use super::ModelError;
use super::keys::{Keys, nested};

/// Names and defaults of a family.
#[derive(Debug)]
pub(super) struct Rope {
    /// Key of the base outside of `rope_parameters`, and its default.
    pub(super) theta: (&'static str, f64),
    /// Key of the rotated part outside of `rope_parameters`, and its default; `None` if heads are always rotated whole.
    pub(super) fraction: Option<(&'static str, f64)>,
    /// Blocks with a window have their own parameters: the default of their base, and its key outside of
    /// `rope_parameters`.
    pub(super) windowed: Option<(f64, Option<&'static str>)>,
    /// Whether the family's class scales the wavelengths.
    pub(super) scaled: bool,
}

/// Rotary embedding of most families.
pub(super) const ROPE: Rope = Rope { theta: (THETA, 1e4), fraction: None, windowed: None, scaled: true };

const THETA: &str = "rope_theta";
const ROPE_PARAMETERS: &str = "rope_parameters";
const SCALING: &str = "rope_scaling";
const FRACTION: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";
/// Keys of YaRN.
const YARN: &[&str] = &[
    "factor",
    ORIGINAL,
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
];
/// YaRN's defaults of `beta_fast` and `beta_slow`.
const BETAS: (f64, f64) = (32.0, 1.0);
/// Kinds of blocks in `rope_parameters` and `layer_types`.
pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";

/// Contents of one table; `None` for what it lacks.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    theta: Option<f64>,
    fraction: Option<f64>,
    scaling: Option<RopeScaling>,
}

impl Rope {
    /// Returns whether a key is one of the rotary embedding.
    pub(super) fn has(&self, key: &str) -> bool {
        [ROPE_PARAMETERS, SCALING, FRACTION, THETA, self.theta.0].contains(&key)
            || self.fraction.is_some_and(|(name, _)| name == key)
            || self.windowed.is_some_and(|(_, name)| name == Some(key))
    }

    /// Reads all keys. The sizes and windows of the shape must have been read before.
    pub(super) fn read(&self, keys: &Keys<'_>, shape: &mut ModelShape) -> Result<(), ModelError> {
        let fraction = self.fraction.map_or(FRACTION, |(name, _)| name);
        let outside = Found {
            theta: keys.optional_number(self.theta.0)?,
            fraction: keys.optional_number(fraction)?,
            scaling: None,
        };
        let parameters = match self.windowed {
            None => ROPE_PARAMETERS.to_owned(),
            Some(_) => format!("{ROPE_PARAMETERS}.{FULL}"),
        };
        let mut found = outside;
        for (table, name) in [(self.table(keys, FULL)?, &*parameters), (keys.table(SCALING)?, SCALING)] {
            let Some(values) = table else { continue };
            let inside = self.read_table(&Keys { path: keys.path, values }, shape).map_err(nested(name))?;
            let agrees = |a: Option<f64>, b: Option<f64>| a.is_none() || b.is_none() || a == b;
            if !agrees(found.theta, inside.theta) {
                return Err(keys.error(self.theta.0, format!("differs from that in `{name}`")));
            }
            if !agrees(found.fraction, inside.fraction) {
                return Err(keys.error(fraction, format!("differs from that in `{name}`")));
            }
            if found.scaling.is_some_and(|scaling| inside.scaling != Some(scaling)) {
                return Err(keys.error(name, format!("differs from `{parameters}`")));
            }
            found = Found {
                theta: found.theta.or(inside.theta),
                fraction: found.fraction.or(inside.fraction),
                scaling: inside.scaling,
            };
        }
        shape.rope_theta = found.theta.unwrap_or(self.theta.1);
        shape.rope_scaling = found.scaling.unwrap_or_default();
        shape.rope_fraction = found.fraction.or(self.fraction.map(|(_, default)| default)).unwrap_or(1.0);
        if self.fraction.is_none() && shape.rope_fraction != 1.0 {
            return Err(keys.refused(fraction, "models of this family rotate whole heads"));
        }
        // Families with other names have these as well in files of transformers 4.45 to 4.57; version 5 ignores them.
        for (general, own, value) in
            [(THETA, self.theta.0, shape.rope_theta), (FRACTION, fraction, shape.rope_fraction)]
        {
            if keys.optional_number(general)?.is_some_and(|number| number != value) {
                return Err(keys.refused(general, &format!("it differs from `{own}`, which is {value}")));
            }
        }
        if is_odd(shape) {
            return Err(keys.refused(fraction, "it rotates an odd number of elements"));
        }
        self.read_windowed(keys, outside.theta, shape)
    }

    /// Reads the parameters of blocks with a window.
    fn read_windowed(
        &self,
        keys: &Keys<'_>,
        theta: Option<f64>,
        shape: &mut ModelShape,
    ) -> Result<(), ModelError> {
        let Some((default, name)) = self.windowed.filter(|_| shape.window != 0) else { return Ok(()) };
        let path = format!("{ROPE_PARAMETERS}.{SLIDING}");
        let found = match self.table(keys, SLIDING)? {
            Some(values) => {
                self.read_table(&Keys { path: keys.path, values }, shape).map_err(nested(&path))?
            }
            None => Found::default(),
        };
        let outside = name.map_or(Ok(None), |name| keys.optional_number(name))?;
        if name.is_none() && found.theta.is_none() && theta.is_some_and(|theta| theta != default) {
            let reason = format!("versions of transformers differ in its use; set it in `{path}`");
            return Err(keys.refused(self.theta.0, &reason));
        }
        if let (Some(inside), Some(outside)) = (found.theta, outside)
            && inside != outside
        {
            return Err(keys.error(name.unwrap_or(THETA), format!("differs from that in `{path}`, {inside}")));
        }
        let (theta, scaling) =
            (found.theta.or(outside).unwrap_or(default), found.scaling.unwrap_or_default());
        shape.windowed_rope_theta = match scaling {
            RopeScaling::Default => theta,
            _ if (theta, scaling) == (shape.rope_theta, shape.rope_scaling) => 0.0,
            _ => {
                let reason = format!("blocks with a window have no scaling, or that of `{FULL}`");
                return Err(keys.error(&path, format!("its scaling is not supported: {reason}")));
            }
        };
        Ok(())
    }

    /// Returns the table of a kind of blocks in `rope_parameters`; the only one if the family has no kinds.
    fn table<'a>(&self, keys: &Keys<'a>, kind: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        let Some(values) = keys.table(ROPE_PARAMETERS)? else { return Ok(None) };
        if self.windowed.is_none() {
            return Ok(Some(values));
        }
        let inside = Keys { path: keys.path, values };
        if let Some(other) = values.keys().find(|key| ![FULL, SLIDING].contains(&&***key)) {
            let reason = format!("only tables `{FULL}` and `{SLIDING}` are");
            return Err(nested(ROPE_PARAMETERS)(inside.refused(other, &reason)));
        }
        inside.table(kind).map_err(nested(ROPE_PARAMETERS))
    }

    fn read_table(&self, keys: &Keys<'_>, shape: &ModelShape) -> Result<Found, ModelError> {
        // `type` is the older name of the key.
        let key = if keys.values.contains_key("rope_type") { "rope_type" } else { "type" };
        let named = keys.text(key)?;
        let (scaling, known) = match named {
            Some("default") => (RopeScaling::Default, &[][..]),
            None if !keys.values.contains_key("factor") => (RopeScaling::Default, &[][..]),
            Some(named) if self.scaled => scaling(keys, named, shape)?
                .ok_or_else(|| keys.refused(key, "only default, linear, dynamic, yarn and llama3 are"))?,
            _ => return Err(keys.refused(key, "only `default` is supported in this family")),
        };
        for other in keys.values.keys() {
            let is_known = [key, "type", THETA, FRACTION].contains(&&**other) || known.contains(&&**other);
            if !is_known && !keys.is_unset(other) {
                return Err(keys.refused(other, "this trainer does not compute it"));
            }
        }
        if self.windowed.is_some() && !keys.flag("truncate", true)? {
            return Err(keys.refused("truncate", "transformers ignores it in this family"));
        }
        let (theta, fraction) = (keys.optional_number(THETA)?, keys.optional_number(FRACTION)?);
        if self.fraction.is_none() && fraction.is_some_and(|fraction| fraction != 1.0) {
            return Err(keys.refused(FRACTION, "models of this family rotate whole heads"));
        }
        Ok(Found { theta, fraction, scaling: Some(scaling) })
    }

    /// Writes all keys.
    pub(super) fn write(&self, shape: &ModelShape, config: &mut Map<String, Value>) {
        let scaling = scaling_parameters(shape.rope_scaling);
        let with = |scaling: &Value, theta: f64| {
            let mut table = scaling.clone();
            table[THETA] = json!(theta);
            if self.fraction.is_some() {
                table[FRACTION] = json!(shape.rope_fraction);
            }
            table
        };
        let full = with(&scaling, shape.rope_theta);
        let is_default = shape.rope_scaling == RopeScaling::Default;
        config.insert(SCALING.into(), if is_default { Value::Null } else { scaling });
        config.insert(self.theta.0.into(), json!(shape.rope_theta));
        if let Some((name, _)) = self.fraction {
            config.insert(name.into(), json!(shape.rope_fraction));
        }
        let parameters = match self.windowed {
            None => full,
            Some((_, name)) => {
                let theta = shape.windowed_rope_theta;
                let sliding = if theta == 0.0 {
                    full.clone()
                } else {
                    with(&scaling_parameters(RopeScaling::Default), theta)
                };
                if let Some(name) = name {
                    config.insert(name.into(), sliding[THETA].clone());
                }
                json!({FULL: full, SLIDING: sliding})
            }
        };
        config.insert(ROPE_PARAMETERS.into(), parameters);
        match shape.rope_scaling {
            // The base grows beyond this length.
            RopeScaling::Dynamic { original_max_position_embeddings: original, .. } => {
                config.insert("max_position_embeddings".into(), json!(original));
            }
            // The library warns of a length that is not this multiple.
            RopeScaling::Yarn { factor, original_max_position_embeddings: original, .. } => {
                let length = stretched_length(factor, original).filter(|length| *length >= shape.seq);
                config.insert("max_position_embeddings".into(), json!(length.unwrap_or(shape.seq)));
            }
            _ => {}
        }
    }
}

/// Returns whether an odd number of elements of each head would be rotated, which transformers cannot compute.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "head widths are small, and fractions that are out of range are refused later"
)]
fn is_odd(shape: &ModelShape) -> bool {
    !((shape.head_dim as f64 * shape.rope_fraction) as usize).is_multiple_of(2)
}

/// Returns the context length that YaRN targets, if it is a whole number in the range of lengths.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "it is in the range of lengths"
)]
fn stretched_length(factor: f64, original: usize) -> Option<usize> {
    let length = factor * original as f64;
    (length.fract() == 0.0 && length <= f64::from(1 << 20)).then_some(length as usize)
}

/// Reads a scaling other than the default. Also returns the keys of this type; `None` if it is not known.
fn scaling(
    keys: &Keys<'_>,
    named: &str,
    shape: &ModelShape,
) -> Result<Option<(RopeScaling, &'static [&'static str])>, ModelError> {
    // As in transformers, missing lengths are those of the model.
    let original = || keys.size(ORIGINAL, shape.seq);
    Ok(Some(match named {
        "linear" => (RopeScaling::Linear { factor: keys.required_number("factor")? }, &["factor"][..]),
        "dynamic" => {
            let original = original()?;
            if original != shape.seq {
                let reason = format!("transformers uses max_position_embeddings, {}, instead", shape.seq);
                return Err(keys.refused(ORIGINAL, &reason));
            }
            let factor = keys.required_number("factor")?;
            let scaling = RopeScaling::Dynamic { factor, original_max_position_embeddings: original };
            (scaling, &["factor", ORIGINAL][..])
        }
        "yarn" => {
            let factor = keys.required_number("factor")?;
            let scaling = RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original()?,
                beta_fast: keys.number("beta_fast", BETAS.0)?,
                beta_slow: keys.number("beta_slow", BETAS.1)?,
                attention_factor: attention_factor(keys, factor)?,
                truncate: keys.flag("truncate", true)?,
            };
            (scaling, YARN)
        }
        "llama3" => {
            let scaling = RopeScaling::Llama3 {
                factor: keys.required_number("factor")?,
                low_freq_factor: keys.required_number("low_freq_factor")?,
                high_freq_factor: keys.required_number("high_freq_factor")?,
                original_max_position_embeddings: original()?,
            };
            (scaling, &["factor", ORIGINAL, "low_freq_factor", "high_freq_factor"][..])
        }
        _ => return Ok(None),
    }))
}

/// Reads YaRN's factor of queries and keys; 0 for the usual one. As in transformers, `mscale` and `mscale_all_dim`
/// count only together.
fn attention_factor(keys: &Keys<'_>, factor: f64) -> Result<f64, ModelError> {
    if keys.get("attention_factor").is_some() {
        return keys.positive("attention_factor", 1.0);
    }
    let (scale, all) = (keys.number("mscale", 0.0)?, keys.number("mscale_all_dim", 0.0)?);
    let scaled = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
    Ok(if scale == 0.0 || all == 0.0 { 0.0 } else { scaled(scale) / scaled(all) })
}

/// Returns the keys of a scaling. The library warns of keys that a type lacks.
fn scaling_parameters(scaling: RopeScaling) -> Value {
    let mut parameters = json!(scaling);
    if let Some(table) = parameters.as_object_mut() {
        match scaling {
            RopeScaling::Dynamic { .. } => drop(table.remove(ORIGINAL)),
            RopeScaling::Yarn { beta_fast, beta_slow, attention_factor, truncate, .. } => {
                for (key, is_default) in [
                    ("beta_fast", beta_fast == BETAS.0),
                    ("beta_slow", beta_slow == BETAS.1),
                    ("attention_factor", attention_factor == 0.0),
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
