//! Types of models that are refused, each with the reason and the nearest family that is supported. Pure.

use super::families::FAMILIES;

const EXPERTS: &str = "its mixture of experts is another architecture";
const LINEAR: &str = "it has linear attention";
const STATE_SPACE: &str = "it has state space layers";
const LATENT: &str = "it has latent attention";
const IMAGES: &str = "it is a model of images or sound";

/// Beginnings of types with the reason and the nearest supported type. The first match counts.
const REASONS: &[(&str, &str, &str)] = &[
    ("qwen3_next", LINEAR, "qwen3"),
    ("qwen3_5", LINEAR, "qwen3"),
    ("qwen3_vl", IMAGES, "qwen3"),
    ("qwen3_", "it is another architecture", "qwen3"),
    ("qwen2_", IMAGES, "qwen2"),
    ("llama4", EXPERTS, "mixtral"),
    ("mllama", IMAGES, "llama"),
    ("ministral", "it is another architecture", "mistral"),
    ("mistral", IMAGES, "mistral"),
    ("deepseek", LATENT, "glm4_moe"),
    ("glm4_moe_lite", LATENT, "glm4_moe"),
    ("glm4v", IMAGES, "glm4_moe"),
    ("glm4", "it rotates elements in another order", "glm4_moe"),
    ("gpt_oss", "it has attention sinks, and experts with biases and clamped activations", "mixtral"),
    ("flex_olmo", EXPERTS, "olmoe"),
    ("olmo_hybrid", LINEAR, "olmo3"),
    ("olmo", "its norms have no weights", "olmo2"),
    ("gemma3n", "it has embeddings of each layer", "gemma3_text"),
    ("gemma4", "it has embeddings of each layer and shared caches", "gemma3_text"),
    ("recurrent_gemma", LINEAR, "gemma2"),
    ("paligemma", IMAGES, "gemma2"),
    ("phimoe", EXPERTS, "mixtral"),
    ("phi4", IMAGES, "phi3"),
    ("granitemoehybrid", STATE_SPACE, "granite"),
    ("granitemoe", EXPERTS, "mixtral"),
    ("gpt_neo", "its attention is not scaled", "gpt_neox"),
    ("gptj", "it rotates elements in another order", "gpt_neox"),
    ("codegen", "it rotates elements in another order", "gpt_neox"),
    ("gpt_bigcode", "it has multi-query attention with learned positions", "starcoder2"),
    ("falcon_mamba", STATE_SPACE, "llama"),
    ("falcon_h1", STATE_SPACE, "llama"),
    ("falcon", "its fused matrices are not known here", "gpt_neox"),
    ("mpt", "its attention has linear biases", "gpt_neox"),
    ("bloom", "its attention has linear biases", "gpt_neox"),
    ("opt", "its positions have an offset", "gpt2"),
    ("cohere", "it rotates elements in another order", "llama"),
    ("nemotron", "its norms are LayerNorm with an offset", "llama"),
    ("mamba", STATE_SPACE, "llama"),
    ("bamba", STATE_SPACE, "llama"),
    ("jamba", STATE_SPACE, "llama"),
    ("rwkv", LINEAR, "llama"),
];

/// Returns why a type of models is refused, and what is supported instead.
pub(super) fn reason(model_type: Option<&str>) -> String {
    let supported: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
    let supported = supported.join(", ");
    let Some(model_type) = model_type else { return format!("it must be one of {supported}") };
    if model_type == "gemma3" {
        return "it is a model of images; save the text model in Python, which has the type `gemma3_text`: \
                `m = AutoModelForImageTextToText.from_pretrained(DIR)`, `t = Gemma3ForCausalLM(m.config.text_config)`, \
                `t.model, t.lm_head = m.model.language_model, m.lm_head`, `t.save_pretrained(OUT)`"
            .into();
    }
    match REASONS.iter().find(|(beginning, ..)| model_type.starts_with(beginning)) {
        Some((_, reason, nearest)) => {
            format!("{reason}; the nearest supported type is `{nearest}` (all: {supported})")
        }
        None => format!("supported are {supported}"),
    }
}
