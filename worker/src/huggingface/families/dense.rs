//! Families without experts.

use xlaunch_spec::model::{Arch, Parallel};

use super::Family;
use super::shared::{
    ACT, ATTENTION_BIAS, CAUSAL, GELU_TANH, GROUPED, LLAMA_FAMILY, MLP_BIAS, NO_QK_LAYERNORM,
    ONE_KV_HEAD_EACH, WHOLE_WIDTH, eps, grouped, heads_of_width, kv_heads_or_heads, logit_cap, sizes, tied,
    use_bias,
};
use crate::huggingface::key::Meaning::{
    Activation, Cap, Derived, Flag, Number, Only, Parallel as SideBySide, QueryScalar, QueryScale,
    Reciprocal, Size, Unused,
};
use crate::huggingface::key::{Key, field};
use crate::huggingface::layers::Windows;
use crate::huggingface::rope::{ROPE, Rope, Scalings};
use crate::huggingface::tensor_names as names;

pub(super) static DENSE: [Family; 24] = [
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
];

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
