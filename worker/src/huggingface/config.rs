//! Converts `config.json` from and to a [`ModelShape`], by the tables of [`families`](super::families). Pure.
//!
//! Every key has a meaning in its family, or is known to have no effect on results, such as those of dropout and
//! generation. Any other key is refused unless its value is null, false or empty.

use std::path::Path;

use serde_json::{Map, Value, json};
use xlaunch_spec::model::{Arch, ModelShape, Positions, RopeScaling};

use super::ModelError;
use super::families::Family;
use super::key::nearly_equal;
use super::keys::Keys;
use super::scaling::LENGTH;
use super::without_effect::{FURTHER_BLOCKS, IS_CAUSAL, QUANTIZATION, WITHOUT_EFFECT};
use super::{layers, unsupported};

/// `quant_method` of the only quantization that is read.
const MXFP4: &str = "mxfp4";

/// Ids with which generation starts and stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenIds {
    /// The end-of-text id, which also starts documents. Byte-level models have none.
    pub end_of_text: Option<u32>,
    /// The id that the tokenizer puts before a text.
    pub bos: Option<u32>,
}

/// Reads `config.json`. `path` is for messages. The shape's sequence length is the longest one that the model supports.
pub(super) fn parse(path: &Path, json: &[u8]) -> Result<ModelShape, ModelError> {
    let invalid = |reason: String| ModelError::Read { path: path.into(), reason };
    let values: Map<String, Value> =
        serde_json::from_slice(json).map_err(|error| invalid(error.to_string()))?;
    let keys = Keys { path, values: &values };
    if values.get(IS_CAUSAL).is_some_and(|value| *value != json!(true)) {
        return Err(keys.refused(IS_CAUSAL, "tokens would attend to later ones; this trainer computes true"));
    }
    let family =
        Family::named(&values).ok_or_else(|| keys.refused("model_type", &unsupported::reason(&values)))?;
    if !keys.is_unset(QUANTIZATION) {
        let method = keys.table(QUANTIZATION)?.and_then(|table| table.get("quant_method"));
        let is_mxfp4 = method.and_then(Value::as_str) == Some(MXFP4);
        if !family.without_effect.contains(&QUANTIZATION) {
            return Err(keys.refused(QUANTIZATION, "weights must not be quantized"));
        }
        if !is_mxfp4 {
            return Err(keys.refused(QUANTIZATION, "only MXFP4 is read in this family"));
        }
    }
    read(family, &keys)
}

/// Returns the number of blocks in the files of a model that are not read.
pub(super) fn further_blocks(json: &[u8]) -> u64 {
    let values: Map<String, Value> = serde_json::from_slice(json).unwrap_or_default();
    values.get(FURTHER_BLOCKS).and_then(Value::as_u64).unwrap_or(0)
}

/// Reads the keys of a family.
fn read(family: &Family, keys: &Keys<'_>) -> Result<ModelShape, ModelError> {
    let check = |shape: &ModelShape| {
        shape.check().map_err(|invalid| {
            let key = key_of(family, invalid.key);
            keys.error(key, format!("{}; expected {}", invalid.problem, invalid.expected))
        })
    };
    let mut shape = family.arch.base();
    for key in family.keys() {
        key.read(keys, &mut shape)?;
    }
    if shape.experts == 0 && family.arch.base().experts > 0 {
        return Err(keys.error(key_of(family, "model.experts"), "a model of this type has experts".into()));
    }
    (shape.window, shape.window_pattern, shape.windowed_rope_theta) = (0, 0, 0.0);
    check(&shape)?;
    if family.still_blocks {
        layers::read_rotation(keys, &mut shape)?;
    }
    shape.window_pattern = family.arch.base().window_pattern;
    family.windows.read(keys, &mut shape)?;
    if let Some(rope) = &family.rope {
        rope.read(keys, &mut shape)?;
    }
    check(&shape)?;
    refuse_unknown(family, keys)?;
    Ok(shape)
}

/// Refuses keys that are neither read nor known to have no effect.
fn refuse_unknown(family: &Family, keys: &Keys<'_>) -> Result<(), ModelError> {
    let is_known = |name: &str| {
        WITHOUT_EFFECT.contains(&name)
            || name == IS_CAUSAL
            || family.without_effect.contains(&name)
            || family.keys().any(|key| key.0 == name)
            || family.windows.has(name)
            || family.rope.as_ref().is_some_and(|rope| rope.has(name))
            || (family.still_blocks && layers::is_rotation(name))
    };
    let unknown = keys.values.keys().filter(|name| !is_known(name) && !keys.is_unset(name));
    let unknown: Vec<&str> = unknown.map(String::as_str).collect();
    let Some((first, others)) = unknown.split_first() else { return Ok(()) };
    let mut reason = format!(
        "models of type `{}` have no such key here; remove it if it has no effect on the results",
        family.model_type
    );
    if !others.is_empty() {
        // The text is JSON, so control characters are escaped.
        let others: Vec<String> = others.iter().map(|name| json!(name).to_string()).collect();
        reason += &format!("; the same holds for {}", others.join(", "));
    }
    Err(keys.refused(first, &reason))
}

/// Returns the family whose layout a model is exported in: its own if that can represent its shape, otherwise another
/// one that can.
///
/// # Errors
/// Returns the key of the shape that its own family cannot represent, with its value, if no other family can either.
pub(crate) fn family_for(shape: &ModelShape) -> Result<&'static Family, (&'static str, String)> {
    let own = Family::of(shape.arch);
    match unrepresented(own, shape) {
        None => Ok(own),
        Some(difference) => {
            Family::all().find(|family| unrepresented(family, shape).is_none()).ok_or(difference)
        }
    }
}

/// Returns the first key of a shape that a family cannot represent, with its value.
pub(super) fn unrepresented(family: &Family, shape: &ModelShape) -> Option<(&'static str, String)> {
    if family.divided && !shape.dim.is_multiple_of(shape.heads) {
        return Some(("model.heads", shape.heads.to_string()));
    }
    if (shape.experts > 0) != (family.arch.base().experts > 0) {
        return Some(("model.experts", shape.experts.to_string()));
    }
    let values = write(family, shape, TokenIds::default(), "float32");
    let keys = Keys { path: Path::new(""), values: &values };
    match read(family, &keys) {
        Ok(other) => difference(shape, &other),
        Err(_) => Some(("model.arch", json!(shape.arch).to_string())),
    }
}

/// Returns the first key in which the computation of two shapes differs, with its value in the first.
fn difference(shape: &ModelShape, other: &ModelShape) -> Option<(&'static str, String)> {
    let (mut own, mut other) = (canonical(shape), canonical(other));
    other.arch = own.arch;
    if own.positions == Positions::Rotary {
        // Rotary positions have no weights.
        other.seq = own.seq;
    }
    let numbers: [fn(&mut ModelShape) -> &mut f64; 4] = [
        |shape| &mut shape.query_scale,
        |shape| &mut shape.embedding_scale,
        |shape| &mut shape.residual_scale,
        |shape| &mut shape.logit_scale,
    ];
    for number in numbers {
        if nearly_equal(*number(&mut own), *number(&mut other)) {
            *number(&mut other) = *number(&mut own);
        }
    }
    own.difference(&other).map(|(key, value, _)| (key, value))
}

/// Returns the shape that computes the same, with each key in the one form that is compared.
#[expect(clippy::cast_precision_loss, reason = "head widths are small")]
fn canonical(shape: &ModelShape) -> ModelShape {
    let mut own = shape.clone();
    own.query_scale = shape.score_factor();
    own.embedding_scale = shape.embedding_factor();
    if shape.positions == Positions::Rotary {
        own.rope_fraction = shape.rotated_width() as f64 / shape.head_dim as f64;
    }
    if let RopeScaling::Yarn { factor, attention_factor, .. } = &mut own.rope_scaling
        && *attention_factor == 0.0
    {
        *attention_factor = 0.1 * factor.ln() + 1.0;
    }
    if shape.experts == 0 {
        let ModelShape { experts_per_token, router, normalise, .. } = Arch::Llama.base();
        (own.experts_per_token, own.router, own.normalise) = (experts_per_token, router, normalise);
    } else if shape.dense_layers == 0 {
        (own.ffn, own.expert_ffn) = (shape.expert_width(), 0);
    }
    if own.window_pattern == 1 {
        own.window = 0;
    }
    if own.window == 0 {
        (own.window_pattern, own.windowed_rope_theta) = (0, 0.0);
    } else if shape.rope_scaling == RopeScaling::Default && shape.windowed_rope_theta == 0.0 {
        own.windowed_rope_theta = shape.rope_theta;
    }
    own
}

/// Returns the shape with the width of experts in the key that a family has for it.
fn with_expert_width(family: &Family, shape: &ModelShape) -> ModelShape {
    let mut own = shape.clone();
    if family.keys().any(|key| key.holds("model.expert_ffn")) {
        own.expert_ffn = shape.expert_width();
    } else if shape.experts > 0 && shape.dense_layers == 0 {
        (own.ffn, own.expert_ffn) = (shape.expert_width(), 0);
    }
    own
}

/// Returns the `config.json` of a model in the layout of a family that can represent it.
pub(super) fn write(family: &Family, shape: &ModelShape, ids: TokenIds, dtype: &str) -> Map<String, Value> {
    let mut config = Map::new();
    let shape = &with_expert_width(family, shape);
    for key in family.keys() {
        key.write(shape, &mut config);
    }
    family.windows.write(shape, &mut config);
    if family.still_blocks {
        layers::write_rotation(shape, &mut config);
    }
    match &family.rope {
        Some(rope) => rope.write(shape, &mut config),
        None => drop(config.insert("n_ctx".into(), json!(shape.seq))),
    }
    for (key, value) in [
        ("architectures", json!([family.class])),
        ("model_type", json!(family.model_type)),
        ("bos_token_id", json!(ids.bos.or(ids.end_of_text))),
        ("eos_token_id", json!(ids.end_of_text)),
        // Some classes have a default that is beyond small vocabularies.
        ("pad_token_id", Value::Null),
        ("dtype", json!(dtype)),
        ("torch_dtype", json!(dtype)),
        ("initializer_range", json!(0.02)),
        ("use_cache", json!(true)),
    ] {
        config.insert(key.into(), value);
    }
    // The library's defaults would be its dropout during fine-tuning.
    let dropout = if family.arch == Arch::Gpt2 {
        &["attn_pdrop", "embd_pdrop", "resid_pdrop"][..]
    } else {
        &["attention_dropout"]
    };
    config.extend(dropout.iter().map(|key| ((*key).to_owned(), json!(0.0))));
    config
}

/// Restores keys of the original `config.json` in that of a model that was trained from it, unless the result would not
/// be this model.
pub(super) fn inherit_config(
    written: Map<String, Value>,
    read: &Map<String, Value>,
    shape: &ModelShape,
    ids: TokenIds,
) -> Value {
    let (mut read, mut new) = (read.clone(), written.clone());
    let length = |config: &Map<String, Value>| config.get(LENGTH).and_then(Value::as_u64);
    // The multiple of the original length that YaRN targets does not replace a length that is long enough.
    if length(&read) >= Some(shape.seq as u64) {
        new.remove(LENGTH);
    }
    // A table of rotation that lacks the original length means that of the model.
    if length(&new) > length(&read)
        && let Some(rope) = &Family::of(shape.arch).rope
    {
        read.retain(|key, _| !rope.has(key));
    }
    let merged = inherit(Value::Object(new), &read, ids);
    let described = parse(Path::new(""), merged.to_string().as_bytes());
    if described.is_ok_and(|other| difference(shape, &other).is_none()) {
        return merged;
    }
    read.retain(|key, _| key.ends_with("_token_id"));
    inherit(Value::Object(written), &read, ids)
}

/// Restores keys of the original `config.json` or `generation_config.json` in that of a model that was trained from it.
/// Values that this export determines are not restored. Ids that end a text are merged from both.
fn inherit(written: Value, read: &Map<String, Value>, ids: TokenIds) -> Value {
    const OF_THIS_EXPORT: [&str; 7] =
        ["dtype", "torch_dtype", "tie_word_embeddings", "vocab_size", "n_positions", "n_ctx", FURTHER_BLOCKS];
    // Two of these name files of Python, which are not part of the export.
    const OF_ANOTHER: [&str; 5] =
        ["transformers_version", "_name_or_path", QUANTIZATION, "auto_map", "custom_pipelines"];
    if read.is_empty() {
        return written;
    }
    let mut config = read.clone();
    OF_ANOTHER.iter().for_each(|key| drop(config.remove(*key)));
    let Value::Object(written) = written else { return Value::Object(config) };
    for (key, value) in written {
        let longer = key == LENGTH && value.as_u64() > config.get(&key).and_then(Value::as_u64);
        if OF_THIS_EXPORT.contains(&&*key) || longer || !config.contains_key(&key) {
            config.insert(key, value);
        }
    }
    let ends = &mut config["eos_token_id"];
    match ids.end_of_text.map(Value::from) {
        None => {}
        Some(id) if ends.is_null() => *ends = id,
        Some(id) => match ends {
            Value::Array(list) if list.contains(&id) => {}
            Value::Array(list) => list.push(id),
            one if *one == id => {}
            one => *one = json!([one.clone(), id]),
        },
    }
    Value::Object(config)
}

/// Returns `generation_config.json`, from the original `config.json` and `generation_config.json`. Without this file,
/// libraries use the ids from the defaults of the architecture.
pub(super) fn generation(ids: TokenIds, config: &Map<String, Value>, read: &Map<String, Value>) -> Value {
    let bos = ids.bos.or(ids.end_of_text);
    let written = json!({"bos_token_id": bos, "eos_token_id": ids.end_of_text, "do_sample": false});
    let mut read = read.clone();
    // Libraries that find this file do not read the ids of the other one.
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        if let Some(id) = config.get(key).filter(|_| !read.contains_key(key)) {
            read.insert(key.into(), id.clone());
        }
    }
    inherit(written, &read, ids)
}

/// Returns the key of `config.json` for a key of `[model]`.
fn key_of(family: &Family, key: &'static str) -> &'static str {
    match key {
        "model.rope_theta" => family.rope.as_ref().map_or(key, |rope| rope.theta.0),
        "model.rope_scaling" | "model.windowed_rope_theta" => "rope_parameters",
        "model.rope_fraction" => "partial_rotary_factor",
        // Only families with such a bias can have this problem.
        "model.head_bias" => "tie_word_embeddings",
        "model.window" => "sliding_window",
        "model.window_pattern" => "layer_types",
        // These may follow from the heads.
        "model.head_dim" | "model.kv_heads" if !family.keys().any(|known| known.holds(key)) => {
            key_of(family, "model.heads")
        }
        _ => family.keys().find(|known| known.holds(key)).map_or(key, |known| known.0),
    }
}

#[cfg(test)]
mod tests;
