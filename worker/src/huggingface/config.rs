//! Converts `config.json` from and to a [`ModelShape`]. Pure.
//!
//! A key that affects the model's computation is read or, if this trainer computes something else, refused. Keys for
//! dropout and generation do not affect it and are ignored. Missing keys have the defaults of the `transformers`
//! library.

use std::path::Path;

use serde_json::{Map, Value, json};
use xlaunch_spec::model::{Arch, ModelShape, RopeScaling};

use super::ModelError;
use super::keys::Keys;

/// Ids with which generation starts and stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenIds {
    /// The end-of-text id, which also starts documents. Byte-level models have none.
    pub end_of_text: Option<u32>,
    /// The id that the tokenizer puts before a text.
    pub bos: Option<u32>,
}

/// The model that `config.json` describes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Described {
    /// Its sequence length is the longest one that the model supports.
    pub(super) shape: ModelShape,
    /// Positions that attention reaches; `None` for all. Here it always reaches all, which is the same for sequences
    /// that are no longer.
    pub(super) window: Option<usize>,
}

/// Reads `config.json`. `path` is for messages.
pub(super) fn parse(path: &Path, json: &[u8]) -> Result<Described, ModelError> {
    let invalid = |reason: String| ModelError::Read { path: path.into(), reason };
    let values: Map<String, Value> =
        serde_json::from_slice(json).map_err(|error| invalid(error.to_string()))?;
    let keys = Keys { path, values: &values };
    keys.only("quantization_config", &[])?;
    let (shape, window) = match values.get("model_type").and_then(Value::as_str) {
        Some("gpt2") => (gpt2(&keys)?, None),
        Some("llama") => (llama(&keys, &LLAMA)?, window(&keys, &LLAMA)?),
        Some("mistral") => (llama(&keys, &MISTRAL)?, window(&keys, &MISTRAL)?),
        _ => return Err(keys.refused("model_type", "only `gpt2`, `llama` and `mistral` are supported")),
    };
    shape.check().map_err(|invalid| {
        let key = key_of(shape.arch, invalid.key);
        keys.error(key, format!("{}; expected {}", invalid.problem, invalid.expected))
    })?;
    Ok(Described { shape, window })
}

/// Refuses sequences that are longer than the attention window of a model.
pub(super) fn check_context(path: &Path, window: Option<usize>, seq: usize) -> Result<(), ModelError> {
    let Some(window) = window.filter(|window| *window < seq) else { return Ok(()) };
    let problem = format!(
        "{window} is not supported with a context of {seq} tokens, as attention reaches all earlier positions here; a \
         context of at most {window} tokens works: set `model.seq` to at most {window}, as with `--set \
         model.seq={window}`"
    );
    Err(ModelError::Config { path: path.into(), key: WINDOW.into(), problem })
}

fn gpt2(keys: &Keys<'_>) -> Result<ModelShape, ModelError> {
    keys.only("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")])?;
    keys.only("scale_attn_weights", &[json!(true)])?;
    keys.only("scale_attn_by_inverse_layer_idx", &[json!(false)])?;
    keys.only("add_cross_attention", &[json!(false)])?;
    let (dim, heads) = (keys.size("n_embd", 768)?, keys.size("n_head", 12)?);
    Ok(ModelShape {
        layers: keys.size("n_layer", 12)?,
        heads,
        kv_heads: heads,
        head_dim: dim.checked_div(heads).unwrap_or_default(),
        dim,
        ffn: keys.size("n_inner", dim.saturating_mul(4))?,
        seq: keys.size("n_positions", 1024)?,
        vocab: keys.size("vocab_size", 50257)?,
        tied: keys.flag("tie_word_embeddings", true)?,
        norm_eps: keys.number("layer_norm_epsilon", 1e-5)?,
        ..Arch::Gpt2.base()
    })
}

/// The key of the positions that attention reaches.
const WINDOW: &str = "sliding_window";

/// Sizes of Llama-like models for keys that `config.json` lacks.
struct Defaults {
    ffn: usize,
    kv_heads: Option<usize>,
    seq: usize,
    /// Positions that attention reaches; `None` for all.
    window: Option<usize>,
}

const LLAMA: Defaults = Defaults { ffn: 11008, kv_heads: None, seq: 2048, window: None };
const MISTRAL: Defaults = Defaults { ffn: 14336, kv_heads: Some(8), seq: 131_072, window: Some(4096) };

/// Positions that attention reaches; `null` is not the same as no key.
fn window(keys: &Keys<'_>, defaults: &Defaults) -> Result<Option<usize>, ModelError> {
    let window = match keys.values.get(WINDOW) {
        None => defaults.window,
        Some(Value::Null) => None,
        Some(_) => Some(keys.size(WINDOW, 0)?),
    };
    match window {
        Some(0) => Err(keys.refused(WINDOW, "it must be at least 1, or null")),
        window => Ok(window),
    }
}

fn llama(keys: &Keys<'_>, defaults: &Defaults) -> Result<ModelShape, ModelError> {
    keys.only("hidden_act", &[json!("silu"), json!("swish")])?;
    keys.only("attention_bias", &[json!(false)])?;
    keys.only("mlp_bias", &[json!(false)])?;
    keys.only("partial_rotary_factor", &[json!(1.0), json!(1)])?;
    let (dim, heads) = (keys.size("hidden_size", 4096)?, keys.size("num_attention_heads", 32)?);
    let (rope_theta, rope_scaling) = rotary(keys)?;
    Ok(ModelShape {
        layers: keys.size("num_hidden_layers", 32)?,
        heads,
        kv_heads: keys.size("num_key_value_heads", defaults.kv_heads.unwrap_or(heads))?,
        head_dim: keys.size("head_dim", dim.checked_div(heads).unwrap_or_default())?,
        dim,
        ffn: keys.size("intermediate_size", defaults.ffn)?,
        seq: keys.size("max_position_embeddings", defaults.seq)?,
        vocab: keys.size("vocab_size", 32000)?,
        tied: keys.flag("tie_word_embeddings", false)?,
        norm_eps: keys.number("rms_norm_eps", 1e-6)?,
        rope_theta,
        rope_scaling,
        ..Arch::Llama.base()
    })
}

/// Returns base and scaling of the rotary embedding. Since transformers 5 they are in `rope_parameters`, before that in
/// `rope_theta` and `rope_scaling`.
fn rotary(keys: &Keys<'_>) -> Result<(f64, RopeScaling), ModelError> {
    let mut theta = keys.optional_number("rope_theta")?;
    let mut scaling = None;
    for name in ["rope_parameters", "rope_scaling"] {
        let Some(table) = keys.table(name)? else { continue };
        let inside = Keys { path: keys.path, values: table };
        let named = |error| nested(error, name);
        inside.only("partial_rotary_factor", &[json!(1.0), json!(1)]).map_err(named)?;
        if let Some(inner) = inside.optional_number("rope_theta").map_err(named)? {
            if theta.is_some_and(|outer| outer != inner) {
                return Err(keys.error("rope_theta", format!("differs from that in `{name}`, {inner}")));
            }
            theta = Some(inner);
        }
        let found = scaling_of(&inside).map_err(named)?;
        if scaling.is_some_and(|earlier| earlier != found) {
            return Err(keys.error(name, "differs from `rope_parameters`".into()));
        }
        scaling = Some(found);
    }
    Ok((theta.unwrap_or(1e4), scaling.unwrap_or_default()))
}

fn scaling_of(keys: &Keys<'_>) -> Result<RopeScaling, ModelError> {
    // `type` is the older name of the key.
    let key = if keys.values.contains_key("rope_type") { "rope_type" } else { "type" };
    match keys.values.get(key).and_then(Value::as_str) {
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: keys.required_number("factor")?,
            low_freq_factor: keys.required_number("low_freq_factor")?,
            high_freq_factor: keys.required_number("high_freq_factor")?,
            original_max_position_embeddings: keys.size("original_max_position_embeddings", 0)?,
        }),
        Some("default") => Ok(RopeScaling::Default),
        None if !keys.values.contains_key(key) && !keys.values.contains_key("factor") => {
            Ok(RopeScaling::Default)
        }
        _ => Err(keys.refused(key, "only `default` and `llama3` are supported")),
    }
}

/// Returns the `config.json` of a model.
pub(super) fn write(shape: &ModelShape, ids: TokenIds, dtype: &str) -> Value {
    let mut config = match shape.arch {
        Arch::Gpt2 => json!({
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "layer_norm_epsilon": shape.norm_eps,
            "model_type": "gpt2",
            "n_ctx": shape.seq,
            "n_embd": shape.dim,
            "n_head": shape.heads,
            "n_inner": shape.ffn,
            "n_layer": shape.layers,
            "n_positions": shape.seq,
            "reorder_and_upcast_attn": false,
            "resid_pdrop": 0.0,
            "scale_attn_by_inverse_layer_idx": false,
            "scale_attn_weights": true,
        }),
        _ => json!({
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.dim,
            "intermediate_size": shape.ffn,
            "max_position_embeddings": shape.seq,
            "mlp_bias": false,
            "model_type": "llama",
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "rms_norm_eps": shape.norm_eps,
            "rope_parameters": rope_parameters(shape, true),
            "rope_scaling": (shape.rope_scaling != RopeScaling::Default).then(|| rope_parameters(shape, false)),
            "rope_theta": shape.rope_theta,
        }),
    };
    config["bos_token_id"] = json!(ids.bos.or(ids.end_of_text));
    config["eos_token_id"] = json!(ids.end_of_text);
    config["dtype"] = json!(dtype);
    config["torch_dtype"] = json!(dtype);
    config["initializer_range"] = json!(0.02);
    config["tie_word_embeddings"] = json!(shape.tied);
    config["use_cache"] = json!(true);
    config["vocab_size"] = json!(shape.vocab);
    config
}

/// Restores keys of the original `config.json` or `generation_config.json` in that of a model that was trained from it.
/// Values that this export determines are not restored. Ids that end a text are merged from both.
pub(super) fn inherit(written: Value, read: &Map<String, Value>, ids: TokenIds) -> Value {
    const OF_THIS_EXPORT: [&str; 4] = ["dtype", "torch_dtype", "tie_word_embeddings", "vocab_size"];
    const OF_ANOTHER: [&str; 3] = ["transformers_version", "_name_or_path", "quantization_config"];
    const CONTEXT: [&str; 3] = ["max_position_embeddings", "n_positions", "n_ctx"];
    if read.is_empty() {
        return written;
    }
    let mut config = read.clone();
    OF_ANOTHER.iter().for_each(|key| drop(config.remove(*key)));
    let Value::Object(written) = written else { return Value::Object(config) };
    for (key, value) in written {
        let longer = CONTEXT.contains(&&*key) && value.as_u64() > config.get(&key).and_then(Value::as_u64);
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

/// Returns the rotary parameters. With `theta`, they include the base, as in transformers 5.
fn rope_parameters(shape: &ModelShape, theta: bool) -> Value {
    let mut parameters = json!(shape.rope_scaling);
    if theta {
        parameters["rope_theta"] = json!(shape.rope_theta);
    }
    parameters
}

/// Returns `generation_config.json`. Without this file, libraries use the ids from the defaults of the architecture.
pub(super) fn generation(ids: TokenIds) -> Value {
    json!({"bos_token_id": ids.bos.or(ids.end_of_text), "eos_token_id": ids.end_of_text, "do_sample": false})
}

/// Returns the key of `config.json` for a key of `[model]`.
fn key_of(arch: Arch, key: &str) -> &'static str {
    let names = match key {
        "model.layers" => ["n_layer", "num_hidden_layers"],
        "model.heads" => ["n_head", "num_attention_heads"],
        "model.kv_heads" => ["n_head", "num_key_value_heads"],
        "model.head_dim" => ["n_head", "head_dim"],
        "model.ffn" => ["n_inner", "intermediate_size"],
        "model.seq" => ["n_positions", "max_position_embeddings"],
        "model.vocab" => ["vocab_size", "vocab_size"],
        "model.norm_eps" => ["layer_norm_epsilon", "rms_norm_eps"],
        "model.rope_theta" => ["rope_theta", "rope_theta"],
        "model.rope_scaling" => ["rope_parameters", "rope_parameters"],
        _ => ["n_embd", "hidden_size"],
    };
    names[usize::from(arch != Arch::Gpt2)]
}

/// Prepends the name of a table to the key of an error.
fn nested(error: ModelError, table: &str) -> ModelError {
    match error {
        ModelError::Config { path, key, problem } => {
            ModelError::Config { path, key: format!("{table}.{key}"), problem }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::model::PRESETS;

    use super::*;

    fn describe(config: &Value) -> Result<Described, ModelError> {
        parse(Path::new("config.json"), config.to_string().as_bytes())
    }

    fn read(config: &Value) -> Result<ModelShape, ModelError> {
        describe(config).map(|described| described.shape)
    }

    #[test]
    fn configuration_that_was_written_is_read_as_the_same_shape() {
        for (name, preset) in &PRESETS {
            for tied in [true, false] {
                let shape = ModelShape { tied, norm_eps: 1.5e-6, ..preset.clone() };
                let config = write(&shape, TokenIds { end_of_text: Some(7), bos: None }, "float32");
                assert_eq!(read(&config).unwrap(), shape, "{name}");
                assert_eq!((&config["bos_token_id"], &config["eos_token_id"]), (&json!(7), &json!(7)));
                let config = write(&shape, TokenIds::default(), "float32");
                assert!(config["eos_token_id"].is_null() && config.get("eos_token_id").is_some());
            }
        }
        let wide = ModelShape { head_dim: 64, ..PRESETS[0].1.clone() };
        assert_eq!(read(&write(&wide, TokenIds::default(), "float32")).unwrap(), wide);
    }

    #[test]
    fn mistral_without_a_window_is_a_llama() {
        let config = |window: Value| {
            json!({
                "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
                "max_position_embeddings": 8192, "sliding_window": window,
            })
        };
        let shape = read(&config(Value::Null)).unwrap();
        assert_eq!((shape.arch, shape.kv_heads, shape.seq), (Arch::Llama, 2, 8192));
        for (window, expected) in [(Value::Null, None), (json!(4096), Some(4096)), (json!(8192), Some(8192))]
        {
            assert_eq!(
                describe(&config(window)).unwrap(),
                Described { shape: shape.clone(), window: expected }
            );
        }
        let mut old = config(Value::Null);
        old.as_object_mut().unwrap().remove("sliding_window");
        // The library's default is a window.
        assert_eq!(describe(&old).unwrap().window, Some(4096));
    }

    #[test]
    fn context_beyond_the_window_is_refused_with_the_one_that_works() {
        let path = Path::new("config.json");
        for (window, seq) in [(None, 1 << 20), (Some(4096), 4096), (Some(4096), 1)] {
            check_context(path, window, seq).unwrap();
        }
        let error = check_context(path, Some(4096), 8192).unwrap_err().to_string();
        for text in ["`sliding_window`: 4096", "8192 tokens", "`model.seq` to at most 4096"] {
            assert!(error.contains(text), "{text} in {error}");
        }
    }

    #[test]
    fn inherited_settings_are_written_back_unless_training_decides_them() {
        let read = json!({
            "model_type": "mistral", "eos_token_id": [2, 32000], "pad_token_id": 5, "max_position_embeddings": 512,
            "dtype": "bfloat16", "transformers_version": "4.1", "rope_theta": 500.0, "architectures": ["M"],
        });
        let shape = ModelShape { seq: 128, ..PRESETS[0].1.clone() };
        let ids = TokenIds { end_of_text: Some(7), bos: Some(1) };
        let config = inherit(write(&shape, ids, "float32"), read.as_object().unwrap(), ids);
        for (key, value) in [
            ("eos_token_id", json!([2, 32000, 7])),
            ("pad_token_id", json!(5)),
            ("bos_token_id", json!(1)),
            ("max_position_embeddings", json!(512)),
            ("model_type", json!("mistral")),
            ("dtype", json!("float32")),
            ("rope_theta", json!(500.0)),
        ] {
            assert_eq!(config[key], value, "{key}");
        }
        assert!(config.get("transformers_version").is_none());
        assert_eq!(inherit(json!({"a": 1}), &Map::new(), ids), json!({"a": 1}));
    }

    #[test]
    fn published_configurations_are_read_as_presets() {
        let preset = |name: &str| PRESETS.iter().find(|(preset, _)| *preset == name).unwrap().1.clone();
        let gpt2 = json!({
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
            "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
            "vocab_size": 50257
        });
        assert_eq!(read(&gpt2).unwrap(), preset("gpt2-124m"));
        let llama = json!({
            "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
            "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256
        });
        assert_eq!(read(&llama).unwrap(), ModelShape { seq: 131_072, ..preset("llama-1b") });
        let smollm = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 576,
            "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192,
            "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
            "num_key_value_heads": 3, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
            "rope_theta": 100000, "tie_word_embeddings": true, "vocab_size": 49152
        });
        assert_eq!(read(&smollm).unwrap(), ModelShape { seq: 8192, ..preset("smollm2-135m") });
    }

    #[test]
    fn what_this_trainer_does_not_compute_is_refused_by_its_key() {
        let refused = |arch: &str, key: &str, value: Value| {
            let index = if arch == "gpt2" { 2 } else { 7 };
            let mut config = write(&PRESETS[index].1, TokenIds::default(), "float32");
            match key.split_once('.') {
                Some((table, key)) => config[table][key] = value,
                None => config[key] = value,
            }
            let error = read(&config).unwrap_err();
            let ModelError::Config { key: named, .. } = &error else { panic!("{error}") };
            assert_eq!(named, key, "{error}");
        };
        for (key, value) in [
            ("activation_function", json!("relu")),
            ("activation_function", json!("gelu")),
            ("scale_attn_weights", json!(false)),
            ("scale_attn_by_inverse_layer_idx", json!(true)),
            ("add_cross_attention", json!(true)),
            ("n_head", json!(7)),
            ("n_layer", json!(-1)),
            ("n_layer", json!(1u64 << 40)),
            ("n_inner", json!("wide")),
            ("layer_norm_epsilon", json!(0)),
            ("quantization_config", json!({"bits": 4})),
        ] {
            refused("gpt2", key, value);
        }
        for (key, value) in [
            ("model_type", json!("mamba\u{1b}[31m")),
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("mlp_bias", json!(true)),
            ("sliding_window", json!(0)),
            ("sliding_window", json!("long")),
            ("partial_rotary_factor", json!(0.5)),
            ("rope_theta", json!(7)),
            ("rope_scaling", json!({"rope_type": "default"})),
            ("rope_parameters.rope_type", json!("yarn")),
            ("rope_parameters.partial_rotary_factor", json!(0.5)),
            ("num_key_value_heads", json!(5)),
            ("head_dim", json!(12)),
            ("tie_word_embeddings", json!("yes")),
        ] {
            refused("llama", key, value);
        }
        let mut config = write(&PRESETS[0].1, TokenIds::default(), "float32");
        config["rope_scaling"] = json!({"type": "llama3"});
        assert!(read(&config).unwrap_err().to_string().contains("`rope_scaling.factor`"));
        // A window that hides nothing, and another name for the same function.
        let mut config = write(&PRESETS[0].1, TokenIds::default(), "float32");
        (config["sliding_window"], config["hidden_act"]) = (json!(128), json!("swish"));
        assert_eq!(read(&config).unwrap(), PRESETS[0].1);
    }

    #[test]
    fn text_that_is_not_an_object_and_control_characters_give_safe_errors() {
        for text in [&b"[1]"[..], b"{", b"", b"\xff", b"{\"model_type\": \"\x1b[31m\"}"] {
            let error = parse(Path::new("config.json"), text).unwrap_err().to_string();
            assert!(!error.chars().any(char::is_control), "{error:?}");
        }
        let error = read(&json!({"model_type": "\u{1b}[31m"})).unwrap_err().to_string();
        assert!(!error.chars().any(char::is_control), "{error:?}");
    }
}
