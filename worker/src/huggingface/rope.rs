//! The rotary position embedding in `config.json`: base, scaling, and the part of each head that is rotated. Pure.
//!
//! Since transformers 5 they are in `rope_parameters`, before that in `rope_theta`, `rope_scaling` and keys that depend
//! on the family. Both are read, and must agree; both are written. In families whose blocks with a window have another
//! base, `rope_parameters` has a table for each kind of blocks.

use serde_json::{Map, Value, json};
use xlaunch_spec::model::{ModelShape, RopeScaling};

use super::ModelError;
use super::keys::{Keys, nested};
use super::scaling::{self, FACTOR, LENGTH, LONGROPE, ORIGINAL, stretched_length};

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
    /// Scalings of the wavelengths that the family's class computes.
    pub(super) scalings: Scalings,
    /// The scaling without any of these keys.
    pub(super) default_scaling: fn() -> RopeScaling,
}

/// Scalings that a family's class computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scalings {
    /// All that are supported.
    All,
    /// LongRoPE, also under its older names. Its `original_max_position_embeddings` is outside of the tables, with this
    /// default.
    LongRope(usize),
}

/// Rotary embedding of most families.
pub(super) const ROPE: Rope = Rope {
    theta: (THETA, 1e4),
    fraction: None,
    windowed: None,
    scalings: Scalings::All,
    default_scaling: RopeScaling::default,
};

const THETA: &str = "rope_theta";
const ROPE_PARAMETERS: &str = "rope_parameters";
const SCALING: &str = "rope_scaling";
const FRACTION: &str = "partial_rotary_factor";
/// Reason to refuse a rotated part.
const ODD: &str = "it rotates an odd number of elements";
/// Kinds of blocks in `rope_parameters` and `layer_types`.
pub(super) const FULL: &str = "full_attention";
pub(super) const SLIDING: &str = "sliding_attention";

/// Contents of one table; `None` for what it lacks.
#[derive(Debug, Default)]
struct Found {
    theta: Option<f64>,
    fraction: Option<f64>,
    scaling: Option<RopeScaling>,
}

impl Rope {
    /// Returns whether a key is one of the rotary embedding.
    pub(super) fn has(&self, key: &str) -> bool {
        [ROPE_PARAMETERS, SCALING, FRACTION, THETA, self.theta.0].contains(&key)
            || (key == ORIGINAL && self.scalings != Scalings::All)
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
        let theta_outside = outside.theta;
        let mut found = outside;
        let original = self.original(keys, shape)?;
        for (table, name) in [(self.table(keys, FULL)?, &*parameters), (keys.table(SCALING)?, SCALING)] {
            let Some(values) = table else { continue };
            let inside = Keys { path: keys.path, values };
            let inside = self.read_table(&inside, shape, original).map_err(nested(name))?;
            let agrees = |a: Option<f64>, b: Option<f64>| a.is_none() || b.is_none() || a == b;
            if !agrees(found.theta, inside.theta) {
                return Err(keys.error(self.theta.0, format!("differs from that in `{name}`")));
            }
            if !agrees(found.fraction, inside.fraction) {
                return Err(keys.error(fraction, format!("differs from that in `{name}`")));
            }
            if found.scaling.is_some() && inside.scaling != found.scaling {
                return Err(keys.error(name, format!("differs from `{parameters}`")));
            }
            found = Found {
                theta: found.theta.or(inside.theta),
                fraction: found.fraction.or(inside.fraction),
                scaling: inside.scaling,
            };
        }
        shape.rope_theta = found.theta.unwrap_or(self.theta.1);
        shape.rope_scaling = found.scaling.unwrap_or_else(self.default_scaling);
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
        if is_odd(shape, shape.rope_fraction) {
            return Err(keys.refused(fraction, ODD));
        }
        self.read_windowed(keys, theta_outside, shape)
    }

    /// Returns the length of the contexts before the scaling. As in transformers, the default is that of the model.
    fn original(&self, keys: &Keys<'_>, shape: &ModelShape) -> Result<usize, ModelError> {
        match self.scalings {
            Scalings::All => Ok(shape.seq),
            Scalings::LongRope(default) => keys.size(ORIGINAL, default),
        }
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
                let inside = Keys { path: keys.path, values };
                self.read_table(&inside, shape, shape.seq).map_err(nested(&path))?
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
            scaling if (theta, &scaling) == (shape.rope_theta, &shape.rope_scaling) => 0.0,
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

    fn read_table(&self, keys: &Keys<'_>, shape: &ModelShape, original: usize) -> Result<Found, ModelError> {
        // `type` is the older name of the key.
        let key = if keys.values.contains_key("rope_type") { "rope_type" } else { "type" };
        let named = keys.text(key)?;
        let (scaling, known) = match named {
            Some("default") => (RopeScaling::Default, &[][..]),
            None if !keys.values.contains_key(FACTOR) => (RopeScaling::Default, &[][..]),
            Some("longrope" | "su" | "yarn") if self.scalings != Scalings::All => {
                if keys.size(ORIGINAL, original)? != original {
                    let reason = format!("transformers uses that outside of the table, {original}, instead");
                    return Err(keys.refused(ORIGINAL, &reason));
                }
                (scaling::read_longrope(keys, shape, original)?, LONGROPE)
            }
            Some(named) if self.scalings == Scalings::All => {
                scaling::read(keys, named, shape, keys.size(ORIGINAL, original)?)?.ok_or_else(|| {
                    keys.refused(key, "only default, linear, dynamic, yarn and llama3 are in this family")
                })?
            }
            _ => return Err(keys.refused(key, "only `default` and `longrope` are supported in this family")),
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
        if fraction.is_some_and(|fraction| is_odd(shape, fraction)) {
            return Err(keys.refused(FRACTION, ODD));
        }
        Ok(Found { theta, fraction, scaling: Some(scaling) })
    }

    /// Writes all keys.
    pub(super) fn write(&self, shape: &ModelShape, config: &mut Map<String, Value>) {
        let scaling = scaling::parameters(&shape.rope_scaling);
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
        let older = match self.scalings {
            _ if is_default => Value::Null,
            Scalings::All => scaling,
            Scalings::LongRope(_) => scaling::before_version_5(&scaling),
        };
        config.insert(SCALING.into(), older);
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
                    with(&scaling::parameters(&RopeScaling::Default), theta)
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
                config.insert(LENGTH.into(), json!(original));
            }
            // The library warns of a length that is not this multiple.
            RopeScaling::Yarn { factor, original_max_position_embeddings: original, .. } => {
                let length = stretched_length(factor, original).filter(|length| *length >= shape.seq);
                config.insert(LENGTH.into(), json!(length.unwrap_or(shape.seq)));
            }
            // The library derives the factor from these.
            RopeScaling::LongRope { factor, original_max_position_embeddings: original, .. } => {
                config.insert(LENGTH.into(), json!(stretched_length(factor, original).unwrap_or(shape.seq)));
                config.insert(ORIGINAL.into(), json!(original));
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
fn is_odd(shape: &ModelShape, fraction: f64) -> bool {
    !((shape.head_dim as f64 * fraction) as usize).is_multiple_of(2)
}
