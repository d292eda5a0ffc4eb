//! Families of Hugging Face's models: one table per family of the keys of `config.json`. Defaults are those of the
//! `transformers` library.
//!
//! A family's [`base`](xlaunch_spec::model::Arch::base) has what none of its keys can change.

use serde_json::{Map, Value};
use xlaunch_spec::model::{Arch, ModelShape, Parallel};

use super::key::Meaning::{
    Activation, Cap, Derived, Flag, Implied, Nullable, Number, Only, Parallel as SideBySide, Positive,
    QkNorm, QueryScalar, QueryScale, Reciprocal, SharedWidth, Size, Unused,
};
use super::key::{Field, Key, field};
use super::layers::Windows;
use super::rope::{ROPE, Rope, Scalings};
use super::scaling;
use super::tensor_names::{self as names, Names};
use super::without_effect::{FURTHER_BLOCKS, QUANTIZATION};

/// A family of models.
#[derive(Debug)]
pub(crate) struct Family {
    pub(super) arch: Arch,
    /// Value of `model_type`.
    pub(super) model_type: &'static str,
    /// Name for people.
    pub(super) title: &'static str,
    /// The library's class.
    pub(super) class: &'static str,
    /// Keys in the order in which they are read.
    pub(super) keys: &'static [&'static [Key]],
    pub(super) windows: Windows,
    /// Rotary embedding; `None` for learned positions.
    pub(super) rope: Option<Rope>,
    /// Some blocks have no rotation.
    pub(super) still_blocks: bool,
    /// Keys without effect on results, in addition to [`WITHOUT_EFFECT`](super::without_effect::WITHOUT_EFFECT).
    pub(super) without_effect: &'static [&'static str],
    /// The library's class refuses a width that is not a multiple of the number of heads.
    pub(super) divided: bool,
    pub(crate) names: &'static Names,
}

impl Family {
    /// Returns the table of a family.
    pub(crate) fn of(arch: Arch) -> &'static Self {
        FAMILIES.iter().find(|family| family.arch == arch).unwrap_or(&FAMILIES[0])
    }

    /// Returns the table of the type that a `config.json` names.
    pub(super) fn named(config: &Map<String, Value>) -> Option<&'static Self> {
        let model_type = config.get("model_type")?.as_str()?;
        FAMILIES.iter().find(|family| family.model_type == model_type)
    }

    /// Returns all keys with a meaning of their own.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'static Key> {
        self.keys.iter().copied().flatten()
    }
}

/// Sizes of most families: defaults of vocabulary, width, feed-forward width, blocks, heads and positions.
const fn sizes([vocab, dim, ffn, layers, heads, seq]: [usize; 6]) -> [Key; 6] {
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
const KV_HEADS: Key = Key("num_key_value_heads", Derived(field!(kv_heads), |shape| shape.heads));
const HEAD_DIM: Key = Key("head_dim", Derived(field!(head_dim), divided_width));
const GROUPED: [Key; 2] = [KV_HEADS, HEAD_DIM];

/// Same, where they always follow from the heads.
const ONE_KV_HEAD_EACH: Key = Key("num_key_value_heads", Implied(field!(kv_heads), |shape| shape.heads));
const WHOLE_WIDTH: Key = Key("head_dim", Implied(field!(head_dim), divided_width));

const fn kv_heads_or_heads(kv_heads: usize) -> Key {
    Key("num_key_value_heads", Nullable(field!(kv_heads), kv_heads, |shape| shape.heads))
}

const fn grouped(kv_heads: usize) -> [Key; 2] {
    [kv_heads_or_heads(kv_heads), HEAD_DIM]
}

/// Heads of this width, which follows from their number only if it is `null`.
const fn heads_of_width(kv_heads: usize, width: usize) -> [Key; 2] {
    [kv_heads_or_heads(kv_heads), Key("head_dim", Nullable(field!(head_dim), width, divided_width))]
}

fn divided_width(shape: &ModelShape) -> usize {
    shape.dim.checked_div(shape.heads).unwrap_or_default()
}

const fn eps(name: &'static str, default: f64) -> Key {
    Key(name, Number(field!(norm_eps), default))
}

const fn tied(default: bool) -> Key {
    Key("tie_word_embeddings", Flag(field!(tied), default))
}

const ACT: Key = Key("hidden_act", Activation);
/// Biases of all four matrices of attention.
const ATTENTION_BIAS: [Key; 2] = [
    Key("attention_bias", Flag(field!(qkv_bias), false)),
    Key("attention_bias", Flag(field!(attention_bias), false)),
];
const MLP_BIAS: Key = Key("mlp_bias", Flag(field!(mlp_bias), false));

/// One key for the biases of attention and of feed-forward layers.
const fn use_bias(default: bool) -> [Key; 3] {
    [
        Key("use_bias", Flag(field!(qkv_bias), default)),
        Key("use_bias", Flag(field!(attention_bias), default)),
        Key("use_bias", Flag(field!(mlp_bias), default)),
    ]
}

const GELU_TANH: &[&str] = &["\"gelu_pytorch_tanh\"", "\"gelu_new\"", "\"gelu\""];
const CAUSAL: Key = Key("use_bidirectional_attention", Only(&["false"]));
const NO_QK_LAYERNORM: Key = Key("qk_layernorm", Only(&["false"]));

const fn logit_cap(default: f64) -> Key {
    Key("final_logit_softcapping", Cap(field!(logit_softcap), default))
}

/// Keys and names that most families share.
const LLAMA_FAMILY: Family = Family {
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

pub(super) static FAMILIES: [Family; 30] = [
    LLAMA_FAMILY,
    Family {
        arch: Arch::Gpt2,
        model_type: "gpt2",
        title: "GPT-2",
        class: "GPT2LMHeadModel",
        keys: &[&[
            Key("vocab_size", Size(field!(vocab), 50257)),
            Key("n_embd", Size(field!(dim), 768)),
            Key("n_layer", Size(field!(layers), 12)),
            Key("n_head", Size(field!(heads), 12)),
            ONE_KV_HEAD_EACH,
            WHOLE_WIDTH,
            Key("n_positions", Size(field!(seq), 1024)),
            Key("n_inner", Derived(field!(ffn), |shape| shape.dim.saturating_mul(4))),
            eps("layer_norm_epsilon", 1e-5),
            tied(true),
            Key("activation_function", Activation),
            Key("scale_attn_weights", Only(&["true"])),
            Key("scale_attn_by_inverse_layer_idx", Only(&["false"])),
            Key("add_cross_attention", Only(&["false"])),
        ]],
        rope: None,
        without_effect: &["n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"],
        names: &names::GPT2,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Mistral,
        model_type: "mistral",
        title: "Mistral",
        class: "MistralForCausalLM",
        keys: MISTRAL_KEYS,
        windows: Windows::All(Some(4096)),
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Qwen2,
        model_type: "qwen2",
        title: "Qwen2",
        class: "Qwen2ForCausalLM",
        keys: &[
            &sizes([151_936, 4096, 22016, 32, 32, 32768]),
            &grouped(32),
            &[eps("rms_norm_eps", 1e-6), tied(false), ACT],
        ],
        windows: Windows::Switched(4096),
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Qwen3,
        model_type: "qwen3",
        title: "Qwen3",
        class: "Qwen3ForCausalLM",
        keys: &[
            &sizes([151_936, 4096, 22016, 32, 32, 32768]),
            &heads_of_width(32, 128),
            &[eps("rms_norm_eps", 1e-6), tied(false), ACT],
            &ATTENTION_BIAS,
        ],
        windows: Windows::Switched(4096),
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::SmolLm3,
        model_type: "smollm3",
        title: "SmolLM3",
        class: "SmolLM3ForCausalLM",
        keys: &[
            &sizes([128_256, 2048, 11008, 36, 16, 32768]),
            &grouped(4),
            &[eps("rms_norm_eps", 1e-6), tied(true), ACT, MLP_BIAS],
            &ATTENTION_BIAS,
        ],
        windows: Windows::Unrotated,
        rope: Some(Rope { theta: ("rope_theta", 2e6), ..ROPE }),
        still_blocks: true,
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Olmo2,
        model_type: "olmo2",
        title: "OLMo 2",
        class: "Olmo2ForCausalLM",
        keys: OLMO_KEYS,
        names: &names::OLMO2,
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Olmo3,
        model_type: "olmo3",
        title: "OLMo 3",
        class: "Olmo3ForCausalLM",
        keys: OLMO_KEYS,
        windows: Windows::Pattern(4096, 4),
        rope: Some(Rope { theta: ("rope_theta", 5e5), windowed: Some((5e5, None)), ..ROPE }),
        names: &names::OLMO2,
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Gemma,
        model_type: "gemma",
        title: "Gemma",
        class: "GemmaForCausalLM",
        keys: &[
            &sizes([256_000, 3072, 24576, 28, 16, 8192]),
            &heads_of_width(16, 256),
            &[
                eps("rms_norm_eps", 1e-6),
                tied(true),
                // Published files say `gelu` and mean its approximation.
                Key("hidden_act", Only(GELU_TANH)),
                Key("hidden_activation", Only(GELU_TANH)),
                CAUSAL,
            ],
            &ATTENTION_BIAS,
        ],
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Gemma2,
        model_type: "gemma2",
        title: "Gemma 2",
        class: "Gemma2ForCausalLM",
        keys: &[
            &sizes([256_000, 2304, 9216, 26, 8, 8192]),
            &heads_of_width(4, 256),
            &GEMMA_KEYS,
            &[Key("attn_logit_softcapping", Cap(field!(attention_softcap), 50.0)), logit_cap(30.0)],
            &ATTENTION_BIAS,
        ],
        windows: Windows::Pattern(4096, 2),
        without_effect: &["hidden_act", "cache_implementation", "sliding_window_size"],
        names: &names::GEMMA2,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Gemma3,
        model_type: "gemma3_text",
        title: "Gemma 3",
        class: "Gemma3ForCausalLM",
        keys: &[
            &sizes([262_208, 2304, 9216, 26, 8, 131_072]),
            &heads_of_width(4, 256),
            &GEMMA_KEYS,
            // The library's class ignores the first of these.
            &[Key("attn_logit_softcapping", Only(&["null"])), logit_cap(0.0)],
            &ATTENTION_BIAS,
        ],
        windows: Windows::Pattern(4096, 6),
        rope: Some(Rope {
            theta: ("rope_theta", 1e6),
            windowed: Some((1e4, Some("rope_local_base_freq"))),
            ..ROPE
        }),
        without_effect: &["_sliding_window_pattern", "cache_implementation"],
        names: &names::GEMMA2,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Phi,
        model_type: "phi",
        title: "Phi",
        class: "PhiForCausalLM",
        keys: &[
            &sizes([51200, 2048, 8192, 24, 32, 2048]),
            &GROUPED,
            &[eps("layer_norm_eps", 1e-5), tied(false), ACT, NO_QK_LAYERNORM],
        ],
        rope: Some(Rope { fraction: Some(("partial_rotary_factor", 0.5)), ..ROPE }),
        without_effect: &[],
        divided: false,
        names: &names::PHI,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Phi3,
        model_type: "phi3",
        title: "Phi 3",
        class: "Phi3ForCausalLM",
        keys: &[
            &sizes([32064, 3072, 8192, 32, 32, 4096]),
            &GROUPED,
            &[eps("rms_norm_eps", 1e-5), tied(false), ACT],
        ],
        windows: Windows::All(None),
        rope: Some(Rope {
            fraction: Some(("partial_rotary_factor", 1.0)),
            scalings: Scalings::LongRope(4096),
            ..ROPE
        }),
        without_effect: &["full_attn_mod", "interpolate_factor"],
        divided: false,
        names: &names::PHI3,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::StableLm,
        model_type: "stablelm",
        title: "StableLM",
        class: "StableLmForCausalLM",
        keys: &[
            &sizes([50304, 2560, 6912, 32, 32, 4096]),
            &[
                kv_heads_or_heads(32),
                WHOLE_WIDTH,
                eps("layer_norm_eps", 1e-5),
                tied(false),
                ACT,
                NO_QK_LAYERNORM,
                Key("use_qkv_bias", Flag(field!(qkv_bias), false)),
                Key("use_parallel_residual", SideBySide(Parallel::SharedNorm, false)),
            ],
        ],
        rope: Some(Rope { fraction: Some(("partial_rotary_factor", 0.25)), ..ROPE }),
        without_effect: &[],
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::StarCoder2,
        model_type: "starcoder2",
        title: "StarCoder2",
        class: "Starcoder2ForCausalLM",
        keys: &[
            &sizes([49152, 3072, 12288, 30, 24, 4096]),
            &grouped(2),
            &[eps("norm_epsilon", 1e-5), tied(true), ACT],
            &use_bias(true),
        ],
        windows: Windows::All(None),
        without_effect: &[
            "activation_function",
            "attention_softmax_in_fp32",
            "layer_norm_epsilon",
            "mlp_type",
            "norm_type",
            "scale_attention_softmax_in_fp32",
            "scale_attn_weights",
        ],
        divided: false,
        names: &names::STARCODER2,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Granite,
        model_type: "granite",
        title: "Granite",
        class: "GraniteForCausalLM",
        keys: &[
            &sizes([32000, 4096, 11008, 32, 32, 2048]),
            &GROUPED,
            &[
                eps("rms_norm_eps", 1e-6),
                tied(false),
                ACT,
                MLP_BIAS,
                Key("embedding_multiplier", Number(field!(embedding_scale), 1.0)),
                Key("residual_multiplier", Number(field!(residual_scale), 1.0)),
                Key("attention_multiplier", QueryScale(1.0)),
                Key("logits_scaling", Reciprocal(field!(logit_scale), 1.0)),
            ],
            &ATTENTION_BIAS,
        ],
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::GptNeoX,
        model_type: "gpt_neox",
        title: "GPT-NeoX",
        class: "GPTNeoXForCausalLM",
        keys: &[
            &sizes([50432, 6144, 24576, 44, 64, 2048]),
            &[
                ONE_KV_HEAD_EACH,
                WHOLE_WIDTH,
                eps("layer_norm_eps", 1e-5),
                tied(false),
                ACT,
                Key("attention_bias", Flag(field!(qkv_bias), true)),
                Key("attention_bias", Flag(field!(attention_bias), true)),
                Key("use_parallel_residual", SideBySide(Parallel::TwoNorms, true)),
            ],
        ],
        rope: Some(Rope { theta: ("rotary_emb_base", 1e4), fraction: Some(("rotary_pct", 0.25)), ..ROPE }),
        without_effect: &["attention_probs_dropout_prob", "hidden_dropout_prob"],
        names: &names::GPT_NEOX,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Arcee,
        model_type: "arcee",
        title: "Arcee",
        class: "ArceeForCausalLM",
        keys: &[
            &sizes([32000, 2560, 18432, 32, 32, 4096]),
            &GROUPED,
            &[eps("rms_norm_eps", 1e-5), tied(false), ACT, MLP_BIAS],
            &ATTENTION_BIAS,
        ],
        without_effect: &[],
        names: &names::ARCEE,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Ernie45,
        model_type: "ernie4_5",
        title: "ERNIE 4.5",
        class: "Ernie4_5ForCausalLM",
        keys: &[
            &sizes([103_424, 1024, 3072, 18, 16, 131_072]),
            &heads_of_width(2, 128),
            &[eps("rms_norm_eps", 1e-5), tied(true), ACT],
            &use_bias(false),
        ],
        rope: Some(Rope { theta: ("rope_theta", 5e5), ..ROPE }),
        without_effect: &[],
        divided: false,
        names: &names::ERNIE45,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Exaone4,
        model_type: "exaone4",
        title: "EXAONE 4",
        class: "Exaone4ForCausalLM",
        keys: &[
            &sizes([102_400, 4096, 16384, 32, 32, 2048]),
            &grouped(32),
            &[eps("rms_norm_eps", 1e-5), tied(false), ACT],
        ],
        windows: Windows::Rotated(4096, 4),
        without_effect: &[],
        divided: false,
        names: &names::OLMO2,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Glm,
        model_type: "glm",
        title: "GLM",
        class: "GlmForCausalLM",
        keys: GLM_KEYS,
        rope: GLM_ROPE,
        without_effect: &[],
        divided: false,
        names: &names::GLM,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Glm4,
        model_type: "glm4",
        title: "GLM-4",
        class: "Glm4ForCausalLM",
        keys: GLM_KEYS,
        rope: GLM_ROPE,
        without_effect: &[],
        divided: false,
        names: &names::GLM4,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Ministral,
        model_type: "ministral",
        title: "Ministral",
        class: "MinistralForCausalLM",
        keys: MISTRAL_KEYS,
        windows: Windows::Listed(4096),
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::SeedOss,
        model_type: "seed_oss",
        title: "Seed-OSS",
        class: "SeedOssForCausalLM",
        keys: &[
            &sizes([155_136, 4096, 27648, 64, 80, 524_288]),
            &heads_of_width(8, 128),
            &[
                eps("rms_norm_eps", 1e-6),
                tied(false),
                ACT,
                Key("attention_bias", Flag(field!(qkv_bias), true)),
                Key("attention_out_bias", Flag(field!(attention_bias), false)),
                MLP_BIAS,
                // By default, the library's class drops a tenth of the outputs of layers in training.
                Key("residual_dropout", Unused("0.0")),
            ],
        ],
        without_effect: &[],
        divided: false,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Mixtral,
        model_type: "mixtral",
        title: "Mixtral",
        class: "MixtralForCausalLM",
        keys: &[
            &sizes([32000, 4096, 14336, 32, 32, 4096 * 32]),
            &grouped(8),
            &[
                eps("rms_norm_eps", 1e-5),
                tied(false),
                ACT,
                Key("num_local_experts", Size(field!(experts), 8)),
                experts_per_token(2),
                Key("router_jitter_noise", Only(&["0.0"])),
                NO_ROUTER_LOGITS,
            ],
        ],
        windows: Windows::All(None),
        rope: Some(Rope { theta: ("rope_theta", 1e6), ..ROPE }),
        without_effect: &[AUX_LOSS],
        divided: false,
        names: &names::MIXTRAL,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Olmoe,
        model_type: "olmoe",
        title: "OLMoE",
        class: "OlmoeForCausalLM",
        keys: &[
            &sizes([50304, 2048, 2048, 16, 16, 4096]),
            &[
                kv_heads_or_heads(16),
                WHOLE_WIDTH,
                eps("rms_norm_eps", 1e-5),
                tied(false),
                ACT,
                Key("num_experts", Size(field!(experts), 64)),
                experts_per_token(8),
                NORMALISE,
                Key("clip_qkv", Only(&["null"])),
                NO_ROUTER_LOGITS,
            ],
            &ATTENTION_BIAS,
        ],
        without_effect: &[AUX_LOSS],
        names: &names::EXPERT_MATRICES,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Qwen3Moe,
        model_type: "qwen3_moe",
        title: "Qwen3-MoE",
        class: "Qwen3MoeForCausalLM",
        keys: &[
            &sizes([151_936, 2048, 6144, 24, 32, 32768]),
            &grouped(4),
            &[
                eps("rms_norm_eps", 1e-6),
                tied(false),
                ACT,
                Key("moe_intermediate_size", Size(field!(expert_ffn), 768)),
                // Version 5 of the library writes the second name.
                Key("num_experts", Size(field!(experts), 128)),
                Key("num_local_experts", Derived(field!(experts), |shape| shape.experts)),
                experts_per_token(8),
                NORMALISE,
                Key("decoder_sparse_step", Only(&["1"])),
                Key("use_sliding_window", Only(&["false"])),
                NO_ROUTER_LOGITS,
            ],
            &ATTENTION_BIAS,
        ],
        without_effect: &[AUX_LOSS, "sliding_window", "max_window_layers"],
        divided: false,
        names: &names::EXPERT_MATRICES,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Qwen2Moe,
        model_type: "qwen2_moe",
        title: "Qwen2-MoE",
        class: "Qwen2MoeForCausalLM",
        keys: &[
            &sizes([151_936, 2048, 5632, 24, 16, 32768]),
            &grouped(16),
            &[
                eps("rms_norm_eps", 1e-6),
                tied(false),
                ACT,
                Key("moe_intermediate_size", Size(field!(expert_ffn), 1408)),
                Key("shared_expert_intermediate_size", SharedWidth(5632)),
                Key("num_experts", Size(field!(experts), 60)),
                Key("num_local_experts", Derived(field!(experts), |shape| shape.experts)),
                experts_per_token(4),
                NORMALISE,
                Key("qkv_bias", Flag(field!(qkv_bias), true)),
                Key("decoder_sparse_step", Only(&["1"])),
                Key("use_sliding_window", Only(&["false"])),
                NO_ROUTER_LOGITS,
            ],
        ],
        windows: Windows::Switched(4096),
        without_effect: &[AUX_LOSS],
        divided: false,
        names: &names::QWEN2_MOE,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::Glm4Moe,
        model_type: "glm4_moe",
        title: "GLM-4.5",
        class: "Glm4MoeForCausalLM",
        keys: &[
            &sizes([151_552, 4096, 10944, 46, 96, 131_072]),
            &grouped(8),
            &[
                eps("rms_norm_eps", 1e-5),
                tied(false),
                ACT,
                Key("attention_bias", Flag(field!(qkv_bias), false)),
                Key("use_qk_norm", QkNorm(false)),
                Key("moe_intermediate_size", Size(field!(expert_ffn), 1408)),
                Key("n_shared_experts", Size(field!(shared_experts), 1)),
                Key("n_routed_experts", Size(field!(experts), 128)),
                Key("num_local_experts", Derived(field!(experts), |shape| shape.experts)),
                experts_per_token(8),
                Key("norm_topk_prob", Flag(field!(normalise), true)),
                Key("routed_scaling_factor", Number(field!(routed_scale), 1.0)),
                Key("first_k_dense_replace", Size(field!(dense_layers), 1)),
                Key("n_group", Only(&["1"])),
                Key("topk_group", Only(&["1"])),
                // Blocks that predict further tokens, which the library's class does not read either.
                Key(FURTHER_BLOCKS, Unused("0")),
                NO_ROUTER_LOGITS,
            ],
        ],
        rope: Some(Rope { fraction: Some(("partial_rotary_factor", 0.5)), ..ROPE }),
        without_effect: &[AUX_LOSS, "num_mtp_layers"],
        divided: false,
        names: &names::GLM4_MOE,
        ..LLAMA_FAMILY
    },
    Family {
        arch: Arch::GptOss,
        model_type: "gpt_oss",
        title: "gpt-oss",
        class: "GptOssForCausalLM",
        keys: &[
            &sizes([201_088, 2880, 2880, 36, 64, 131_072]),
            &heads_of_width(8, 64),
            &[
                eps("rms_norm_eps", 1e-5),
                tied(false),
                // The library's class has its own function, whatever this key says.
                Key("hidden_act", Only(&["\"silu\""])),
                Key("swiglu_alpha", Only(&["1.702"])),
                Key("swiglu_limit", Positive(field!(glu_limit), 7.0)),
                Key("num_local_experts", Size(field!(experts), 128)),
                experts_per_token(4),
                Key("attention_bias", Flag(field!(qkv_bias), true)),
                Key("attention_bias", Flag(field!(attention_bias), true)),
                NO_ROUTER_LOGITS,
            ],
        ],
        windows: Windows::Pattern(128, 2),
        rope: Some(Rope {
            theta: ("rope_theta", 1.5e5),
            default_scaling: scaling::default_of_gpt_oss,
            ..ROPE
        }),
        without_effect: &[AUX_LOSS, "experts_per_token", "initial_context_length", QUANTIZATION],
        divided: false,
        names: &names::GPT_OSS,
        ..LLAMA_FAMILY
    },
];

const fn experts_per_token(default: usize) -> Key {
    Key("num_experts_per_tok", Size(field!(experts_per_token), default))
}

const NORMALISE: Key = Key("norm_topk_prob", Flag(field!(normalise), false));
const NO_ROUTER_LOGITS: Key = Key("output_router_logits", Only(&["false"]));
/// Factor of a loss in training, which is a key of `[train]` here.
const AUX_LOSS: &str = "router_aux_loss_coef";

const MISTRAL_KEYS: &[&[Key]] = &[
    &sizes([32000, 4096, 14336, 32, 32, 4096 * 32]),
    &grouped(8),
    &[eps("rms_norm_eps", 1e-6), tied(false), ACT],
];

const OLMO_KEYS: &[&[Key]] = &[
    &sizes([50304, 4096, 11008, 32, 32, 2048]),
    &GROUPED,
    &[eps("rms_norm_eps", 1e-5), tied(false), ACT],
    &ATTENTION_BIAS,
];

const GLM_KEYS: &[&[Key]] = &[
    &sizes([151_552, 4096, 13696, 40, 32, 131_072]),
    &heads_of_width(2, 128),
    &[eps("rms_norm_eps", 1.5625e-7), tied(false), ACT, Key("attention_bias", Flag(field!(qkv_bias), true))],
];
const GLM_ROPE: Option<Rope> = Some(Rope { fraction: Some(("partial_rotary_factor", 0.5)), ..ROPE });

const GEMMA_KEYS: [Key; 5] = [
    eps("rms_norm_eps", 1e-6),
    tied(true),
    Key("hidden_activation", Activation),
    Key("query_pre_attn_scalar", QueryScalar(256.0)),
    CAUSAL,
];
