//! Keys of `config.json` with their meanings, each of which is read and written. Pure.

use serde_json::{Map, Value, json};
use xlaunch_spec::model::{Activation, ModelShape, Parallel, QkNorm};

use super::ModelError;
use super::keys::Keys;

/// A field of a shape, with its key in `[model]`.
#[derive(Debug)]
pub(super) struct Field<T> {
    pub(super) key: &'static str,
    pub(super) of: fn(&mut ModelShape) -> &mut T,
}

/// Names a field of a shape.
macro_rules! field {
    ($name:ident) => {
        $crate::huggingface::key::Field {
            key: concat!("model.", stringify!($name)),
            of: |shape| &mut shape.$name,
        }
    };
}
pub(super) use field;

/// A key of `config.json` and its meaning.
#[derive(Debug)]
pub(super) struct Key(pub(super) &'static str, pub(super) Meaning);

/// Meaning of a key. `null` and a missing key stand for the default, except with [`Cap`](Self::Cap).
#[derive(Debug)]
pub(super) enum Meaning {
    /// A whole number and its default.
    Size(Field<usize>, usize),
    /// A whole number whose default follows from earlier keys.
    Derived(Field<usize>, fn(&ModelShape) -> usize),
    /// A whole number, the default of a missing key, and what `null` stands for, which follows from earlier keys.
    Nullable(Field<usize>, usize, fn(&ModelShape) -> usize),
    /// A whole number that always follows from earlier keys, so the key is not written.
    Implied(Field<usize>, fn(&ModelShape) -> usize),
    /// A number and its default.
    Number(Field<f64>, f64),
    /// A number above 0 and its default.
    Positive(Field<f64>, f64),
    /// A number of which the shape has the reciprocal, and its default.
    Reciprocal(Field<f64>, f64),
    /// A soft cap and the default of a missing key. `null` means that there is none, which is 0 in a shape.
    Cap(Field<f64>, f64),
    /// A number n and its default. Attention scores are multiplied by `n^-0.5`.
    QueryScalar(f64),
    /// The factor of attention scores and its default.
    QueryScale(f64),
    /// A flag and its default. Several fields may have the same key.
    Flag(Field<bool>, bool),
    /// Whether attention and feed-forward layers are side by side, how they are if so, and the default.
    Parallel(Parallel, bool),
    /// The activation function; the default is that of the family.
    Activation,
    /// The hidden width of all shared experts, a multiple of that of an expert, and its default.
    SharedWidth(usize),
    /// Whether the queries and keys of each head are normalised, and the default.
    QkNorm(bool),
    /// Any value is read without an effect, and this one is written, as JSON.
    Unused(&'static str),
    /// Only these values, as JSON, are supported. The first one is written.
    Only(&'static [&'static str]),
}

/// Names of activation functions. The first one of each is written.
const ACTIVATIONS: [(&str, Activation); 7] = [
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("gelu", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_new", Activation::GeluTanh),
    ("relu2", Activation::Relu2),
    ("quick_gelu", Activation::QuickGelu),
];

impl Key {
    /// Reads the key into a shape.
    pub(super) fn read(&self, keys: &Keys<'_>, shape: &mut ModelShape) -> Result<(), ModelError> {
        let Self(name, meaning) = self;
        match meaning {
            Meaning::Size(field, default) => *(field.of)(shape) = keys.size(name, *default)?,
            Meaning::Derived(field, default) => {
                let default = default(shape);
                *(field.of)(shape) = keys.size(name, default)?;
            }
            Meaning::Nullable(field, missing, null) => {
                let default = if keys.values.contains_key(*name) { null(shape) } else { *missing };
                *(field.of)(shape) = keys.size(name, default)?;
            }
            Meaning::Implied(field, value) => {
                let value = value(shape);
                if keys.size(name, value)? != value {
                    return Err(keys.refused(name, &format!("it is always {value} in this family")));
                }
                *(field.of)(shape) = value;
            }
            Meaning::Number(field, default) => *(field.of)(shape) = keys.number(name, *default)?,
            Meaning::Positive(field, default) => *(field.of)(shape) = keys.positive(name, *default)?,
            Meaning::Reciprocal(field, default) => {
                *(field.of)(shape) = 1.0 / keys.positive(name, *default)?;
            }
            Meaning::Cap(field, default) => {
                let missing = if keys.values.contains_key(*name) { 0.0 } else { *default };
                let cap = keys.optional_number(name)?;
                *(field.of)(shape) = if cap.is_some() { keys.positive(name, *default)? } else { missing };
            }
            Meaning::QueryScalar(default) => {
                set_query_scale(shape, keys.positive(name, *default)?.powf(-0.5));
            }
            Meaning::QueryScale(default) => set_query_scale(shape, keys.positive(name, *default)?),
            Meaning::Flag(field, default) => *(field.of)(shape) = keys.flag(name, *default)?,
            Meaning::Parallel(parallel, default) => {
                shape.parallel = if keys.flag(name, *default)? { *parallel } else { Parallel::No };
            }
            Meaning::Activation => {
                let Some(named) = keys.text(name)? else { return Ok(()) };
                let known = ACTIVATIONS.iter().find(|(known, _)| *known == named);
                let Some((_, activation)) = known else {
                    let known: Vec<_> = ACTIVATIONS.iter().map(|(known, _)| *known).collect();
                    return Err(keys.refused(name, &format!("this trainer computes {}", known.join(", "))));
                };
                shape.activation = *activation;
            }
            Meaning::SharedWidth(default) => {
                let (width, expert) = (keys.size(name, *default)?, shape.expert_width());
                if expert == 0 || !width.is_multiple_of(expert) {
                    return Err(keys.refused(name, &format!("it must be a multiple of an expert's {expert}")));
                }
                shape.shared_experts = width / expert;
            }
            Meaning::QkNorm(default) => {
                shape.qk_norm = if keys.flag(name, *default)? { QkNorm::Head } else { QkNorm::None };
            }
            Meaning::Unused(_) => {}
            Meaning::Only(accepted) => keys.only(name, accepted)?,
        }
        Ok(())
    }

    /// Writes the value of a shape. A value that the key cannot hold is read back as another one.
    pub(super) fn write(&self, shape: &ModelShape, config: &mut Map<String, Value>) {
        let Self(name, meaning) = self;
        let mut own = shape.clone();
        let value = match meaning {
            Meaning::Size(field, _) | Meaning::Derived(field, _) | Meaning::Nullable(field, ..) => {
                json!(*(field.of)(&mut own))
            }
            Meaning::Implied(..) => return,
            Meaning::Number(field, _) | Meaning::Positive(field, _) => json!(*(field.of)(&mut own)),
            Meaning::Reciprocal(field, _) => json!(1.0 / *(field.of)(&mut own)),
            Meaning::Cap(field, _) => json!(Some(*(field.of)(&mut own)).filter(|cap| *cap != 0.0)),
            Meaning::QueryScalar(_) => json!(query_scalar(shape)),
            Meaning::QueryScale(_) => json!(shape.score_factor()),
            Meaning::Flag(field, _) => json!(*(field.of)(&mut own)),
            Meaning::Parallel(..) => json!(shape.parallel != Parallel::No),
            Meaning::Activation => {
                // GPT-2's class has the older name.
                let prefer = if *name == "activation_function" { "gelu_new" } else { "" };
                let mut names = ACTIVATIONS.iter().filter(|(_, known)| *known == shape.activation);
                let first = names.clone().next();
                json!(names.find(|(known, _)| *known == prefer).or(first).map(|(known, _)| *known))
            }
            Meaning::SharedWidth(_) => json!(shape.shared_width()),
            Meaning::QkNorm(_) => json!(shape.qk_norm == QkNorm::Head),
            Meaning::Unused(text) => serde_json::from_str(text).unwrap_or_default(),
            Meaning::Only(accepted) => {
                accepted.first().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
            }
        };
        config.insert((*name).into(), value);
    }

    /// Returns whether the key holds a key of `[model]`.
    pub(super) fn holds(&self, key: &str) -> bool {
        match &self.1 {
            Meaning::Size(field, _) | Meaning::Derived(field, _) | Meaning::Nullable(field, ..) => {
                field.key == key
            }
            Meaning::Number(field, _)
            | Meaning::Positive(field, _)
            | Meaning::Reciprocal(field, _)
            | Meaning::Cap(field, _) => field.key == key,
            Meaning::Flag(field, _) => field.key == key,
            Meaning::QueryScalar(_) | Meaning::QueryScale(_) => key == "model.query_scale",
            Meaning::Parallel(..) => key == "model.parallel",
            Meaning::Activation => key == "model.activation",
            Meaning::SharedWidth(_) => key == "model.shared_experts",
            Meaning::QkNorm(_) => key == "model.qk_norm",
            Meaning::Implied(..) | Meaning::Unused(_) | Meaning::Only(_) => false,
        }
    }
}

/// Sets the factor of attention scores; to 0, which presets have, if it is the usual one.
fn set_query_scale(shape: &mut ModelShape, scale: f64) {
    shape.query_scale = 0.0;
    if !nearly_equal(shape.score_factor(), scale) {
        shape.query_scale = scale;
    }
}

/// Returns the number whose inverse square root is the factor of attention scores, which is a whole number in most
/// models.
fn query_scalar(shape: &ModelShape) -> Value {
    let scalar = shape.score_factor().powi(-2);
    #[expect(clippy::cast_possible_truncation, reason = "it is whole, or is not written")]
    let whole = scalar.round() as i64;
    #[expect(clippy::cast_precision_loss, reason = "then it is not equal")]
    let is_whole = nearly_equal(scalar, whole as f64);
    if is_whole { json!(whole) } else { json!(scalar) }
}

/// Returns whether two numbers differ by no more than rounding does.
pub(super) fn nearly_equal(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
}
