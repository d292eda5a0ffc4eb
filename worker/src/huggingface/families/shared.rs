//! Keys that several families have, and the family that the others differ from.

use xlaunch_spec::model::{Arch, ModelShape};

use super::Family;
use crate::huggingface::key::Meaning::{
    Activation, Cap, Derived, Flag, Implied, Nullable, Number, Only, Size,
};
use crate::huggingface::key::{Key, field};
use crate::huggingface::layers::Windows;
use crate::huggingface::rope::ROPE;
use crate::huggingface::tensor_names as names;

/// Sizes of most families: defaults of vocabulary, width, feed-forward width, blocks, heads and positions.
pub(super) const fn sizes([vocab, dim, ffn, layers, heads, seq]: [usize; 6]) -> [Key; 6] {
    [
        Key("vocab_size", Size(field!(vocab), vocab)),
        Key("hidden_size", Size(field!(dim), dim)),
        Key("intermediate_size", Size(field!(ffn), ffn)),
        Key("num_hidden_layers", Size(field!(layers), layers)),
        Key("num_attention_heads", Size(field!(heads), heads)),
        Key("max_position_embeddings", Size(field!(seq), seq)),
    ]
}

/// Key heads and their width. Without a default, they follow from the heads.
pub(super) const KV_HEADS: Key = Key("num_key_value_heads", Derived(field!(kv_heads), |shape| shape.heads));
pub(super) const HEAD_DIM: Key = Key("head_dim", Derived(field!(head_dim), divided_width));
pub(super) const GROUPED: [Key; 2] = [KV_HEADS, HEAD_DIM];

/// Same, where they always follow from the heads.
pub(super) const ONE_KV_HEAD_EACH: Key =
    Key("num_key_value_heads", Implied(field!(kv_heads), |shape| shape.heads));
pub(super) const WHOLE_WIDTH: Key = Key("head_dim", Implied(field!(head_dim), divided_width));

pub(super) const fn kv_heads_or_heads(kv_heads: usize) -> Key {
    Key("num_key_value_heads", Nullable(field!(kv_heads), kv_heads, |shape| shape.heads))
}

pub(super) const fn grouped(kv_heads: usize) -> [Key; 2] {
    [kv_heads_or_heads(kv_heads), HEAD_DIM]
}

/// Heads of this width, which follows from their number only if it is `null`.
pub(super) const fn heads_of_width(kv_heads: usize, width: usize) -> [Key; 2] {
    [kv_heads_or_heads(kv_heads), Key("head_dim", Nullable(field!(head_dim), width, divided_width))]
}

pub(super) fn divided_width(shape: &ModelShape) -> usize {
    shape.dim.checked_div(shape.heads).unwrap_or_default()
}

pub(super) const fn eps(name: &'static str, default: f64) -> Key {
    Key(name, Number(field!(norm_eps), default))
}

pub(super) const fn tied(default: bool) -> Key {
    Key("tie_word_embeddings", Flag(field!(tied), default))
}

pub(super) const ACT: Key = Key("hidden_act", Activation);
/// Biases of all four matrices of attention.
pub(super) const ATTENTION_BIAS: [Key; 2] = [
    Key("attention_bias", Flag(field!(qkv_bias), false)),
    Key("attention_bias", Flag(field!(attention_bias), false)),
];
pub(super) const MLP_BIAS: Key = Key("mlp_bias", Flag(field!(mlp_bias), false));

/// One key for the biases of attention and of feed-forward layers.
pub(super) const fn use_bias(default: bool) -> [Key; 3] {
    [
        Key("use_bias", Flag(field!(qkv_bias), default)),
        Key("use_bias", Flag(field!(attention_bias), default)),
        Key("use_bias", Flag(field!(mlp_bias), default)),
    ]
}

pub(super) const GELU_TANH: &[&str] = &["\"gelu_pytorch_tanh\"", "\"gelu_new\"", "\"gelu\""];
pub(super) const CAUSAL: Key = Key("use_bidirectional_attention", Only(&["false"]));
pub(super) const NO_QK_LAYERNORM: Key = Key("qk_layernorm", Only(&["false"]));

pub(super) const fn logit_cap(default: f64) -> Key {
    Key("final_logit_softcapping", Cap(field!(logit_softcap), default))
}

/// Keys and names that most families share.
pub(super) const LLAMA_FAMILY: Family = Family {
    arch: Arch::Llama,
    model_type: "llama",
    title: "Llama",
    class: "LlamaForCausalLM",
    keys: &[
        &sizes([32000, 4096, 11008, 32, 32, 2048]),
        &GROUPED,
        &[eps("rms_norm_eps", 1e-6), tied(false), ACT, MLP_BIAS],
        &ATTENTION_BIAS,
    ],
    windows: Windows::None,
    rope: Some(ROPE),
    still_blocks: false,
    without_effect: &["is_llama_config", "max_sequence_length"],
    divided: true,
    names: &names::LLAMA,
};
