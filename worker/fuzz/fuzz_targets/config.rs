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
    Keys { llama: bool, keys: Vec<(u8, Any<'a>)>, rope: Vec<(u8, Any<'a>)> },
}

#[derive(Arbitrary, Debug)]
enum Any<'a> {
    Null,
    Flag(bool),
    Small(u8),
    Size(u64),
    Number(f64),
    Text(&'a str),
    List,
}

const KEYS: [&str; 34] = [
    "activation_function",
    "add_cross_attention",
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_norm_epsilon",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "vocab_size",
    "n_ctx",
    "architectures",
    "dtype",
];
const ROPE: [&str; 8] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
];

impl Any<'_> {
    fn json(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Flag(flag) => json!(flag),
            Self::Small(size) => json!(size),
            Self::Size(size) => json!(size),
            Self::Number(number) => json!(number),
            Self::Text(text) => json!(text),
            Self::List => json!([]),
        }
    }
}

fn table(names: &[&str], keys: &[(u8, Any<'_>)]) -> Map<String, Value> {
    keys.iter().map(|(index, value)| (names[usize::from(*index) % names.len()].to_owned(), value.json())).collect()
}

fuzz_target!(|input: Input<'_>| {
    match input {
        Input::Text(text) => config(text),
        Input::Keys { llama, keys, rope } => {
            let mut root = Map::new();
            root.insert("model_type".into(), json!(if llama { "llama" } else { "gpt2" }));
            root.extend(table(&KEYS, &keys));
            if !rope.is_empty() {
                let mut parameters = table(&ROPE, &rope);
                parameters.entry("rope_type").or_insert(json!("llama3"));
                root.insert("rope_parameters".into(), Value::Object(parameters));
            }
            config(Value::Object(root).to_string().as_bytes());
        }
    }
});
