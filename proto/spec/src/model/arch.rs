//! Families of models. A family is a preset of the architecture's keys; only the names of tensors and of the keys in
//! Hugging Face's files depend on it otherwise.

use serde::{Deserialize, Serialize};

use super::{ModelShape, RopeScaling};

/// Family of models: a preset of the keys of the architecture, and the names in Hugging Face's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// GPT-2: learned position embeddings, LayerNorm, GELU, biases.
    Gpt2,
    /// Llama 1 to 3, SmolLM2: rotary position embeddings, RMSNorm, SwiGLU, no biases.
    Llama,
    /// Mistral: Llama, in early versions with windowed attention.
    Mistral,
    /// Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.
    Qwen2,
    /// Qwen3: Llama with norms of each head's queries and keys.
    Qwen3,
    /// SmolLM3: Llama without rotation in every fourth block.
    SmolLm3,
    /// OLMo 2: norms after attention and feed-forward layers, and of all queries and all keys.
    Olmo2,
    /// OLMo 3: OLMo 2 with windowed attention in three of four blocks.
    Olmo3,
    /// Gemma: GELU gates, norm weights relative to 1, scaled embeddings.
    Gemma,
    /// Gemma 2: norms before and after layers, windows in every other block, soft caps.
    Gemma2,
    /// Gemma 3 (text): norms of each head's queries and keys, windows with their own rotary base in five of six blocks.
    Gemma3,
    /// Phi 1, 1.5 and 2: attention and feed-forward layers side by side, partial rotation, LayerNorm, biases.
    Phi,
    /// Phi 3: Llama, with fused matrices in its files.
    Phi3,
    /// StableLM: LayerNorm, SwiGLU, partial rotation.
    StableLm,
    /// StarCoder2: LayerNorm, GELU, biases, rotary position embeddings.
    StarCoder2,
    /// Granite 3: Llama with multipliers of embeddings, residuals, scores and logits.
    Granite,
    /// GPT-NeoX, Pythia: attention and feed-forward layers side by side with a norm each, partial rotation.
    #[serde(rename = "gpt_neox")]
    GptNeoX,
    /// Arcee: Llama with squared ReLU in place of gates.
    Arcee,
    /// ERNIE 4.5 (dense): Llama, with the elements of a rotated pair side by side in its files.
    #[serde(rename = "ernie4_5")]
    Ernie45,
    /// EXAONE 4: norms after layers and of each head, windows in three of four blocks, rotation only in these.
    Exaone4,
    /// GLM-4, 2024: Llama with biases on queries, keys and values, and partial rotation.
    Glm,
    /// GLM-4, 2025: GLM with norms before and after layers.
    Glm4,
    /// Ministral: Mistral, with a window in some blocks.
    Ministral,
    /// Seed-OSS: Llama with biases on queries, keys and values.
    #[serde(rename = "seed_oss")]
    SeedOss,
    /// Mixtral: Mistral with experts.
    Mixtral,
    /// OLMoE: Llama with experts, and norms of all queries and all keys.
    Olmoe,
    /// Qwen3-MoE: Qwen3 with experts.
    #[serde(rename = "qwen3_moe")]
    Qwen3Moe,
    /// Qwen2-MoE: Qwen2 with experts, and a gated one that all tokens use.
    #[serde(rename = "qwen2_moe")]
    Qwen2Moe,
    /// GLM-4.5: Llama with partial rotation, experts balanced by biases, and some that all tokens use.
    #[serde(rename = "glm4_moe")]
    Glm4Moe,
    /// gpt-oss: attention sinks, windows in every other block, experts with biases and bounded gates.
    #[serde(rename = "gpt_oss")]
    GptOss,
}

impl Arch {
    /// Returns all families.
    pub fn all() -> impl Iterator<Item = Self> {
        FAMILIES.iter().map(|shape| shape.arch)
    }

    /// Returns a tiny model of the family. Its keys of the architecture are those of the family's published models.
    pub fn base(self) -> ModelShape {
        FAMILIES[self as usize].clone()
    }
}

/// A tiny model of each family, in the order of [`Arch`].
static FAMILIES: [ModelShape; 30] = [
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO2, OLMO3, GEMMA, GEMMA2, GEMMA3, PHI, PHI3, STABLELM,
    STARCODER2, GRANITE, GPT_NEOX, ARCEE, ERNIE45, EXAONE4, GLM, GLM4, MINISTRAL, SEED_OSS, MIXTRAL, OLMOE,
    QWEN3_MOE, QWEN2_MOE, GLM4_MOE, GPT_OSS,
];

/// Representation of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// A learned vector per position, which is added to the token's embedding.
    Learned,
    /// Rotary position embedding of queries and keys.
    Rotary,
}

/// Kind of the norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// LayerNorm with a bias.
    Layer,
    /// RMSNorm.
    Rms,
}

/// Place of the norms in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum NormPlace {
    /// Inputs of attention and feed-forward layers are normalised.
    Pre,
    /// Outputs of attention and feed-forward layers are normalised before they are added to the residual stream.
    Post,
    /// Inputs and outputs are normalised.
    Both,
}

/// Norms of queries and keys, before their rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// Queries and keys are not normalised.
    None,
    /// RMSNorm of each head, with weights that all heads share.
    Head,
    /// RMSNorm of all queries of a token, and of all its keys.
    Full,
}

/// Activation function of the feed-forward layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x sigmoid(x)`.
    Silu,
    /// GELU by the error function.
    Gelu,
    /// GELU's approximation by tanh.
    GeluTanh,
    /// The square of ReLU.
    Relu2,
    /// `x sigmoid(1.702 x)`.
    QuickGelu,
}

/// Attention and feed-forward layers side by side instead of one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Parallel {
    /// One after the other.
    No,
    /// Side by side, with one norm for both.
    SharedNorm,
    /// Side by side, with a norm each.
    TwoNorms,
}

/// Scores of experts, from the router's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Router {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

pub(super) const LLAMA: ModelShape = ModelShape {
    arch: Arch::Llama,
    layers: 4,
    heads: 4,
    kv_heads: 4,
    head_dim: 32,
    dim: 128,
    ffn: 352,
    seq: 128,
    vocab: 256,
    tied: true,
    positions: Positions::Rotary,
    norm: NormKind::Rms,
    norm_eps: 1e-5,
    norm_place: NormPlace::Pre,
    norm_offset: false,
    qk_norm: QkNorm::None,
    qkv_bias: false,
    attention_bias: false,
    mlp_bias: false,
    head_bias: false,
    activation: Activation::Silu,
    gated: true,
    glu_limit: 0.0,
    glu_offset: 0.0,
    parallel: Parallel::No,
    rope_theta: 1e4,
    rope_scaling: RopeScaling::Default,
    rope_fraction: 1.0,
    no_rope_every: 0,
    window: 0,
    window_pattern: 0,
    windowed_rope_theta: 0.0,
    attention_sinks: false,
    attention_softcap: 0.0,
    logit_softcap: 0.0,
    query_scale: 0.0,
    embedding_scale: 1.0,
    residual_scale: 1.0,
    logit_scale: 1.0,
    experts: 0,
    experts_per_token: 2,
    expert_ffn: 0,
    router: Router::Softmax,
    normalise: true,
    router_logit_bias: false,
    router_bias: false,
    routed_scale: 1.0,
    dense_layers: 0,
    shared_experts: 0,
    shared_gate: false,
};

pub(super) const GPT2: ModelShape =
    ModelShape { arch: Arch::Gpt2, positions: Positions::Learned, rope_fraction: 1.0, ..BIASED };

/// LayerNorm, GELU and biases everywhere.
const BIASED: ModelShape = ModelShape {
    norm: NormKind::Layer,
    qkv_bias: true,
    attention_bias: true,
    mlp_bias: true,
    activation: Activation::GeluTanh,
    gated: false,
    ffn: 512,
    ..LLAMA
};

pub(super) const MISTRAL: ModelShape = ModelShape { arch: Arch::Mistral, ..LLAMA };

pub(super) const QWEN2: ModelShape =
    ModelShape { arch: Arch::Qwen2, qkv_bias: true, norm_eps: 1e-6, rope_theta: 1e6, ..LLAMA };

pub(super) const QWEN3: ModelShape =
    ModelShape { arch: Arch::Qwen3, qk_norm: QkNorm::Head, norm_eps: 1e-6, rope_theta: 1e6, ..LLAMA };

pub(super) const SMOLLM3: ModelShape =
    ModelShape { arch: Arch::SmolLm3, no_rope_every: 4, rope_theta: 2e6, ..LLAMA };

pub(super) const OLMO2: ModelShape = ModelShape {
    arch: Arch::Olmo2,
    norm_place: NormPlace::Post,
    qk_norm: QkNorm::Full,
    norm_eps: 1e-6,
    rope_theta: 5e5,
    tied: false,
    ..LLAMA
};

const OLMO3: ModelShape =
    ModelShape { arch: Arch::Olmo3, window: 4096, window_pattern: 4, windowed_rope_theta: 5e5, ..OLMO2 };

const GEMMA: ModelShape = ModelShape {
    arch: Arch::Gemma,
    norm_offset: true,
    norm_eps: 1e-6,
    activation: Activation::GeluTanh,
    embedding_scale: 0.0,
    ..LLAMA
};

const GEMMA2: ModelShape = ModelShape {
    arch: Arch::Gemma2,
    norm_place: NormPlace::Both,
    window: 4096,
    window_pattern: 2,
    attention_softcap: 50.0,
    logit_softcap: 30.0,
    ..GEMMA
};

pub(super) const GEMMA3: ModelShape = ModelShape {
    arch: Arch::Gemma3,
    norm_place: NormPlace::Both,
    qk_norm: QkNorm::Head,
    window: 512,
    window_pattern: 6,
    rope_theta: 1e6,
    windowed_rope_theta: 1e4,
    ..GEMMA
};

pub(super) const GPT_NEOX: ModelShape = ModelShape {
    arch: Arch::GptNeoX,
    parallel: Parallel::TwoNorms,
    rope_fraction: 0.25,
    activation: Activation::Gelu,
    tied: false,
    ..BIASED
};

const PHI: ModelShape = ModelShape {
    arch: Arch::Phi,
    parallel: Parallel::SharedNorm,
    rope_fraction: 0.5,
    head_bias: true,
    tied: false,
    ..BIASED
};

const PHI3: ModelShape = ModelShape { arch: Arch::Phi3, ..LLAMA };

const STABLELM: ModelShape =
    ModelShape { arch: Arch::StableLm, norm: NormKind::Layer, rope_fraction: 0.25, tied: false, ..LLAMA };

const STARCODER2: ModelShape = ModelShape { arch: Arch::StarCoder2, ..BIASED };

const GRANITE: ModelShape = ModelShape { arch: Arch::Granite, ..LLAMA };

const ARCEE: ModelShape = ModelShape {
    arch: Arch::Arcee,
    activation: Activation::Relu2,
    gated: false,
    ffn: 512,
    tied: false,
    ..LLAMA
};

const ERNIE45: ModelShape = ModelShape { arch: Arch::Ernie45, rope_theta: 5e5, ..LLAMA };

const EXAONE4: ModelShape = ModelShape {
    arch: Arch::Exaone4,
    norm_place: NormPlace::Post,
    qk_norm: QkNorm::Head,
    window: 4096,
    window_pattern: 4,
    no_rope_every: 4,
    rope_theta: 1e6,
    tied: false,
    ..LLAMA
};

const GLM: ModelShape =
    ModelShape { arch: Arch::Glm, qkv_bias: true, rope_fraction: 0.5, tied: false, ..LLAMA };

const GLM4: ModelShape = ModelShape { arch: Arch::Glm4, norm_place: NormPlace::Both, qkv_bias: false, ..GLM };

const MINISTRAL: ModelShape = ModelShape { arch: Arch::Ministral, window: 4096, tied: false, ..LLAMA };

const SEED_OSS: ModelShape =
    ModelShape { arch: Arch::SeedOss, qkv_bias: true, norm_eps: 1e-6, rope_theta: 1e7, tied: false, ..LLAMA };

pub(super) const MIXTRAL: ModelShape =
    ModelShape { arch: Arch::Mixtral, experts: 8, ffn: 176, rope_theta: 1e6, tied: false, ..LLAMA };

pub(super) const OLMOE: ModelShape = ModelShape {
    arch: Arch::Olmoe,
    experts: 8,
    ffn: 176,
    normalise: false,
    qk_norm: QkNorm::Full,
    tied: false,
    ..LLAMA
};

pub(super) const QWEN3_MOE: ModelShape = ModelShape {
    arch: Arch::Qwen3Moe,
    experts: 8,
    expert_ffn: 176,
    qk_norm: QkNorm::Head,
    norm_eps: 1e-6,
    rope_theta: 1e6,
    tied: false,
    ..LLAMA
};

const QWEN2_MOE: ModelShape = ModelShape {
    arch: Arch::Qwen2Moe,
    experts: 8,
    expert_ffn: 88,
    normalise: false,
    shared_experts: 4,
    shared_gate: true,
    qkv_bias: true,
    norm_eps: 1e-6,
    rope_theta: 1e6,
    tied: false,
    ..LLAMA
};

const GLM4_MOE: ModelShape = ModelShape {
    arch: Arch::Glm4Moe,
    experts: 8,
    expert_ffn: 88,
    router: Router::Sigmoid,
    router_bias: true,
    dense_layers: 1,
    shared_experts: 1,
    qkv_bias: true,
    rope_theta: 1e6,
    rope_fraction: 0.5,
    tied: false,
    ..LLAMA
};

pub(super) const GPT_OSS: ModelShape = ModelShape {
    arch: Arch::GptOss,
    experts: 8,
    ffn: 88,
    router_logit_bias: true,
    activation: Activation::QuickGelu,
    glu_limit: 7.0,
    glu_offset: 1.0,
    qkv_bias: true,
    attention_bias: true,
    mlp_bias: true,
    attention_sinks: true,
    window: 128,
    window_pattern: 2,
    rope_theta: 1.5e5,
    tied: false,
    ..LLAMA
};
