//! `config.json` of a model in Hugging Face's layout: an accepted file has a valid shape, and an export of it is read
//! back with the same shape.
#![no_main]

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};
use xlaunch_worker::fuzz::config;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Text(&'a [u8]),
    Keys { family: u8, keys: Vec<(u8, Any<'a>)>, rope: Vec<(u8, Any<'a>)> },
}

#[derive(Arbitrary, Debug)]
enum Any<'a> {
    Null,
    Flag(bool),
    Small(u8),
    Size(u64),
    Number(f64),
    Text(&'a str),
    /// Numbers, as of blocks without rotation.
    Numbers(Vec<u8>),
    /// Kinds of blocks.
    Kinds(Vec<bool>),
}

const TYPES: [&str; 24] = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "olmo2",
    "olmo3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "stablelm",
    "starcoder2",
    "granite",
    "gpt_neox",
    "arcee",
    "ernie4_5",
    "exaone4",
    "glm",
    "glm4",
    "ministral",
    "seed_oss",
];
const KEYS: [&str; 63] = [
    "activation_function",
    "add_cross_attention",
    "architectures",
    "attention_bias",
    "attention_multiplier",
    "attention_out_bias",
    "attn_logit_softcapping",
    "dtype",
    "embedding_multiplier",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layer_types",
    "logits_scaling",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "n_ctx",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "no_rope_layer_interval",
    "no_rope_layers",
    "norm_epsilon",
    "num_attention_heads",
    "num_experts",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "qk_layernorm",
    "quantization_config",
    "query_pre_attn_scalar",
    "residual_dropout",
    "residual_multiplier",
    "rms_norm_eps",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_emb_base",
    "rotary_pct",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "sliding_window",
    "sliding_window_pattern",
    "swiglu_limit",
    "tie_word_embeddings",
    "torch_dtype",
    "use_bias",
    "use_bidirectional_attention",
    "use_parallel_residual",
    "use_qkv_bias",
    "use_sliding_window",
    "vocab_size",
];
const ROPE: [&str; 13] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
    "mscale",
];
const SCALINGS: [&str; 5] = ["default", "linear", "dynamic", "yarn", "llama3"];
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

impl Any<'_> {
    fn json(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Flag(flag) => json!(flag),
            Self::Small(size) => json!(size),
            Self::Size(size) => json!(size),
            Self::Number(number) => json!(number),
            Self::Text(text) => json!(text),
            Self::Numbers(list) => json!(list),
            Self::Kinds(list) => list.iter().map(|sliding| KINDS[usize::from(*sliding)]).collect(),
        }
    }
}

fn table(names: &[&str], keys: &[(u8, Any<'_>)]) -> Map<String, Value> {
    keys.iter().map(|(index, value)| (names[usize::from(*index) % names.len()].to_owned(), value.json())).collect()
}

fuzz_target!(|input: Input<'_>| {
    match input {
        Input::Text(text) => config(text),
        Input::Keys { family, keys, rope } => {
            let mut root = Map::new();
            let kind = TYPES[usize::from(family) % TYPES.len()];
            root.insert("model_type".into(), json!(kind));
            root.extend(table(&KEYS, &keys));
            if !rope.is_empty() {
                let mut parameters = table(&ROPE, &rope);
                let scaling = SCALINGS[rope.len() % SCALINGS.len()];
                parameters.entry("rope_type").or_insert(json!(scaling));
                let parameters = Value::Object(parameters);
                let by_kind = matches!(kind, "gemma3_text" | "olmo3");
                let parameters = if by_kind { json!({"full_attention": parameters}) } else { parameters };
                root.insert("rope_parameters".into(), parameters);
            }
            config(Value::Object(root).to_string().as_bytes());
        }
    }
});
