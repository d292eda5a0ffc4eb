//! Types of models that are refused, each with the reason and the nearest family that is supported. Pure.

use serde_json::{Map, Value};

use super::families::Family;

const EXPERTS: &str = "its mixture of experts is another architecture";
const LINEAR: &str = "it has linear attention";
const STATE_SPACE: &str = "it has state space layers";
const LATENT: &str = "it has latent attention";
const IMAGES: &str = "it is a model of images or sound";
const ORDER: &str = "it rotates elements in another order";

/// Beginnings of types with the reason and the nearest supported type. The first match counts.
const REASONS: &[(&str, &str, &str)] = &[
    ("qwen3_next", LINEAR, "qwen3"),
    ("qwen3_5", LINEAR, "qwen3"),
    ("qwen3_vl", IMAGES, "qwen3"),
    ("qwen3_", "it is another architecture", "qwen3"),
    ("qwen2_", IMAGES, "qwen2"),
    ("llama4", EXPERTS, "mixtral"),
    ("mllama", IMAGES, "llama"),
    ("ministral3", "its queries are scaled by their position", "ministral"),
    ("mistral4", LATENT, "glm4_moe"),
    ("mistral", IMAGES, "mistral"),
    ("deepseek", LATENT, "glm4_moe"),
    ("glm4_moe_lite", LATENT, "glm4_moe"),
    ("glm4v_moe", IMAGES, "glm4_moe"),
    ("glm4v", IMAGES, "glm4"),
    ("glm_moe_dsa", LATENT, "glm4_moe"),
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
    ("gpt_neox_japanese", "it is another architecture", "gpt_neox"),
    ("gpt_neo", "its attention is not scaled", "gpt_neox"),
    ("gptj", ORDER, "gpt_neox"),
    ("codegen", ORDER, "gpt_neox"),
    ("gpt_bigcode", "it has multi-query attention with learned positions", "starcoder2"),
    ("falcon_mamba", STATE_SPACE, "llama"),
    ("falcon_h1", STATE_SPACE, "llama"),
    ("falcon", "its fused matrices are not known here", "gpt_neox"),
    ("mpt", "its attention has linear biases", "gpt_neox"),
    ("bloom", "its attention has linear biases", "gpt_neox"),
    ("opt", "its positions have an offset", "gpt2"),
    ("cohere", "its norms are LayerNorm without biases", "stablelm"),
    ("nemotron_h", STATE_SPACE, "llama"),
    ("nemotron", "its norms are LayerNorm with an offset", "llama"),
    ("ernie4_5_moe", EXPERTS, "glm4_moe"),
    ("ernie4_5_vl", IMAGES, "ernie4_5"),
    ("exaone_moe", EXPERTS, "exaone4"),
    ("exaone", "it is another architecture", "exaone4"),
    ("helium", ORDER, "ernie4_5"),
    ("hunyuan", "it normalises queries and keys after their rotation", "qwen3"),
    ("lfm2", "it has convolutions", "qwen3"),
    ("kimi_linear", LINEAR, "glm4_moe"),
    ("minimax_m2", "it is another architecture", "glm4_moe"),
    ("minimax", LINEAR, "mixtral"),
    ("apertus", "its activation function is xIELU", "qwen3"),
    ("mamba", STATE_SPACE, "llama"),
    ("bamba", STATE_SPACE, "llama"),
    ("jamba", STATE_SPACE, "llama"),
    ("rwkv", LINEAR, "llama"),
    ("zamba", STATE_SPACE, "llama"),
    ("bitnet", "its weights have three values", "llama"),
    ("dbrx", EXPERTS, "mixtral"),
    ("jetmoe", EXPERTS, "mixtral"),
    ("dots1", EXPERTS, "glm4_moe"),
    ("longcat", LATENT, "glm4_moe"),
    ("minicpm3", LATENT, "glm4_moe"),
    ("youtu", LATENT, "glm4_moe"),
    ("nanochat", "its norms have no weights", "qwen3"),
    ("vaultgemma", "it has no norms after its layers", "gemma2"),
];

/// Returns why the type of a `config.json` is refused, and what is supported instead.
pub(super) fn reason(config: &Map<String, Value>) -> String {
    let supported: Vec<&str> = Family::all().map(|family| family.model_type).collect();
    let supported = supported.join(", ");
    let Some(model_type) = config.get("model_type").and_then(Value::as_str) else {
        return format!("it must be one of {supported}");
    };
    if model_type == "gemma3" {
        return "it is a model of images; save the text model in Python, which has the type `gemma3_text`: \
                `m = AutoModelForImageTextToText.from_pretrained(DIR)`, `t = Gemma3ForCausalLM(m.config.text_config)`, \
                `t.model, t.lm_head = m.model.language_model, m.lm_head`, `t.save_pretrained(OUT)`"
            .into();
    }
    let known = REASONS.iter().find(|(beginning, ..)| model_type.starts_with(beginning));
    let text_model = || Family::named(config.get("text_config")?.as_object()?);
    let nearest = match known {
        Some((_, reason, nearest)) => Some((*reason, *nearest)),
        // Models of images have the configuration of their text model in their own.
        None => text_model().map(|family| (IMAGES, family.model_type)),
    };
    match nearest {
        Some((reason, nearest)) => {
            format!("{reason}; the nearest supported type is `{nearest}` (all: {supported})")
        }
        None => format!("supported are {supported}"),
    }
}
