//! Mixtures of experts.

use xlaunch_spec::model::Arch;

use super::Family;
use super::shared::{
    ACT, ATTENTION_BIAS, LLAMA_FAMILY, WHOLE_WIDTH, eps, grouped, heads_of_width, kv_heads_or_heads, sizes,
    tied,
};
use crate::huggingface::key::Meaning::{
    Derived, Flag, Number, Only, Positive, QkNorm, SharedWidth, Size, Unused,
};
use crate::huggingface::key::{Key, field};
use crate::huggingface::layers::Windows;
use crate::huggingface::rope::{ROPE, Rope};
use crate::huggingface::scaling;
use crate::huggingface::tensor_names as names;
use crate::huggingface::without_effect::{FURTHER_BLOCKS, QUANTIZATION};

pub(super) static MIXTURES: [Family; 6] = [
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
